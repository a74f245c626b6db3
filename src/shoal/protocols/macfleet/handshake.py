"""The handshake's settings, steps and outcome, and which challenges a node answers.

A secure node answers a challenge of 32 bytes with its HMAC under the fleet's key, and
has to do so before it knows who asks (v1, v2).  An attacker can therefore have any 32
bytes signed, except three kinds:

* A challenge that a Shoal node drew ends with a mark, and no Shoal node sends one to
  another in v1 or v2: they use the strong handshake.  If either end sees the mark
  there, someone in between has removed the offer, or relays another node's challenge.
  So Shoal nodes answer none of each other's challenges.  (The idea of RFC 8446,
  section 4.1.3, on downgrades.)
* Bytes that could be the signed part of a heartbeat: ``id:nonce`` or
  ``id:nonce:hardware``.
* A challenge that this node itself has sent lately (``SentChallenges``).

An attacker can still obtain: signatures of 32 bytes that look random, each of which
lets them test tokens offline; heartbeats without hardware of nodes whose id has fewer
than ``ID_MIN`` bytes, as only Shoal nodes may have it, or begins with a control
character (the suffix does); and a challenge relayed to a node that is not Shoal's.
Each shows the attacker's address and counts as a failed guess.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from typing import Protocol, TypeAlias

from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.codec.frames import Frame
from shoal.protocols.macfleet.codec.hardware import HardwareProfile
from shoal.protocols.seam.session import AdmissionCheck, AdmissionGrant, Identity

REMEMBERED_FOR = 30.0  # seconds; for an answer that comes later nobody waits
REMEMBERED_MAX = 16_384  # challenges; the one that was put longest ago goes first


class SentChallenges:
    """Challenges by what they are.  Times are monotonic seconds.

    When it is full the oldest goes, and nobody is kept out: by ``CHALLENGE_MARK`` each
    of them is known besides.
    """

    def __init__(self) -> None:
        self._sent: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, challenge: bytes) -> bool:
        """Whether it is one of ours."""
        return challenge in self._sent

    def add(self, challenge: bytes, now: float) -> None:
        """Note a challenge of ours, and forget those that nobody answers any more."""
        while self._sent:
            oldest, at = next(iter(self._sent.items()))
            if now < at + REMEMBERED_FOR and len(self._sent) < REMEMBERED_MAX:
                break
            del self._sent[oldest]
        self._sent[challenge] = now


STEP_TIMEOUT = 10.0  # seconds for each message of the other's to come
ID_MAX = 256  # bytes of a node's id in UTF-8
CHALLENGE_SIZE = 32  # bytes
FIRST_MAX = ID_MAX + CHALLENGE_SIZE  # bytes of the first message
MESSAGE_MAX = 10 << 10  # bytes of any other: hardware of 8 KiB, and what goes with it


class HandshakeStrength(Enum):
    """How the two ends of a connection have come to know each other."""

    OPEN = "open"  # nobody proves anything
    V1 = "v1"  # the fleet's token, in a way that can be mirrored
    V2 = "v2"  # the same, and hardware that is signed
    STRONG = "strong"  # bound to the channel, between our own


DEFAULT_STRENGTHS = frozenset(
    {HandshakeStrength.OPEN, HandshakeStrength.V2, HandshakeStrength.STRONG}
)
"""What is spoken if nothing else is said; without ``STRONG`` it is not offered."""


@dataclass(frozen=True, slots=True)
class HandshakeSettings:
    """What one end is and has: the same for all its connections.

    ``node_id`` has at most ``ID_MAX`` bytes.  ``key`` is the fleet's (32 bytes), and
    None in an open fleet or for who joins by a join token; ``digest`` is the SHA-256 of
    whichever token there is, and empty if there is none.  ``fleet`` is the fleet's id
    where that counts.  ``profile`` is our hardware as JSON, ``features`` what we say
    that we can besides.  ``challenges`` belongs to all connections of the node.
    Without an ``admission`` whoever has the token of ``digest`` is let in, and without
    ``verifies`` nobody is known by a key.
    """

    node_id: str
    key: bytes | None
    profile: bytes
    draw: Callable[[int], bytes]
    challenges: SentChallenges
    digest: bytes = b""
    fleet: str = ""
    features: frozenset[str] = frozenset()
    identity: Identity | None = None
    verifies: Callable[[bytes, bytes, bytes], bool] | None = None
    admission: AdmissionCheck | None = None
    accepts: frozenset[HandshakeStrength] = DEFAULT_STRENGTHS


@dataclass(frozen=True, slots=True)
class StrongPeer:
    """What one of our own has said and proved.

    ``public_key`` is proved, and empty if there is none.  ``has_token`` says whether it
    proved a token that we have as well; ``admitted`` by which join token it came, if we
    let it in.  ``features`` and ``version`` are what it says of itself.
    """

    has_token: bool
    public_key: bytes = b""
    admitted: AdmissionGrant = AdmissionGrant()  # noqa: RUF009  # it is frozen
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
    (``rejection``).
    """

    send: tuple[bytes, ...]
    peer_id: str
    profile: HardwareProfile | None
    strength: HandshakeStrength
    strong: StrongPeer | None = None


Step: TypeAlias = Continue | Agreed


class HandshakeRefused(PeerError):
    """The handshake failed; send ``send`` and close.

    ``counts_as_failure`` says whether it was a wrong secret, or may have been one, so
    that the address is to be held to account.  ``final`` says that to dial again the
    same way is of no use; the text then says what to do.  ``id_conflict``: the other
    end has our own id.
    """

    def __init__(
        self,
        why: str,
        *,
        counts_as_failure: bool = False,
        final: bool = False,
        id_conflict: bool = False,
        send: tuple[bytes, ...] = (),
    ) -> None:
        super().__init__(why)
        self.counts_as_failure = counts_as_failure
        self.final = final
        self.id_conflict = id_conflict
        self.send = send


class FleetHandshake(Protocol):
    """One end's part, as a state machine: frames in, frames out.  Times are monotonic.

    After Agreed or HandshakeRefused it is over, and nothing is called any more.
    """

    @property
    def deadline(self) -> float:
        """When ``tick`` is due."""
        ...

    @property
    def limit(self) -> int:
        """Bytes of payload that the next frame may have; it grows after the first."""
        ...

    def on_open(self, certificate: bytes) -> None:
        """Take the fingerprint of the server's certificate, before ``begin``."""
        ...

    def start(self, now: float) -> list[bytes]:
        """Return the frames to begin with."""
        ...

    def receive(self, frame: Frame, now: float) -> Step:
        """Take the other's next frame.

        Raises HandshakeRefused.
        """
        ...

    def tick(self, now: float) -> None:
        """Note that time passes.

        Raises HandshakeRefused if the other's next message is late.
        """
        ...

    def disconnected(self, why: str) -> HandshakeRefused:
        """Return what it means that the connection ends now, or cannot be read."""
        ...


CHALLENGE_MARK = sha256(b"shoal macfleet challenge v1\n").digest()[:8]
"""How a challenge ends that was drawn by one of ours."""

NAME_MIN = 8
"""Bytes of an id from which on a heartbeat's beginning is told from chance.

Others' ids end with a hyphen and eight hexadecimal digits.  At this length one in
80,000 challenges drawn at random looks like one; at a length of one, one in 400 would.
"""


def draw_challenge(settings: HandshakeSettings) -> bytes:
    """Draw a challenge."""
    if HandshakeStrength.STRONG not in settings.accepts:
        return settings.draw(CHALLENGE_SIZE)
    return settings.draw(CHALLENGE_SIZE - len(CHALLENGE_MARK)) + CHALLENGE_MARK


def is_shoal_challenge(challenge: bytes) -> bool:
    """Say whether a node drew it that speaks the strong handshake."""
    return challenge.endswith(CHALLENGE_MARK)


def resembles_heartbeat(challenge: bytes, own_id: str) -> bool:
    """Say whether a challenge could be what a heartbeat signs, ours or another's.

    That is an id (text without white space), a colon, a nonce of any bytes, and perhaps
    a colon and a JSON object.  Text from end to end is no challenge either: our
    hardware is signed with an id after the challenge, and a colon.
    """
    name = _text_prefix(challenge)
    if len(name) == len(challenge):
        return True
    if name.rfind(b":") >= NAME_MIN or name.startswith(own_id.encode() + b":"):
        return True
    first = name.find(b":")
    return first > 0 and _ends_with_object(challenge[first + 1 :])


def _text_prefix(data: bytes) -> bytes:
    """Return the beginning of the bytes that is printable text without white space."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        text = data[: error.start].decode()
    for place, letter in enumerate(text):
        if letter == " " or not letter.isprintable():
            return text[:place].encode()
    return text.encode()


def _ends_with_object(rest: bytes) -> bool:
    """Say whether there is a colon, and a JSON object from there to the end."""
    return rest.rstrip().endswith(b"}") and any(
        rest[place + 1 :].lstrip().startswith(b"{")
        for place, byte in enumerate(rest)
        if byte == ord(":")
    )
