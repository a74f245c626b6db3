"""The client's end: offers the strong handshake, accepts what the server speaks.

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
    """What a client does whose offer was taken up; ``where`` is whom it dialled."""

    def __init__(
        self, settings: HandshakeSettings, where: str, certificate: bytes, first: Frame
    ) -> None:
        self._settings = settings
        self._where = where
        self._transcript = Transcript(certificate)
        self._transcript.add(first)
        self._server_id = ""

    def prove(self, frame: Frame, expected: str) -> bytes:
        """Take M2 and return M3; ``expected_id`` is the server's id, if that is known.

        Raises HandshakeRefused.
        """
        self._server_id = decode_first(bytes(frame.payload)).node_id
        check_server_id(self._settings, self._where, self._server_id, expected)
        self._transcript.add(frame)
        own = self._settings
        said = introduce(own)
        payload = seal(said, own, HandshakeRole.CLIENT, self._transcript, own.digest)
        third = control_frame(payload, Flag.STRONG)
        self._transcript.add(third)
        return encode_frame(third)

    def conclude(self, frame: Frame) -> Agreed:
        """Take M4.

        Raises HandshakeRefused, with what to do.
        """
        own = self._settings
        try:
            said, sealed = unseal(frame, SealedVerdict, self._transcript)
            profile = decode_profile(said.profile)
        except PeerError as error:
            raise HandshakeRefused(f"{self._where}: {error}") from error
        if said.refusal:
            raise HandshakeRefused(
                f"{self._where} does not let {own.node_id!a} in: "
                f"{_printable(said.refusal)}",
                final=not said.later,
            )
        proved = said.proves and sealed.proves_token(own.digest, HandshakeRole.SERVER)
        if own.digest and not proved:
            raise HandshakeRefused(
                f"{self._where} has not proved that it has our token: somebody else "
                "may listen there",
            )
        if said.key and not sealed.is_signed_by(own, said.key, HandshakeRole.SERVER):
            raise HandshakeRefused(
                f"{self._where} has not proved the key that it names"
            )
        peer = StrongPeer(
            has_token=bool(own.digest),
            public_key=said.key if own.verifies is not None else b"",
            features=frozenset(said.features),
            version=said.version,
        )
        return Agreed((), self._server_id, profile, HandshakeStrength.STRONG, peer)


def check_server_id(
    settings: HandshakeSettings, where: str, server_id: str, expected_id: str
) -> None:
    """Look at the id of whom we dialled.

    Raises HandshakeRefused if it is our own, or another than was expected.
    """
    if server_id == settings.node_id:
        raise HandshakeRefused(
            f"{where} has our own id, {server_id!a}: it is this node itself, or a name "
            "was given to two (--name)",
            id_conflict=True,
        )
    if expected_id and server_id != expected_id:
        raise HandshakeRefused(f"{where} is {server_id!a}, expected {expected_id!a}")


def _printable(refusal: str) -> str:
    """Return what a peer says, fit for a terminal."""
    return ascii(refusal)[1:-1]


DOWNGRADE = (
    "it speaks the strong handshake, and yet does not take ours up: somebody in "
    "between has taken the offer out"
)


def rejection(where: str) -> HandshakeRefused:
    """Return what it means to be hung up on right after a handshake of v1 or v2."""
    return HandshakeRefused(
        f"the fleet at {where} hung up when it had our proof: it has another token or "
        "another id, or bars this address for a while: check --token",
        final=True,
    )


class ClientHandshake:
    """Greets whom it dialled; see ``FleetHandshake``.

    ``expected_id`` is the id that the other has to have; empty: any.  ``where`` is
    what it is called in errors.  ``require_strong`` where it is known to be one of
    ours.
    """

    def __init__(
        self,
        settings: HandshakeSettings,
        expected_id: str = "",
        *,
        require_strong: bool = False,
        where: str = "the other end",
    ) -> None:
        self._settings = settings
        self._expected_id = expected_id
        self._where = where
        self._offers_strong = HandshakeStrength.STRONG in settings.accepts
        self._require_strong = require_strong
        self._certificate = b""
        self._deadline = 0.0
        self._challenge = b""
        self._first = control_frame(b"", 0)
        self._next: Callable[[Frame], Step] = self._second
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
        own = self._settings
        self._deadline = now + STEP_TIMEOUT
        flags = int(Flag.STRONG) if self._offers_strong else 0
        if own.key is not None:
            self._challenge = draw_challenge(own)
            own.challenges.add(self._challenge, now)
            flags |= Flag.V2
        self._first = control_frame(encode_first(own.node_id, self._challenge), flags)
        return [encode_frame(self._first)]

    def receive(self, frame: Frame, now: float) -> Step:
        step = self._next(frame)
        self._deadline = now + STEP_TIMEOUT
        return step

    def tick(self, now: float) -> None:
        if now >= self._deadline:
            raise self.disconnected(f"did not answer within {STEP_TIMEOUT:g} s")

    def disconnected(self, why: str) -> HandshakeRefused:
        if self._strong is not None:
            return HandshakeRefused(f"{self._where} {why}")
        with_token = "without a token" if self._challenge else "with a token (--token)"
        return HandshakeRefused(
            f"{self._where} {why} to our greeting: it may be of a fleet {with_token}, "
            "or bar this address for a while"
        )

    # The second message, by what it says that it is.

    def _second(self, frame: Frame) -> Step:
        own, payload = self._settings, bytes(frame.payload)
        if self._offers_strong and frame.flags & Flag.STRONG:
            self._strong = StrongClientHandshake(
                own, self._where, self._certificate, self._first
            )
            self._next = self._strong.conclude
            return Continue((self._strong.prove(frame, self._expected_id),))
        if self._require_strong:
            raise HandshakeRefused(
                f"{self._where} does not speak the handshake of Shoal's own nodes: it "
                "is none, or somebody in between has taken our offer out"
            )
        if own.key is None:
            return self._open(payload)
        return self._answered(own.key, payload, signed=bool(frame.flags & Flag.V2))

    def _open(self, payload: bytes) -> Agreed:
        own = self._settings
        if HandshakeStrength.OPEN not in own.accepts or own.digest:
            raise HandshakeRefused(
                f"{self._where} takes everybody, and we have a token: leave --token "
                "out to join it",
                final=True,
            )
        # Others neither look at what is answered, nor have to say their id.
        server = decode_id(payload) or self._expected_id
        check_server_id(own, self._where, server, "")
        return Agreed((), server, None, HandshakeStrength.OPEN)

    def _answered(self, key: bytes, payload: bytes, *, signed: bool) -> Agreed:
        """Look at the answer of a server of v1 or v2, and answer it."""
        own = self._settings
        strength = HandshakeStrength.V2 if signed else HandshakeStrength.V1
        if strength not in own.accepts:
            raise HandshakeRefused(
                f"{self._where} speaks the handshake {strength.value}, which is not "
                "accepted here",
                final=True,
            )
        try:
            second = decode_second(key, payload, self._challenge, signed=signed)
        except PeerError as error:
            raise HandshakeRefused(
                f"the fleet at {self._where} has another token or another id: check "
                f"--token ({error})",
                final=True,
            ) from error
        self._check_answer(second)
        profile = own.profile if signed else None
        third = encode_third(key, own.node_id, second.challenge, profile)
        send = (encode_frame(control_frame(third, Flag.V2 if signed else 0)),)
        return Agreed(send, second.node_id, second.profile, strength)

    def _check_answer(self, second: SecondMessage) -> None:
        """Raise Refusal if we had better not answer.

        The challenge is not bound to the rest of the answer: somebody in between can
        have put it there.
        """
        own, theirs = self._settings, second.challenge
        check_server_id(own, self._where, second.node_id, self._expected_id)
        if self._offers_strong and is_shoal_challenge(theirs):
            raise HandshakeRefused(f"{self._where}: {DOWNGRADE}")
        if theirs in own.challenges:
            raise HandshakeRefused(f"{self._where} hands a challenge of ours back")
        if resembles_heartbeat(theirs, own.node_id):
            raise HandshakeRefused(f"{self._where}: its challenge could be a heartbeat")
