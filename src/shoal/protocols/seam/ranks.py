"""What a wire provides for collectives: how ranks know each other, and send arrays.

A *rank* is one process of a training run.  Ranks exchange two kinds of messages, each a
head of ``head_size`` bytes and a payload:

* *Segments*, between Shoal's ranks: parts of an array whose size and place both ends
  know from the schedule, so that they are received where they belong.
* *Arrays*, with ranks of other programs: whole, with their shape and dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from shoal.domain.errors import PeerError

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

GENERATION_MAX = 0xFFF
STEP_MAX = 0xFFFFF


class SegmentLabel(NamedTuple):
    """What a segment belongs to.

    ``kind`` is the collective's number (1 to 255), ``operation`` counts the operations
    of one sender for one receiver, and ``segment`` the segments of an operation.
    ``generation`` and ``step`` are those of the group, modulo ``GENERATION_MAX + 1``
    and ``STEP_MAX + 1``.
    """

    kind: int
    operation: int
    segment: int
    generation: int
    step: int


class SegmentHead(NamedTuple):
    """A received head: what the payload belongs to, and its size in bytes."""

    label: SegmentLabel
    size: int


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """A rank's id, and the secret that all ranks of its group have.

    ``fleet`` names the fleet to whose programs ``secret`` is the token, in a group with
    ranks of other programs.  An empty secret: no proof is required.
    """

    node_id: str
    secret: str
    random_bytes: Callable[[int], bytes]
    fleet: str = ""


class HandshakeStep(NamedTuple):
    """Bytes to send; ``peer`` is the other rank's id once both ends agree."""

    send: bytes
    peer: str | None


class RankRefused(PeerError):
    """A handshake failed; ``send`` are the last bytes for the peer."""

    def __init__(self, reason: str, send: bytes = b"") -> None:
        super().__init__(reason)
        self.send = send


class RankHandshake(Protocol):
    """One end of a handshake, without I/O.  Times are monotonic seconds.

    ``body_size`` and ``receive`` raise RankRefused.
    """

    head_size: int

    def on_open(self, certificate: bytes) -> None:
        """Set the fingerprint of the server's certificate; empty: without TLS."""

    def start(self, now: float) -> bytes:
        """Return the first bytes to send."""

    def body_size(self, head: bytes) -> int:
        """Return the size of the payload after a head."""

    def receive(self, head: bytes, body: bytes, now: float) -> HandshakeStep:
        """Handle a message."""


class RankWire(Protocol):
    """How ranks prove to each other that they are of one group."""

    head_size: int

    def client(
        self, identity: RankIdentity, server: str, address: str
    ) -> RankHandshake:
        """Return the dialling end; ``server`` is the expected id, ``""``: any."""

    def server(
        self, identity: RankIdentity, address: str, secret_of: Callable[[str], str]
    ) -> RankHandshake:
        """Return the accepting end.

        ``secret_of`` takes the client's id and returns what it has to prove, or raises
        NotAdmitted with the reason.
        """


class SegmentWire(RankWire, Protocol):
    """The messages between Shoal's ranks."""

    def encode_segment(self, label: SegmentLabel, size: int) -> bytes:
        """Return the head of a segment."""

    def decode_segment(self, head: bytes) -> SegmentHead:
        """Return the head of a segment.  Raises PeerError for other messages."""


class ArrayWire(RankWire, Protocol):
    """The messages with ranks of other programs."""

    payload_max: int
    """Bytes of one array, with its shape and dtype."""

    def encode_array(self, array: "Array") -> tuple[bytes, memoryview]:
        """Return what precedes an array's numbers, and these, without a copy.

        Raises InvalidRequest for an unsupported dtype, and TooLarge.
        """

    def array_size(self, head: bytes) -> int:
        """Return the size of the payload after a head.

        Raises PeerError for messages that are not arrays, or exceed ``payload_max``.
        """

    def decode_array(self, head: bytes, payload: memoryview) -> "Array":
        """Return the array in a payload: a view of it.

        Raises PeerError if it is malformed, or its checksum is wrong.
        """
