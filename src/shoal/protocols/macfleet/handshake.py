"""The handshake's settings, steps and outcome, and which challenges a node answers.

A secure node answers a challenge of 32 bytes with its HMAC under the fleet's key, and
has to do so before it knows who asks (v1, v2).  An attacker can therefore have any 32
bytes signed, with three exceptions:

* A challenge that a Shoal node drew ends with a mark, and no Shoal node sends one to
  another in v1 or v2: they use the strong handshake.  If either end sees the mark
  there, someone in between has removed the offer, or relays another node's challenge.
  So Shoal nodes answer none of each other's challenges.  (The idea of RFC 8446,
  section 4.1.3, on downgrades.)
* Bytes that could be the signed part of a heartbeat: ``id:nonce`` or
  ``id:nonce:hardware``.
* A challenge that this node itself has sent recently (``SentChallenges``).

An attacker can still obtain: signatures of 32 bytes that look random, each of which
lets them test tokens offline; heartbeats without hardware of nodes whose id has fewer
than ``NAME_MIN`` bytes, which only Shoal nodes may have, or begins with a control
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
from shoal.protocols.seam.admission import AdmissionCheck, AdmissionGrant
from shoal.protocols.seam.context import Identity

REMEMBERED_FOR = 30.0  # seconds; a handshake has timed out by then
REMEMBERED_MAX = 16_384  # challenges; the oldest is evicted first


class SentChallenges:
    """The challenges this node has sent recently.  Times are monotonic seconds.

    Eviction is safe: ``CHALLENGE_MARK`` also identifies Shoal's challenges.
    """

    def __init__(self) -> None:
        self._sent: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, challenge: bytes) -> bool:
        """Whether this node has sent the challenge."""
        return challenge in self._sent

    def add(self, challenge: bytes, now: float) -> None:
        """Remember a challenge, and forget expired ones."""
        while self._sent:
            oldest, at = next(iter(self._sent.items()))
            if now < at + REMEMBERED_FOR and len(self._sent) < REMEMBERED_MAX:
                break
            del self._sent[oldest]
        self._sent[challenge] = now


STEP_TIMEOUT = 10.0  # seconds to wait for each message
ID_MAX = 256  # bytes of a node's id in UTF-8
CHALLENGE_SIZE = 32  # bytes
FIRST_MAX = ID_MAX + CHALLENGE_SIZE  # bytes of the first message
MESSAGE_MAX = 10 << 10  # bytes of any other: 8 KiB of hardware, ids and signatures


class HandshakeStrength(Enum):
    """How the two ends of a connection have authenticated each other."""

    OPEN = "open"  # not at all
    V1 = "v1"  # by the fleet's token; open to reflection attacks
    V2 = "v2"  # by the fleet's token, with signed hardware
    STRONG = "strong"  # bound to the channel; between Shoal nodes


DEFAULT_STRENGTHS = frozenset(
    {HandshakeStrength.OPEN, HandshakeStrength.V2, HandshakeStrength.STRONG}
)
"""Accepted by default; a node that does not accept ``STRONG`` does not offer it."""


@dataclass(frozen=True, slots=True)
class HandshakeSettings:
    """A node's settings for all its handshakes.

    ``node_id`` has at most ``ID_MAX`` bytes.  ``key`` is the fleet's (32 bytes); None
    in an open fleet, or if the node has a join token only.  ``digest`` is the SHA-256
    of the fleet's or join token, empty without one.  ``fleet`` is the fleet's id.
    ``profile`` is the hardware as JSON, ``features`` what the node announces besides.
    ``challenges`` is shared by all connections of the node.  Without ``admission``, a
    server admits holders of the token of ``digest``; without ``verifies``, public keys
    are not checked and peers have none.
    """

    node_id: str
    key: bytes | None
    profile: bytes
    random_bytes: Callable[[int], bytes]
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
    """What a Shoal peer has stated and proved.

    ``public_key`` is proved; empty if there is none.  ``has_token``: it proved a token
    that this node has too, ``in_fleet``: that of the fleet.  ``admitted``: the join
    token a server admitted it by.
    ``features`` and ``version`` are as stated.
    """

    has_token: bool
    in_fleet: bool
    public_key: bytes = b""
    admitted: AdmissionGrant = AdmissionGrant()  # noqa: RUF009  # frozen
    features: frozenset[str] = frozenset()
    version: int = 1


@dataclass(frozen=True, slots=True)
class Continue:
    """Send these frames, and pass in the next frame."""

    send: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Agreed:
    """The handshake succeeded: send these frames; the connection is then usable.

    ``profile`` is the peer's hardware, if it sent it; ``strong`` is set if ``strength``
    is ``STRONG``.  In ``V1`` and ``V2`` a client does not learn whether the server
    agrees: if the connection ends at once, the server rejected it (``rejection``).
    """

    send: tuple[bytes, ...]
    peer_id: str
    profile: HardwareProfile | None
    strength: HandshakeStrength
    strong: StrongPeer | None = None


Step: TypeAlias = Continue | Agreed


class HandshakeRefused(PeerError):
    """The handshake failed; send ``send`` and close.

    ``counts_as_failure``: the peer presented a wrong secret, or may have, so its
    address is rate-limited.  ``final``: dialling again with the same settings is
    useless; the text says what to change.  ``id_conflict``: the peer has this node's
    id.  ``verdict``: the peer's own words, if it has refused.
    """

    def __init__(
        self,
        reason: str,
        *,
        counts_as_failure: bool = False,
        final: bool = False,
        id_conflict: bool = False,
        verdict: str = "",
        send: tuple[bytes, ...] = (),
    ) -> None:
        super().__init__(reason)
        self.counts_as_failure = counts_as_failure
        self.final = final
        self.id_conflict = id_conflict
        self.verdict = verdict
        self.send = send


class FleetHandshake(Protocol):
    """One end of a handshake: a state machine on frames.  Times are monotonic seconds.

    After Agreed or HandshakeRefused no further method is called.
    """

    @property
    def deadline(self) -> float:
        """When ``tick`` is due."""
        ...

    @property
    def limit(self) -> int:
        """Bytes of payload that the next frame may have."""
        ...

    def on_open(self, certificate: bytes) -> None:
        """Set the fingerprint of the server's certificate; called before ``start``."""
        ...

    def start(self, now: float) -> list[bytes]:
        """Return the first frames to send."""
        ...

    def receive(self, frame: Frame, now: float) -> Step:
        """Handle the peer's next frame.

        Raises HandshakeRefused.
        """
        ...

    def tick(self, now: float) -> None:
        """Check the deadline.

        Raises HandshakeRefused if the peer's next message is late.
        """
        ...

    def disconnected(self, reason: str) -> HandshakeRefused:
        """Return the refusal for a connection that ends now, or cannot be parsed."""
        ...


CHALLENGE_MARK = sha256(b"shoal macfleet challenge v1\n").digest()[:8]
"""The end of every challenge that a Shoal node draws."""

NAME_MIN = 8
"""Bytes of an id from which a challenge is taken for a heartbeat.

Ids of upstream nodes end with a hyphen and eight hexadecimal digits.  With this length
one in 80,000 random challenges resembles a heartbeat; with a length of one, one in 400.
"""


def draw_challenge(settings: HandshakeSettings) -> bytes:
    """Draw a challenge."""
    if HandshakeStrength.STRONG not in settings.accepts:
        return settings.random_bytes(CHALLENGE_SIZE)
    return settings.random_bytes(CHALLENGE_SIZE - len(CHALLENGE_MARK)) + CHALLENGE_MARK


def is_shoal_challenge(challenge: bytes) -> bool:
    """Say whether a node that speaks the strong handshake drew the challenge."""
    return challenge.endswith(CHALLENGE_MARK)


def resembles_heartbeat(challenge: bytes, own_id: str) -> bool:
    """Say whether a challenge could be the signed part of a heartbeat of any node.

    That is an id (text without white space), a colon, a nonce of any bytes, and perhaps
    a colon and a JSON object.  A challenge that is all text is rejected as well: a
    hardware suffix signs the challenge, then an id and a colon.
    """
    name = _text_prefix(challenge)
    if len(name) == len(challenge):
        return True
    if name.rfind(b":") >= NAME_MIN or name.startswith(own_id.encode() + b":"):
        return True
    first = name.find(b":")
    return first > 0 and _ends_with_object(challenge[first + 1 :])


def _text_prefix(data: bytes) -> bytes:
    """Return the longest prefix that is printable text without white space."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        text = data[: error.start].decode()
    for index, character in enumerate(text):
        if character == " " or not character.isprintable():
            return text[:index].encode()
    return text.encode()


def _ends_with_object(rest: bytes) -> bool:
    """Say whether the bytes end with a colon and a JSON object."""
    return rest.rstrip().endswith(b"}") and any(
        rest[index + 1 :].lstrip().startswith(b"{")
        for index, byte in enumerate(rest)
        if byte == ord(":")
    )
