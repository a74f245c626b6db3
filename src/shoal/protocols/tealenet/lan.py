"""A connection on the local network: one peer, and a length before each message."""

from collections.abc import Callable, Sequence

from shoal.protocols.crowd import CrowdSession, From, To
from shoal.protocols.framing import LengthPrefixed
from shoal.protocols.session import Batch, Bulk, Close, Notice, Output, Send
from shoal.protocols.tealenet.conversation import Conversation, Word
from shoal.protocols.tealenet.desk import Desk
from shoal.protocols.tealenet.manners import LAN
from shoal.protocols.tealenet.ourselves import Ourselves, Role
from shoal.protocols.tealenet.peer import Caller

ONLY = "1"  # the peer, of which there is one
MESSAGE_MAX = LAN.task_max  # bytes of the largest message
GREETING_MAX = (
    512 << 10
)  # bytes of a message of who is not let in yet: anybody can dial


class OnePeer:
    """A conversation, as a connection on which there could be many peers."""

    def __init__(
        self, conversation: Conversation, let_in: Callable[[], None] | None = None
    ) -> None:
        self._conversation = conversation
        self._let_in = let_in  # what to do when the peer is
        self.accepts = conversation.accepts

    @property
    def deadline(self) -> float | None:
        return self._conversation.deadline

    def receive(self, batch: Batch, now: float) -> Sequence[From | Output]:
        heard = _heard(self._conversation.receive(batch, now))
        if self._let_in is not None and self._conversation.lets_in:
            self._let_in()
            self._let_in = None
        return heard

    def issue(self, message: To, now: float) -> Sequence[Output]:
        return self._conversation.issue(message.word, now)

    def tick(self, now: float) -> Sequence[From | Output]:
        return _heard(self._conversation.tick(now))


def lan_session(own: Ourselves, caller: Caller, desk: Desk) -> CrowdSession:
    """Return a session for a new connection.

    A worker takes larger messages: they come from whom it has joined.
    """
    conversation = Conversation(own, caller, LAN, desk)
    message_max = LAN.request_max(to_worker=own.role is Role.WORKER)
    if caller.dialled:
        return LengthPrefixed(OnePeer(conversation), message_max)
    peer = OnePeer(conversation, lambda: session.allow(message_max))
    session = LengthPrefixed(peer, GREETING_MAX)
    return session


def _heard(outputs: Sequence[Word | Output]) -> list[From | Output]:
    return [
        each if isinstance(each, Send | Bulk | Close | Notice) else From(ONLY, each)
        for each in outputs
    ]
