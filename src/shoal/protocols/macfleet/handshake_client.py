"""The client's end of a handshake: offers the strong one, accepts the server's choice.

``strong_handshake`` describes the strong one.
"""

from collections.abc import Callable

from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.codec.frames import Flag, Frame, encode_frame
from shoal.protocols.macfleet.codec.hardware import decode_profile
from shoal.protocols.macfleet.handshake import (
    MESSAGE_MAX,
    STEP_TIMEOUT,
    Agreed,
    Continue,
    HandshakeRefused,
    HandshakeSettings,
    HandshakeStrength,
    Step,
    StrongPeer,
    draw_challenge,
    is_shoal_challenge,
    resembles_heartbeat,
)
from shoal.protocols.macfleet.handshake_messages import (
    SecondMessage,
    control_frame,
    decode_first,
    decode_id,
    decode_second,
    encode_first,
    encode_third,
)
from shoal.protocols.macfleet.strong_handshake import (
    HandshakeRole,
    SealedVerdict,
    Transcript,
    introduce,
    seal,
    unseal,
)


class StrongClientHandshake:
    """The client after the server accepts the offer; ``server`` is its address."""

    def __init__(
        self, settings: HandshakeSettings, server: str, certificate: bytes, first: Frame
    ) -> None:
        self._settings = settings
        self._server = server
        self._transcript = Transcript(certificate)
        self._transcript.add(first)
        self._server_id = ""

    def prove(self, frame: Frame, expected: str) -> bytes:
        """Handle M2 and return M3; ``expected`` is the server's id, empty: any.

        Raises HandshakeRefused.
        """
        self._server_id = decode_first(bytes(frame.payload)).node_id
        check_server_id(self._settings, self._server, self._server_id, expected)
        self._transcript.add(frame)
        settings = self._settings
        body = introduce(settings)
        payload = seal(
            body, settings, HandshakeRole.CLIENT, self._transcript, settings.digest
        )
        third = control_frame(payload, Flag.STRONG)
        self._transcript.add(third)
        return encode_frame(third)

    def conclude(self, frame: Frame) -> Agreed:
        """Handle M4.

        Raises HandshakeRefused, saying what to do.
        """
        settings = self._settings
        try:
            body, sealed = unseal(frame, SealedVerdict, self._transcript)
            profile = decode_profile(body.profile)
        except PeerError as error:
            raise HandshakeRefused(f"{self._server}: {error}") from error
        if body.refusal:
            verdict = _printable(body.refusal)
            raise HandshakeRefused(
                f"{self._server} refuses {settings.node_id!a}: {verdict}",
                final=not body.later,
                verdict=verdict,
            )
        proves_token = body.proves and sealed.proves_token(
            settings.digest, HandshakeRole.SERVER
        )
        if settings.digest and not proves_token:
            raise HandshakeRefused(
                f"{self._server} has not proved that it has the token: another program "
                "may be listening there",
            )
        if body.key and not sealed.is_signed_by(
            settings, body.key, HandshakeRole.SERVER
        ):
            raise HandshakeRefused(
                f"{self._server} has not proved that it has the public key it sent"
            )
        peer = StrongPeer(
            has_token=bool(settings.digest),
            in_fleet=bool(settings.digest),
            public_key=body.key if settings.verifies is not None else b"",
            features=frozenset(body.features),
            version=body.version,
        )
        return Agreed((), self._server_id, profile, HandshakeStrength.STRONG, peer)


def check_server_id(
    settings: HandshakeSettings, server: str, server_id: str, expected_id: str
) -> None:
    """Check the id of the dialled server.

    Raises HandshakeRefused if it is this node's own id, or not the expected one.
    """
    if server_id == settings.node_id:
        raise HandshakeRefused(
            f"{server} has this node's id, {server_id!a}: it is this node itself, or "
            "two nodes have the same --name",
            id_conflict=True,
        )
    if expected_id and server_id != expected_id:
        raise HandshakeRefused(f"{server} is {server_id!a}, expected {expected_id!a}")


def _printable(refusal: str) -> str:
    """Return a peer's text with control characters and non-ASCII escaped."""
    return ascii(refusal)[1:-1]


DOWNGRADE = (
    "the peer supports the strong handshake but did not accept the offer: an attacker "
    "in between may have removed it"
)


def rejection(server: str) -> HandshakeRefused:
    """Return the refusal for a connection that ends right after v1 or v2 agreed."""
    return HandshakeRefused(
        f"the fleet at {server} disconnected after the handshake: it has another token "
        "or another id, or has banned this address for a while: check --token",
        final=True,
    )


class ClientHandshake:
    """The client's end; see ``FleetHandshake``.

    ``expected_id`` is the id the server must have; empty: any.  ``server`` names the
    server in errors.  ``require_strong``: the server must be a Shoal node.
    """

    def __init__(
        self,
        settings: HandshakeSettings,
        expected_id: str = "",
        *,
        require_strong: bool = False,
        server: str = "the other end",
    ) -> None:
        self._settings = settings
        self._expected_id = expected_id
        self._server = server
        self._offers_strong = HandshakeStrength.STRONG in settings.accepts
        self._require_strong = require_strong
        self._certificate = b""
        self._deadline = 0.0
        self._challenge = b""
        self._first = control_frame(b"", 0)
        self._next: Callable[[Frame], Step] = self._receive_second
        self._strong: StrongClientHandshake | None = None

    @property
    def deadline(self) -> float:
        return self._deadline

    @property
    def limit(self) -> int:
        return MESSAGE_MAX

    def on_open(self, certificate: bytes) -> None:
        self._certificate = certificate

    def start(self, now: float) -> list[bytes]:
        settings = self._settings
        self._deadline = now + STEP_TIMEOUT
        flags = int(Flag.STRONG) if self._offers_strong else 0
        if settings.key is not None:
            self._challenge = draw_challenge(settings)
            settings.challenges.add(self._challenge, now)
            flags |= Flag.V2
        self._first = control_frame(
            encode_first(settings.node_id, self._challenge), flags
        )
        return [encode_frame(self._first)]

    def receive(self, frame: Frame, now: float) -> Step:
        step = self._next(frame)
        self._deadline = now + STEP_TIMEOUT
        return step

    def tick(self, now: float) -> None:
        if now >= self._deadline:
            raise self.disconnected(f"did not answer within {STEP_TIMEOUT:g} s")

    def disconnected(self, reason: str) -> HandshakeRefused:
        if self._strong is not None:
            return HandshakeRefused(f"{self._server} {reason}")
        with_token = "without a token" if self._challenge else "with a token (--token)"
        return HandshakeRefused(
            f"{self._server} {reason} after the first message: its fleet may be one "
            f"{with_token}, or it has banned this address for a while"
        )

    # The second message, by its handshake.

    def _receive_second(self, frame: Frame) -> Step:
        settings, payload = self._settings, bytes(frame.payload)
        if self._offers_strong and frame.flags & Flag.STRONG:
            self._strong = StrongClientHandshake(
                settings, self._server, self._certificate, self._first
            )
            self._next = self._strong.conclude
            return Continue((self._strong.prove(frame, self._expected_id),))
        if self._require_strong:
            raise HandshakeRefused(
                f"{self._server} does not speak Shoal's handshake: it is not a Shoal "
                "node, or an attacker in between removed the offer"
            )
        if settings.key is None:
            return self._accept_open(payload)
        return self._accept_v1_or_v2(
            settings.key, payload, signed=bool(frame.flags & Flag.V2)
        )

    def _accept_open(self, payload: bytes) -> Agreed:
        settings = self._settings
        if HandshakeStrength.OPEN not in settings.accepts or settings.digest:
            raise HandshakeRefused(
                f"{self._server} is of an open fleet, and this node has a token: omit "
                "--token to join it",
                final=True,
            )
        # Upstream servers ignore the next message, and need not send their id.
        server_id = decode_id(payload) or self._expected_id
        check_server_id(settings, self._server, server_id, "")
        return Agreed((), server_id, None, HandshakeStrength.OPEN)

    def _accept_v1_or_v2(self, key: bytes, payload: bytes, *, signed: bool) -> Agreed:
        """Check the answer of a v1 or v2 server, and return the third message."""
        settings = self._settings
        strength = HandshakeStrength.V2 if signed else HandshakeStrength.V1
        if strength not in settings.accepts:
            raise HandshakeRefused(
                f"{self._server} speaks the handshake {strength.value}, which is not "
                "accepted here",
                final=True,
            )
        try:
            second = decode_second(key, payload, self._challenge, signed=signed)
        except PeerError as error:
            raise HandshakeRefused(
                f"the fleet at {self._server} has another token or another id: check "
                f"--token ({error})",
                final=True,
            ) from error
        self._check_answer(second)
        profile = settings.profile if signed else None
        third = encode_third(key, settings.node_id, second.challenge, profile)
        send = (encode_frame(control_frame(third, Flag.V2 if signed else 0)),)
        return Agreed(send, second.node_id, second.profile, strength)

    def _check_answer(self, second: SecondMessage) -> None:
        """Raise HandshakeRefused if the server's challenge must not be answered.

        The challenge is not bound to the rest of the answer: an attacker in between may
        have replaced it.
        """
        settings, peer_challenge = self._settings, second.challenge
        check_server_id(settings, self._server, second.node_id, self._expected_id)
        if self._offers_strong and is_shoal_challenge(peer_challenge):
            raise HandshakeRefused(f"{self._server}: {DOWNGRADE}")
        if peer_challenge in settings.challenges:
            raise HandshakeRefused(f"{self._server} returned this node's own challenge")
        if resembles_heartbeat(peer_challenge, settings.node_id):
            raise HandshakeRefused(
                f"{self._server}: its challenge could be the signed part of a heartbeat"
            )
