"""This node as a member of a fleet: what it signs, and what it remembers of others.

A secure node answers a challenge of 32 bytes with its HMAC under the fleet's key, and
has to do so before it knows who asks.  An attacker can therefore have any 32 bytes
signed, with two exceptions:

* Bytes that could be the signed part of a heartbeat: ``id:nonce`` or
  ``id:nonce:hardware``.
* A challenge that this node itself has sent recently (``SentChallenges``).

An attacker can still obtain: signatures of 32 bytes that look random, each of which
lets them test tokens offline; heartbeats without hardware of nodes whose id has fewer
than ``NAME_MIN`` bytes, which only Shoal nodes may have, or begins with a control
character (the suffix does); and the answer to a challenge of another node, with which
they pass for this node there.  Each shows the attacker's address and counts as a failed
guess.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.protocols.macfleet import handshake_messages
from shoal.protocols.macfleet.codec.hardware import HardwareProfile, encode_profile
from shoal.protocols.macfleet.codec.heartbeat_lines import NONCE_SIZE, HeartbeatLine
from shoal.protocols.macfleet.codec.keys import sign

REPLAYS_MAX = 65_536  # signed lines that are remembered; the oldest is evicted first


class ReplayFilter:
    """Rejects signed lines that have been received before.

    Lines from before the last restart, and evicted ones, are not recognised.
    """

    def __init__(self) -> None:
        self._proofs: OrderedDict[bytes, None] = OrderedDict()  # in order of arrival

    def is_replay(self, key: bytes, line: HeartbeatLine) -> bool:
        """Say whether a line has been received before, and remember it."""
        node_id, nonce, hardware = line
        proof = sign(key, node_id.encode(), b" ", nonce, b" ", hardware or b"")
        if proof in self._proofs:  # No secret: replays of valid proofs are no guesses.
            return True
        self._proofs[proof] = None
        if len(self._proofs) > REPLAYS_MAX:
            self._proofs.popitem(last=False)
        return False


REMEMBERED_FOR = 30.0  # seconds; a handshake has timed out by then
REMEMBERED_MAX = 16_384  # challenges; the oldest is evicted first


class SentChallenges:
    """The challenges this node has sent recently.  Times are monotonic seconds."""

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


@dataclass(frozen=True, slots=True)
class FleetMember:
    """This node as a member of a fleet.

    ``node_id`` has at most ``ID_MAX`` bytes.  ``key`` is the fleet's (32 bytes); None
    in an open fleet.  ``profile`` returns the hardware: a function, because the port in
    it is known only once it is bound.  ``random_bytes`` returns that many random bytes.
    ``open_tls``: a fleet without a key uses TLS as well.  ``accepts_v1``: peers may use
    version 1 of the handshake, which a reflection attack can pass without the token.
    ``pings`` and ``pongs`` filter replays; ``challenges`` are those of all connections.
    """

    node_id: str
    key: bytes | None
    profile: Callable[[], HardwareProfile]
    random_bytes: Callable[[int], bytes]
    open_tls: bool = False
    accepts_v1: bool = False
    pings: ReplayFilter = field(default_factory=ReplayFilter)
    pongs: ReplayFilter = field(default_factory=ReplayFilter)
    challenges: SentChallenges = field(default_factory=SentChallenges)

    @property
    def uses_tls(self) -> bool:
        """Whether connections use TLS, as all of a fleet with a key do."""
        return self.open_tls or self.key is not None

    def hardware(self) -> bytes:
        """Return the hardware as JSON."""
        return encode_profile(self.profile())

    def own_line(self, *, hardware: bool) -> HeartbeatLine:
        """Return this node's line, with a fresh nonce."""
        if self.key is None:
            return HeartbeatLine(self.node_id)
        nonce = self.random_bytes(NONCE_SIZE)
        return HeartbeatLine(self.node_id, nonce, self.hardware() if hardware else None)

    def draw_challenge(self, now: float) -> bytes:
        """Return a challenge to send."""
        challenge = self.random_bytes(handshake_messages.CHALLENGE_SIZE)
        self.challenges.add(challenge, now)
        return challenge

    def check_version(self, peer: str, *, signed: bool) -> None:
        """Raise HandshakeRefused if a peer uses version 1 and may not."""
        if not signed and not self.accepts_v1:
            raise handshake_messages.HandshakeRefused(
                f"{peer} speaks the handshake v1, which is not accepted here",
                final=True,
            )

    def challenge_error(self, challenge: bytes) -> str:
        """Return why a challenge must not be answered; empty: it may be."""
        if challenge in self.challenges:
            return "it returned this node's own challenge"
        if resembles_heartbeat(challenge, self.node_id):
            return "its challenge could be the signed part of a heartbeat"
        return ""


NAME_MIN = 8
"""Bytes of an id from which a challenge is taken for a heartbeat.

Ids of upstream nodes end with a hyphen and eight hexadecimal digits.  With this length
one in 80,000 random challenges resembles a heartbeat; with a length of one, one in 400.
"""


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
