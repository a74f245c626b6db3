"""What a handshake takes, and what it comes to: the names that both roles share."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.handshake.outstanding import Outstanding
from shoal.protocols.macfleet.wire.frames import Frame
from shoal.protocols.macfleet.wire.hardware import Profile
from shoal.protocols.session import Admission, Identity, Pass

STEP_LIMIT = 10.0  # seconds for each message of the other's to come
ID_MAX = 256  # bytes of a node's id in UTF-8
CHALLENGE = 32  # bytes
FIRST_MAX = ID_MAX + CHALLENGE  # bytes of the first message
MESSAGE_MAX = 10 << 10  # bytes of any other: hardware of 8 KiB, and what goes with it


class Strength(Enum):
    """How the two ends of a connection have come to know each other."""

    OPEN = "open"  # nobody proves anything
    V1 = "v1"  # the fleet's token, in a way that can be mirrored
    V2 = "v2"  # the same, and hardware that is signed
    STRONG = "strong"  # bound to the channel, between our own


USUAL = frozenset({Strength.OPEN, Strength.V2, Strength.STRONG})
"""What is spoken if nothing else is said; without ``STRONG`` it is not offered."""


@dataclass(frozen=True, slots=True)
class Own:
    """What one end is and has: the same for all its connections.

    ``node_id`` has at most ``ID_MAX`` bytes.  ``key`` is the fleet's (32 bytes), and
    None in an open fleet or for who joins by a join token; ``digest`` is the SHA-256 of
    whichever token there is, and empty if there is none.  ``fleet`` is the fleet's id
    where that counts.  ``profile`` is our hardware as JSON, ``features`` what we say
    that we can besides.  ``outstanding`` belongs to all connections of the node.
    Without an ``admission`` whoever has the token of ``digest`` is let in, and without
    ``verifies`` nobody is known by a key.
    """

    node_id: str
    key: bytes | None
    profile: bytes
    draw: Callable[[int], bytes]
    outstanding: Outstanding
    digest: bytes = b""
    fleet: str = ""
    features: frozenset[str] = frozenset()
    identity: Identity | None = None
    verifies: Callable[[bytes, bytes, bytes], bool] | None = None
    admission: Admission | None = None
    accepts: frozenset[Strength] = USUAL


@dataclass(frozen=True, slots=True)
class StrongPeer:
    """What one of our own has said and proved.

    ``public_key`` is proved, and empty if there is none.  ``has_token`` says whether it
    proved a token that we have as well; ``admitted`` by which join token it came, if we
    let it in.  ``features`` and ``version`` are what it says of itself.
    """

    has_token: bool
    public_key: bytes = b""
    admitted: Pass = Pass()  # noqa: RUF009  # it is frozen
    features: frozenset[str] = frozenset()
    version: int = 1


@dataclass(frozen=True, slots=True)
class Continue:
    """Send these frames, and hand in what comes next."""

    send: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Agreed:
    """The two ends know each other; send these frames, and the handshake is over.

    ``profile`` is the other's hardware where it said so, and ``strong`` is there where
    ``strength`` is ``STRONG``.  A client agrees in ``V1`` and ``V2`` before it hears
    whether the server does: if then the connection ends at once, it was turned away
    (``rejected``).
    """

    send: tuple[bytes, ...]
    peer_id: str
    profile: Profile | None
    strength: Strength
    strong: StrongPeer | None = None


Step: TypeAlias = Continue | Agreed


class Refusal(PeerError):
    """The handshake failed; send ``send`` and close.

    ``counts`` says whether it was a wrong secret, or may have been one, so that the
    address is to be held to account.  ``final`` says that to dial again the same way is
    of no use; the text then says what to do.  ``namesake``: the other end has our own
    id.
    """

    def __init__(
        self,
        why: str,
        *,
        counts: bool = False,
        final: bool = False,
        namesake: bool = False,
        send: tuple[bytes, ...] = (),
    ) -> None:
        super().__init__(why)
        self.counts = counts
        self.final = final
        self.namesake = namesake
        self.send = send


class Handshake(Protocol):
    """One end's part, as a state machine: frames in, frames out.  Times are monotonic.

    After Agreed or Refusal it is over, and nothing is called any more.
    """

    @property
    def deadline(self) -> float:
        """When ``tick`` is due."""
        ...

    @property
    def limit(self) -> int:
        """Bytes of payload that the next frame may have; it grows after the first."""
        ...

    def opened(self, certificate: bytes) -> None:
        """Take the fingerprint of the server's certificate, before ``begin``."""
        ...

    def begin(self, now: float) -> list[bytes]:
        """Return the frames to begin with."""
        ...

    def hear(self, frame: Frame, now: float) -> Step:
        """Take the other's next frame.

        Raises Refusal.
        """
        ...

    def tick(self, now: float) -> None:
        """Note that time passes.

        Raises Refusal if the other's next message is late.
        """
        ...

    def broken_off(self, why: str) -> Refusal:
        """Return what it means that the connection ends now, or cannot be read."""
        ...
