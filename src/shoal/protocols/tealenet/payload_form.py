"""The form of the messages of one conversation: payloads wrapped in ``_0``, or flat.

TealeNet's document has flat payloads; real peers wrap them, and Macs read no other
form.  Both ends of a conversation therefore write the form of the peer that cannot read
both: this end adopts the form of the peer's first message.
"""

from collections.abc import Sequence

from shoal.protocols.seam.session import Data
from shoal.protocols.tealenet.codec.envelope import encode, is_flat
from shoal.protocols.tealenet.codec.messages import SentMessage


class PayloadForm:
    """The form in which this end writes to one peer.

    Until the peer has sent a message its form is not ``known``: the first message is
    wrapped, and what has to be repeated is written in both forms.

    One object can serve successive connections to an address: a peer that closes the
    connection without a word may be unable to read the form of the greeting, so the
    next one begins with the other form.
    """

    def __init__(self) -> None:
        self.flat = False
        self.known = False
        self._unanswered = False  # whether the last session got no message

    def start_session(self) -> None:
        """Begin a conversation; the peer has to show its form again."""
        if self._unanswered:
            self.flat = not self.flat
        self._unanswered, self.known = True, False

    def learn(self, data: Data) -> None:
        """Adopt the form of the peer's first message; ignore what is no message."""
        flat = None if self.known else is_flat(data)
        if flat is not None:
            self.flat, self.known, self._unanswered = flat, True, False

    def encode(self, message: SentMessage) -> bytes:
        """Encode a message.  Raises PeerError if it is nested too deeply."""
        return encode(message, self.flat)

    def encode_again(self, message: SentMessage) -> Sequence[bytes]:
        """Encode a message that repeats an unanswered one."""
        encoded = self.encode(message)
        return (encoded,) if self.known else (encoded, encode(message, not self.flat))
