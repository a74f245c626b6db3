"""Both ends of a handshake, and its outcome.

Source: the MacFleet document, "Handshake", and recorded exchanges of MacFleet's own
programs; ``member`` says which challenges a node answers.
"""

from dataclasses import dataclass
from typing import TypeAlias

from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.codec.frames import Flag, Frame, FrameType, encode_frame
from shoal.protocols.macfleet.codec.hardware import HardwareProfile
from shoal.protocols.macfleet.handshake_messages import (
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
from shoal.protocols.macfleet.member import FleetMember

STEP_TIMEOUT = 10.0  # seconds to wait for each message


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

    ``hardware`` is this node's, as JSON.  ``expected_id`` is the id the server must
    have; empty: any.  ``server`` names the server in errors.  ``deadline`` is when
    ``tick`` is due, and ``limit`` the bytes of payload that the next frame may have.
    ``receive`` and ``tick`` raise HandshakeRefused; after that, or Agreed, no method is
    called.
    """

    limit = MESSAGE_MAX

    def __init__(
        self,
        member: FleetMember,
        hardware: bytes,
        expected_id: str = "",
        *,
        server: str = "the other end",
    ) -> None:
        self.deadline = 0.0
        self._member = member
        self._hardware = hardware
        self._expected_id = expected_id
        self._server = server
        self._challenge = b""

    def start(self, now: float) -> list[bytes]:
        """Return the first frames to send."""
        member, flags = self._member, 0
        self.deadline = now + STEP_TIMEOUT
        if member.key is not None:
            self._challenge, flags = member.draw_challenge(now), Flag.V2
        first = encode_first(member.node_id, self._challenge)
        return [encode_frame(control_frame(first, flags))]

    def receive(self, frame: Frame, now: float) -> Agreed:
        """Check the server's answer, and return the third message, if there is one."""
        member, payload = self._member, bytes(frame.payload)
        if (key := member.key) is None:
            # Upstream servers ignore the next message, and need not send their id.
            server_id = decode_id(payload) or self._expected_id
            self._check_id(server_id, "")
            return Agreed((), server_id)
        signed = bool(frame.flags & Flag.V2)
        member.check_version(self._server, signed=signed)
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
        if reason := member.challenge_error(second.challenge):
            raise HandshakeRefused(f"{self._server}: {reason}")
        profile = self._hardware if signed else None
        third = encode_third(key, member.node_id, second.challenge, profile)
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
        if server_id == self._member.node_id:
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

    def __init__(self, member: FleetMember, hardware: bytes) -> None:
        self.deadline = 0.0
        self._member = member
        self._hardware = hardware
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
        payload, key = bytes(frame.payload), self._member.key
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
        member, client = self._member, decode_id(payload)
        if client == member.node_id:
            raise HandshakeRefused(f"it claims this node's id, {client!a}")
        send = encode_frame(control_frame(member.node_id.encode(), 0))
        return Agreed((send,), client)

    def _answer(self, key: bytes, payload: bytes, now: float) -> Continue:
        """Answer a v1 or v2 client, and send a challenge."""
        member, signed = self._member, self._signed
        client, peer_challenge = decode_first(payload)
        member.check_version(f"{client!a}", signed=signed)
        reason = member.challenge_error(peer_challenge)
        if client == member.node_id:
            reason = "it claims this node's id"
        if reason:
            raise HandshakeRefused(f"{client!a}: {reason}", counts_as_failure=True)
        self._client_id, self._challenge = client, member.draw_challenge(now)
        second = encode_second(
            *(key, member.node_id, peer_challenge, self._challenge),
            self._hardware if signed else None,
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
