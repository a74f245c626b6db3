"""The server's end of a handshake: the client chooses its strength.

``strong_handshake`` describes the strong one.
"""

from collections.abc import Callable

from shoal.domain.errors import NotAdmitted, PeerError, Unavailable
from shoal.protocols.macfleet.codec.frames import Flag, Frame, FrameType, encode_frame
from shoal.protocols.macfleet.codec.hardware import decode_profile
from shoal.protocols.macfleet.handshake import (
    CHALLENGE_SIZE,
    FIRST_MAX,
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
    control_frame,
    decode_first,
    decode_id,
    decode_third,
    encode_first,
    encode_second,
)
from shoal.protocols.macfleet.strong_handshake import (
    HandshakeRole,
    SealedIntroduction,
    SealedProofs,
    Transcript,
    decide,
    fleet_tag,
    seal,
    unseal,
)
from shoal.protocols.seam.admission import (
    NO_JOIN_TOKEN,
    WRONG_TOKEN,
    AdmissionGrant,
    JoinRequest,
    TokenProof,
)

CHECK = "check --token"
TOKEN_REQUIRED = "this fleet requires a token: set --token"
OPEN_HERE = "this fleet is open and the client presented a token: omit --token"
OTHER_FLEET = "this fleet has another id: check the id, or omit it"
SAME_ID = "the server has the same id: choose another with --name"


class StrongServerHandshake:
    """The server of a strong handshake; ``client_id`` is the id the client claims."""

    def __init__(
        self, settings: HandshakeSettings, address: str, certificate: bytes
    ) -> None:
        self._settings = settings
        self._address = address
        self._transcript = Transcript(certificate)
        self.client_id = ""

    def answer(self, frame: Frame) -> bytes:
        """Handle M1 and return M2, which is derived from no secret.

        Raises HandshakeRefused.
        """
        payload = bytes(frame.payload)
        has_challenge = frame.flags & Flag.V2
        self.client_id = (
            decode_first(payload).node_id if has_challenge else decode_id(payload)
        )
        if not self.client_id:
            raise HandshakeRefused("a node without an id")
        settings = self._settings
        second = control_frame(
            encode_first(settings.node_id, settings.random_bytes(CHALLENGE_SIZE)),
            Flag.STRONG,
        )
        self._transcript.add(frame)
        self._transcript.add(second)
        return encode_frame(second)

    def conclude(self, frame: Frame) -> Agreed:
        """Handle M3 and return M4.

        Raises HandshakeRefused; without M4 if the message is malformed or not genuine,
        so that an attacker learns no reason.
        """
        try:
            body, sealed = unseal(frame, SealedIntroduction, self._transcript)
            profile = decode_profile(body.profile)
        except PeerError as error:
            raise HandshakeRefused(str(error)) from error
        if body.key and not sealed.is_signed_by(
            self._settings, body.key, HandshakeRole.CLIENT
        ):
            raise HandshakeRefused(
                f"{self.client_id!a} has not proved that it has the public key it sent"
            )
        self._transcript.add(frame)
        presented = _PresentedProof(sealed)
        # Last, because it may use up a one-time token.
        admitted = self._admit(body, presented)
        verified = self._settings.verifies is not None
        peer = StrongPeer(
            has_token=bool(presented.digest),
            in_fleet=bool(presented.digest)
            # No secret: both are our own, and the peer has proved one of them.
            and presented.digest == self._settings.digest,
            public_key=body.key if verified else b"",
            admitted=admitted,
            features=frozenset(body.features),
            version=body.version,
        )
        send = (self._verdict("", presented.digest),)
        return Agreed(send, self.client_id, profile, HandshakeStrength.STRONG, peer)

    def _admit(
        self, body: SealedIntroduction, presented: "_PresentedProof"
    ) -> AdmissionGrant:
        settings = self._settings
        if self.client_id == settings.node_id:
            raise self._refusal(SAME_ID)
        if body.fleet and fleet_tag(settings) not in (b"", body.fleet):
            raise self._refusal(OTHER_FLEET)
        token = TokenProof(body.hint, presented.matches) if body.proves else ""
        request = JoinRequest(token, self.client_id, frozenset(), self._address)
        admission = settings.admission or self._admit_by_digest
        try:
            admitted = admission(request)
        except Unavailable as error:  # too many failures of this address
            raise self._refusal(str(error), later=True) from error
        except NotAdmitted as error:
            if not body.proves:
                raise self._refusal(TOKEN_REQUIRED) from error
            raise self._refusal(f"{error}: {CHECK}", presented) from error
        if body.proves and not presented.digest:
            raise self._refusal(OPEN_HERE)
        return admitted

    def _admit_by_digest(self, request: JoinRequest) -> AdmissionGrant:
        """Admit holders of this node's token; everyone, if it has none."""
        presented, digest = request.token, self._settings.digest
        if not digest or (
            isinstance(presented, TokenProof) and presented.matches(digest)
        ):
            return NO_JOIN_TOKEN
        raise NotAdmitted(WRONG_TOKEN)

    def _refusal(
        self,
        reason: str,
        presented: "_PresentedProof | None" = None,
        *,
        later: bool = False,
    ) -> HandshakeRefused:
        """Return a refusal that tells the client why.

        ``presented`` is set if a token was compared.  A client with the right token
        receives a proof that the refusal is genuine; a wrong one counts as a failure.
        """
        digest = b"" if presented is None else presented.digest
        return HandshakeRefused(
            f"{self.client_id!a} is refused: {reason}",
            counts_as_failure=presented is not None and not digest,
            send=(self._verdict(reason, digest, later=later),),
        )

    def _verdict(self, refusal: str, digest: bytes, *, later: bool = False) -> bytes:
        settings = self._settings
        body = decide(settings, refusal, later=later, proves=bool(digest))
        payload = seal(body, settings, HandshakeRole.SERVER, self._transcript, digest)
        return encode_frame(control_frame(payload, Flag.STRONG))


class _PresentedProof:
    """The token that a client's proof was made with, once it has been looked up."""

    def __init__(self, sealed: SealedProofs) -> None:
        self._sealed = sealed
        self.digest = b""

    def matches(self, digest: bytes) -> bool:
        """Say whether the proof was made with the token of a digest."""
        if not self._sealed.proves_token(digest, HandshakeRole.CLIENT):
            return False
        self.digest = digest
        return True


DOWNGRADE = (
    "the peer supports the strong handshake but did not offer it: an attacker in "
    "between may have removed the offer"
)


class ServerHandshake:
    """The server's end, for a client at ``address``; see ``FleetHandshake``.

    In v1 and v2 the server answers before the client has proved anything.  A client
    that then leaves, or answers wrongly, may have come for that answer, so it counts as
    a failure.
    """

    def __init__(self, settings: HandshakeSettings, address: str = "") -> None:
        self._settings = settings
        self._address = address
        self._certificate = b""
        self._deadline = 0.0
        self._next: Callable[[Frame, float], Step] = self._receive_first
        self._client_id = ""
        self._challenge = b""  # for the client, in v1 and v2
        self._signed = False  # v2
        self._strong: StrongServerHandshake | None = None

    @property
    def deadline(self) -> float:
        return self._deadline

    @property
    def limit(self) -> int:
        return MESSAGE_MAX if self._client_id else FIRST_MAX

    def on_open(self, certificate: bytes) -> None:
        self._certificate = certificate

    def start(self, now: float) -> list[bytes]:
        self._deadline = now + STEP_TIMEOUT
        return []

    def receive(self, frame: Frame, now: float) -> Step:
        step = self._next(frame, now)
        self._deadline = now + STEP_TIMEOUT
        return step

    def tick(self, now: float) -> None:
        if now >= self._deadline:
            raise self.disconnected(f"sent nothing for {STEP_TIMEOUT:g} s")

    def disconnected(self, reason: str) -> HandshakeRefused:
        client_label = f"{self._client_id!a}: " if self._client_id else ""
        return HandshakeRefused(
            f"{client_label}{reason}", counts_as_failure=bool(self._challenge)
        )

    # The first message.

    def _receive_first(self, frame: Frame, now: float) -> Step:
        settings = self._settings
        if frame.type is not FrameType.CONTROL:
            raise HandshakeRefused(f"expected CONTROL, found {frame.type.name}")
        if frame.flags & Flag.STRONG and HandshakeStrength.STRONG in settings.accepts:
            self._strong = StrongServerHandshake(
                settings, self._address, self._certificate
            )
            send = self._strong.answer(frame)
            self._client_id = self._strong.client_id
            self._next = self._receive_strong_third
            return Continue((send,))
        payload = bytes(frame.payload)
        if settings.key is not None:
            return self._answer_v1_or_v2(settings.key, payload, frame.flags, now)
        return self._accept_open(payload)

    def _accept_open(self, payload: bytes) -> Agreed:
        settings = self._settings
        if HandshakeStrength.OPEN not in settings.accepts or settings.digest:
            raise HandshakeRefused("only Shoal nodes are accepted, and this is not one")
        client = decode_id(payload)
        if client == settings.node_id:
            raise HandshakeRefused(f"it claims this node's id, {client!a}")
        send = (encode_frame(control_frame(settings.node_id.encode(), 0)),)
        return Agreed(send, client, None, HandshakeStrength.OPEN)

    def _answer_v1_or_v2(
        self, key: bytes, payload: bytes, flags: int, now: float
    ) -> Step:
        """Answer a v1 or v2 client, and send a challenge."""
        settings = self._settings
        client, peer_challenge = decode_first(payload)
        strength = HandshakeStrength.V2 if flags & Flag.V2 else HandshakeStrength.V1
        if strength not in settings.accepts:
            raise HandshakeRefused(
                f"{client!a} speaks the handshake {strength.value}, which is not "
                "accepted here"
            )
        if (reason := self._challenge_error(client, peer_challenge)) is not None:
            raise HandshakeRefused(f"{client!a}: {reason}", counts_as_failure=True)
        challenge = draw_challenge(settings)
        settings.challenges.add(challenge, now)
        self._client_id, self._challenge = client, challenge
        self._signed = strength is HandshakeStrength.V2
        self._next = self._receive_third
        profile = settings.profile if self._signed else None
        second = encode_second(
            key, settings.node_id, peer_challenge, challenge, profile
        )
        flag = Flag.V2 if self._signed else 0
        return Continue((encode_frame(control_frame(second, flag)),))

    def _challenge_error(self, client: str, challenge: bytes) -> str | None:
        """Return why a challenge must not be answered, or None."""
        settings = self._settings
        if client == settings.node_id:
            return "it claims this node's id"
        if challenge in settings.challenges:
            return "it returned this node's own challenge"
        if HandshakeStrength.STRONG in settings.accepts and is_shoal_challenge(
            challenge
        ):
            return DOWNGRADE
        if resembles_heartbeat(challenge, settings.node_id):
            return "its challenge could be the signed part of a heartbeat"
        return None

    # The third message; its flags are ignored, the first decides.

    def _receive_third(self, frame: Frame, now: float) -> Agreed:
        key = self._settings.key
        assert key is not None, "only nodes with a key send a challenge"
        try:
            profile = decode_third(
                key,
                self._client_id,
                bytes(frame.payload),
                self._challenge,
                signed=self._signed,
            )
        except PeerError as error:
            raise HandshakeRefused(
                f"{self._client_id!a}: {error}", counts_as_failure=True
            ) from error
        strength = HandshakeStrength.V2 if self._signed else HandshakeStrength.V1
        return Agreed((), self._client_id, profile, strength)

    def _receive_strong_third(self, frame: Frame, now: float) -> Agreed:
        assert self._strong is not None, "it has answered the first message"
        return self._strong.conclude(frame)
