"""Both ends of a handshake: its settings, its outcome, and the challenges it answers.

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
from dataclasses import dataclass
from typing import TypeAlias

from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.codec.frames import Flag, Frame, FrameType, encode_frame
from shoal.protocols.macfleet.codec.hardware import HardwareProfile
from shoal.protocols.macfleet.handshake_messages import (
    CHALLENGE_SIZE,
    FIRST_MAX,
    MESSAGE_MAX,
    HandshakeRefused,
    control_frame,
    decode_first,
    decode_id,
    decode_second,
    decode_third,
    encode_first,
    encode_second,
    encode_third,
)

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


STEP_TIMEOUT = 10.0  # seconds to wait for each message


@dataclass(frozen=True, slots=True)
class HandshakeSettings:
    """A node's settings for all its handshakes.

    ``node_id`` has at most ``ID_MAX`` bytes.  ``key`` is the fleet's (32 bytes); None
    in an open fleet.  ``profile`` is the hardware as JSON.  ``challenges`` is shared by
    all connections of the node.  ``accepts_v1``: peers may use version 1, which a
    reflection attack can pass without the token.
    """

    node_id: str
    key: bytes | None
    profile: bytes
    random_bytes: Callable[[int], bytes]
    challenges: SentChallenges
    accepts_v1: bool = False

    def draw_challenge(self, now: float) -> bytes:
        """Return a challenge to send."""
        challenge = self.random_bytes(CHALLENGE_SIZE)
        self.challenges.add(challenge, now)
        return challenge

    def check_version(self, peer: str, *, signed: bool) -> None:
        """Raise HandshakeRefused if a peer uses version 1 and may not."""
        if not signed and not self.accepts_v1:
            raise HandshakeRefused(
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


@dataclass(frozen=True, slots=True)
class Continue:
    """Send these frames, and pass in the next frame."""

    send: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Agreed:
    """The handshake succeeded: send these frames; the connection is then usable.

    ``profile`` is the peer's hardware, if it sent it.  With a key, a client does not
    learn whether the server agrees: if the connection ends at once, the server rejected
    it (``rejection``).
    """

    send: tuple[bytes, ...]
    peer_id: str
    profile: HardwareProfile | None = None


def rejection(server: str) -> HandshakeRefused:
    """Return the refusal for a connection that ends right after the handshake."""
    return HandshakeRefused(
        f"the fleet at {server} disconnected after the handshake: it has another token "
        "or another id, or has banned this address for a while: check --token",
        final=True,
    )


class ClientHandshake:
    """The client's end, a state machine on frames.  Times are monotonic seconds.

    ``expected_id`` is the id the server must have; empty: any.  ``server`` names the
    server in errors.  ``deadline`` is when ``tick`` is due, and ``limit`` the bytes of
    payload that the next frame may have.  ``receive`` and ``tick`` raise
    HandshakeRefused; after that, or Agreed, no method is called.
    """

    limit = MESSAGE_MAX

    def __init__(
        self,
        settings: HandshakeSettings,
        expected_id: str = "",
        *,
        server: str = "the other end",
    ) -> None:
        self.deadline = 0.0
        self._settings = settings
        self._expected_id = expected_id
        self._server = server
        self._challenge = b""

    def start(self, now: float) -> list[bytes]:
        """Return the first frames to send."""
        settings, flags = self._settings, 0
        self.deadline = now + STEP_TIMEOUT
        if settings.key is not None:
            self._challenge, flags = settings.draw_challenge(now), Flag.V2
        first = encode_first(settings.node_id, self._challenge)
        return [encode_frame(control_frame(first, flags))]

    def receive(self, frame: Frame, now: float) -> Agreed:
        """Check the server's answer, and return the third message, if there is one."""
        settings, payload = self._settings, bytes(frame.payload)
        if (key := settings.key) is None:
            # Upstream servers ignore the next message, and need not send their id.
            server_id = decode_id(payload) or self._expected_id
            self._check_id(server_id, "")
            return Agreed((), server_id)
        signed = bool(frame.flags & Flag.V2)
        settings.check_version(self._server, signed=signed)
        try:
            second = decode_second(key, payload, self._challenge, signed=signed)
        except PeerError as error:
            raise HandshakeRefused(
                f"the fleet at {self._server} has another token or another id: check "
                f"--token ({error})",
                final=True,
            ) from error
        self._check_id(second.node_id, self._expected_id)
        # The challenge is not bound to the rest of the answer: an attacker in between
        # may have replaced it.
        if reason := settings.challenge_error(second.challenge):
            raise HandshakeRefused(f"{self._server}: {reason}")
        profile = settings.profile if signed else None
        third = encode_third(key, settings.node_id, second.challenge, profile)
        send = encode_frame(control_frame(third, Flag.V2 if signed else 0))
        return Agreed((send,), second.node_id, second.profile)

    def tick(self, now: float) -> None:
        """Check the deadline."""
        if now >= self.deadline:
            raise self.disconnected(f"did not answer within {STEP_TIMEOUT:g} s")

    def disconnected(self, reason: str) -> HandshakeRefused:
        """Return the refusal for a connection that ends now, or cannot be parsed."""
        with_token = "without a token" if self._challenge else "with a token (--token)"
        return HandshakeRefused(
            f"{self._server} {reason} after the first message: its fleet may be one "
            f"{with_token}, or it has banned this address for a while"
        )

    def _check_id(self, server_id: str, expected_id: str) -> None:
        """Raise HandshakeRefused if it is this node's own, or not the expected one."""
        if server_id == self._settings.node_id:
            raise HandshakeRefused(
                f"{self._server} has this node's id, {server_id!a}: it is this node "
                "itself, or two nodes have the same --name",
                id_conflict=True,
            )
        if expected_id and server_id != expected_id:
            raise HandshakeRefused(
                f"{self._server} is {server_id!a}, expected {expected_id!a}"
            )


class ServerHandshake:
    """The server's end, as ``ClientHandshake`` is the client's.

    With a key it answers before the client has proved anything.  A client that then
    leaves, or answers wrongly, may have come for that answer, so it counts as a
    failure.
    """

    def __init__(self, settings: HandshakeSettings) -> None:
        self.deadline = 0.0
        self._settings = settings
        self._client_id = ""
        self._challenge = b""  # for the client; empty before its first message
        self._signed = False  # v2

    @property
    def limit(self) -> int:
        """Bytes of payload that the next frame may have."""
        return MESSAGE_MAX if self._challenge else FIRST_MAX

    def start(self, now: float) -> list[bytes]:
        """Return nothing: the client begins."""
        self.deadline = now + STEP_TIMEOUT
        return []

    def receive(self, frame: Frame, now: float) -> Continue | Agreed:
        """Handle the first or the third message."""
        payload, key = bytes(frame.payload), self._settings.key
        if key is not None and self._challenge:
            return self._receive_third(key, payload)
        if frame.type is not FrameType.CONTROL:
            raise HandshakeRefused(f"expected CONTROL, found {frame.type.name}")
        if key is None:
            return self._accept_open(payload)
        self.deadline = now + STEP_TIMEOUT
        self._signed = bool(frame.flags & Flag.V2)
        return self._answer(key, payload, now)

    def tick(self, now: float) -> None:
        """Check the deadline."""
        if now >= self.deadline:
            raise self.disconnected(f"sent nothing for {STEP_TIMEOUT:g} s")

    def disconnected(self, reason: str) -> HandshakeRefused:
        """Return the refusal for a connection that ends now, or cannot be parsed."""
        client_label = f"{self._client_id!a}: " if self._client_id else ""
        return HandshakeRefused(
            f"{client_label}{reason}", counts_as_failure=bool(self._challenge)
        )

    def _accept_open(self, payload: bytes) -> Agreed:
        settings, client = self._settings, decode_id(payload)
        if client == settings.node_id:
            raise HandshakeRefused(f"it claims this node's id, {client!a}")
        send = encode_frame(control_frame(settings.node_id.encode(), 0))
        return Agreed((send,), client)

    def _answer(self, key: bytes, payload: bytes, now: float) -> Continue:
        """Answer a v1 or v2 client, and send a challenge."""
        settings, signed = self._settings, self._signed
        client, peer_challenge = decode_first(payload)
        settings.check_version(f"{client!a}", signed=signed)
        reason = settings.challenge_error(peer_challenge)
        if client == settings.node_id:
            reason = "it claims this node's id"
        if reason:
            raise HandshakeRefused(f"{client!a}: {reason}", counts_as_failure=True)
        self._client_id, self._challenge = client, settings.draw_challenge(now)
        second = encode_second(
            *(key, settings.node_id, peer_challenge, self._challenge),
            settings.profile if signed else None,
        )
        return Continue(
            (encode_frame(control_frame(second, Flag.V2 if signed else 0)),)
        )

    def _receive_third(self, key: bytes, payload: bytes) -> Agreed:
        """Check the client's answer; the flags of the first message decide its form."""
        client = self._client_id
        try:
            profile = decode_third(
                key, client, payload, self._challenge, signed=self._signed
            )
        except PeerError as error:
            raise HandshakeRefused(
                f"{client!a}: {error}", counts_as_failure=True
            ) from error
        return Agreed((), client, profile)


FleetHandshake: TypeAlias = ClientHandshake | ServerHandshake
"""One end of a handshake."""


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
