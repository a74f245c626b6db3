"""A connection between two nodes: frames, first of a handshake, and then of all else.

Both ends are alike: whoever dialled, either may ask the other for work.
"""

from collections.abc import Sequence

from shoal.domain.errors import NotAdmitted, PeerError
from shoal.domain.vocabulary import (
    Conditioned,
    Dismiss,
    Draining,
    Offered,
    Reported,
)
from shoal.protocols.crowd import EVERYBODY, From, To
from shoal.protocols.framing import Whole
from shoal.protocols.macfleet.conversation import SPOKEN, Conversation
from shoal.protocols.macfleet.desk import Seat
from shoal.protocols.macfleet.handshake import (
    Agreed,
    Refusal,
    client,
    server,
)
from shoal.protocols.macfleet.hearing import Said
from shoal.protocols.macfleet.introduction import met, peer_of, seat_of
from shoal.protocols.macfleet.ourselves import Ourselves
from shoal.protocols.macfleet.peer import Caller, Peer
from shoal.protocols.macfleet.standing import State
from shoal.protocols.macfleet.wire.chunks import Take
from shoal.protocols.macfleet.wire.frames import PAYLOAD_MAX, Frame, FrameReader
from shoal.protocols.session import (
    GOING_ON,
    Batch,
    Bulk,
    Close,
    Notice,
    Output,
    Send,
    broken,
)

AT_ONCE = 2.0  # seconds within which who does not want us hangs up


class PeerSession:
    """A connection to one peer, which may be read whole or piece by piece."""

    head_size = FrameReader.head_size
    accepts = SPOKEN

    def __init__(self, own: Ourselves, caller: Caller) -> None:
        self._own = own
        self._caller = caller
        begin = client if caller.dialled else server
        self._handshake = begin(own.at_hand(), caller)
        self._reader = FrameReader(self._handshake.limit)
        self._conversation: Conversation | None = None
        self._states: dict[type, State] = {}  # the newest of each
        self._seat: Seat | None = None
        self._met_at = 0.0
        self._unheard = True  # nothing has come since
        self._encrypted = False
        self._begun = False
        self._closed = False

    @property
    def deadline(self) -> float | None:
        if self._closed or not self._begun:
            return None
        if self._conversation is None:
            return self._handshake.deadline
        return self._conversation.deadline

    # What a link asks that cuts messages.

    def opened(self, certificate: bytes) -> None:
        self._encrypted = bool(certificate)
        self._handshake.opened(certificate)

    def body_size(self, head: bytes) -> int:
        return self._reader.body_size(head)

    def place(self, head: bytes, take: Take) -> memoryview | None:
        if self._conversation is None:
            return None
        return self._conversation.place(head, take)

    def checksum(self, piece: memoryview, so_far: int) -> int:
        return self._reader.checksum(piece, so_far)

    def take(self, messages: Sequence[Whole], now: float) -> Sequence[From | Output]:
        """Take frames that arrived together.

        One that is no good ends the connection, for nothing after it can be relied on.
        """
        outputs: list[From | Output] = []
        try:
            for whole in messages:
                if self._closed:
                    break
                outputs += self._hear(self._reader.read(whole), now)
        except PeerError as error:
            outputs += self._break(error, now)
        return outputs

    # What every session is told.

    def receive(self, batch: Batch, now: float) -> Sequence[From | Output]:
        outputs: list[From | Output] = []
        try:
            for data in batch:
                if isinstance(data, str):
                    raise PeerError("text message on a byte stream")
                if self._closed:
                    break
                for whole in self._reader.cut(data):
                    outputs += self.take((whole,), now)
        except PeerError as error:
            outputs += self._break(error, now)
        return outputs

    def issue(self, message: To, now: float) -> Sequence[Output]:
        word = message.word
        if self._closed:
            return ()
        if self._conversation is not None:
            said = self._conversation.issue(word, now)
            if any(isinstance(each, Close) for each in said):
                self._leave()
            return said
        if isinstance(word, Offered | Conditioned | Draining | Reported):
            self._states[type(word)] = word  # to be said when there is somebody
        return ()

    def tick(self, now: float) -> Sequence[From | Output]:
        if self._closed:
            return ()
        if not self._begun:
            self._begun = True
            return [Send(each) for each in self._handshake.begin(now)]
        if self._conversation is not None:
            return self._meant(self._conversation.tick(now))
        try:
            self._handshake.tick(now)
        except Refusal as refusal:
            return self._refused(refusal, now)
        return ()

    def parted(self, now: float) -> Sequence[Output]:
        """Take note that the peer has hung up."""
        if self._closed:
            return ()
        if self._conversation is None:
            self._give_up(self._handshake.broken_off("hung up"), now)
        elif self._unheard and self._caller.dialled and now - self._met_at < AT_ONCE:
            self._own.rejected(self._caller.address or "the other end")
        self._leave()
        return ()

    # The handshake.

    def _hear(self, frame: Frame, now: float) -> Sequence[From | Output]:
        if self._conversation is not None:
            self._unheard = False
            if self._seat is not None:
                self._seat.heard = now
            return self._meant(self._conversation.hear(frame, now))
        try:
            step = self._handshake.hear(frame, now)
        except Refusal as refusal:
            return self._refused(refusal, now)
        sends = [Send(each) for each in step.send]
        if isinstance(step, Agreed):
            return [*sends, *self._agreed(step, now)]
        self._reader.limit = self._handshake.limit
        return sends

    def _agreed(self, agreed: Agreed, now: float) -> Sequence[From | Output]:
        """Meet the peer, if there is room for it."""
        own, caller = self._own, self._caller
        if not caller.dialled:
            own.limiter.right(caller.address, now)
        peer = peer_of(own, agreed, encrypted=self._encrypted)
        conversation = Conversation(own, peer, now)
        try:
            self._seat = self._seated(peer, now)
        except NotAdmitted as error:
            said = conversation.issue(Dismiss(str(error)), now)
            return self._meant(said)
        if peer.ours and own.fleet is not None:
            own.fleet.is_ours(peer.name)
        self._conversation, self._met_at = conversation, now
        self._reader.limit = PAYLOAD_MAX
        outputs: list[From | Output] = [From(EVERYBODY, met(peer, caller))]
        outputs += self._meant(conversation.begin())
        for word in self._states.values():
            outputs += self._meant(conversation.issue(word, now))
        self._states.clear()
        return outputs

    def _seated(self, peer: Peer, now: float) -> Seat:
        """Return a seat for a peer.  Raises NotAdmitted if there is none."""
        if not peer.name:
            raise NotAdmitted("a node without an id cannot be told from others")
        seat = seat_of(peer, self._caller, now)
        self._own.desk.take(seat, now)
        return seat

    # The end.

    def _break(self, error: PeerError, now: float) -> Sequence[From | Output]:
        """End the connection of a peer that has broken the protocol."""
        if self._closed:
            return ()
        if self._conversation is None:
            self._give_up(self._handshake.broken_off(str(error)), now)
        self._leave()
        return (broken(error),)

    def _refused(self, refusal: Refusal, now: float) -> Sequence[From | Output]:
        self._give_up(refusal, now)
        self._leave()
        sends = [Send(each) for each in refusal.send]
        if refusal.namesake and self._own.namesake():
            return [*sends, Close(str(refusal), GOING_ON)]
        return [*sends, Close(str(refusal))]

    def _give_up(self, refusal: Refusal, now: float) -> None:
        """Let those know who have to that the handshake has failed."""
        own, address = self._own, self._caller.address
        if self._caller.dialled:
            if refusal.final:
                own.turned_away(str(refusal))
        elif refusal.counts:
            own.limiter.wrong(address, now)
        else:
            own.limiter.left(address, now)

    def _meant(self, said: Sequence[Said]) -> list[From | Output]:
        """Say from whom words are; take note of the end."""
        outputs: list[From | Output] = []
        for each in said:
            if isinstance(each, Send | Bulk | Close | Notice):
                outputs.append(each)
                if isinstance(each, Close):
                    self._leave()
            else:
                outputs.append(From(EVERYBODY, each))
        return outputs

    def _leave(self) -> None:
        self._closed = True
        if self._seat is not None:
            self._own.desk.leave(self._seat)
