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
from shoal.protocols.seam.multi_peer import NO_JOIN_TOKEN
from shoal.protocols.seam.session import (
    WRONG_TOKEN,
    AdmissionGrant,
    JoinRequest,
    TokenProof,
)

CHECK = "check --token"
TOKEN_REQUIRED = "a token is needed here, and none was presented: give it with --token"
OPEN_HERE = "here is no token, and one was presented: leave --token out"
OTHER_FLEET = "the fleet here has another id: check the id, or leave it out"
SAME_ID = "the node here has the same id: choose another with --name"


class StrongServerHandshake:
    """What a server does that was offered this handshake.

    ``client_id`` is the id that the client claims.
    """

    def __init__(
        self, settings: HandshakeSettings, address: str, certificate: bytes
    ) -> None:
        self._settings = settings
        self._address = address
        self._transcript = Transcript(certificate)
        self.client_id = ""

    def answer(self, frame: Frame) -> bytes:
        """Take M1 and return M2, in which nothing is made of a secret.

        Raises HandshakeRefused.
        """
        payload = bytes(frame.payload)
        with_challenge = frame.flags & Flag.V2
        self.client_id = (
            decode_first(payload).node_id if with_challenge else decode_id(payload)
        )
        if not self.client_id:
            raise HandshakeRefused("a node without an id")
        own = self._settings
        second = control_frame(
            encode_first(own.node_id, own.draw(CHALLENGE_SIZE)), Flag.STRONG
        )
        self._transcript.add(frame)
        self._transcript.add(second)
        return encode_frame(second)

    def conclude(self, frame: Frame) -> Agreed:
        """Take M3 and return M4.

        Raises HandshakeRefused: without M4 if what came makes no sense or is not
        genuine, so that whoever wrote it has no use for reasons.
        """
        try:
            said, sealed = unseal(frame, SealedIntroduction, self._transcript)
            profile = decode_profile(said.profile)
        except PeerError as error:
            raise HandshakeRefused(str(error)) from error
        if said.key and not sealed.is_signed_by(
            self._settings, said.key, HandshakeRole.CLIENT
        ):
            raise HandshakeRefused(
                f"{self.client_id!a} did not prove the key that it names"
            )
        self._transcript.add(frame)
        shown = _PresentedProof(sealed)
        # Last of all, for it may use a token up.
        admitted = self._admit(said, shown)
        verified = self._settings.verifies is not None
        peer = StrongPeer(
            has_token=bool(shown.digest),
            public_key=said.key if verified else b"",
            admitted=admitted,
            features=frozenset(said.features),
            version=said.version,
        )
        send = (self._verdict("", shown.digest),)
        return Agreed(send, self.client_id, profile, HandshakeStrength.STRONG, peer)

    def _admit(
        self, said: SealedIntroduction, presented: "_PresentedProof"
    ) -> AdmissionGrant:
        own = self._settings
        if self.client_id == own.node_id:
            raise self._refusal(SAME_ID)
        if said.fleet and fleet_tag(own) not in (b"", said.fleet):
            raise self._refusal(OTHER_FLEET)
        token = TokenProof(said.hint, presented.made_with) if said.proves else ""
        applicant = JoinRequest(token, self.client_id, frozenset(), self._address)
        admission = own.admission or self._admit_by_digest
        try:
            admitted = admission(applicant)
        except Unavailable as error:  # the address has guessed too often
            raise self._refusal(str(error), later=True) from error
        except NotAdmitted as error:
            if not said.proves:
                raise self._refusal(TOKEN_REQUIRED) from error
            raise self._refusal(f"{error}: {CHECK}", presented) from error
        if said.proves and not presented.digest:
            raise self._refusal(OPEN_HERE)
        return admitted

    def _admit_by_digest(self, applicant: JoinRequest) -> AdmissionGrant:
        """Let in whoever has our own token; without one, everybody."""
        shown, digest = applicant.token, self._settings.digest
        if not digest or (isinstance(shown, TokenProof) and shown.matches(digest)):
            return NO_JOIN_TOKEN
        raise NotAdmitted(WRONG_TOKEN)

    def _refusal(
        self,
        why: str,
        presented: "_PresentedProof | None" = None,
        *,
        later: bool = False,
    ) -> HandshakeRefused:
        """Return a refusal that tells the client why.

        ``presented`` is there if a token was looked at: who had it is told with a proof
        that it is us who do not want it, and who had not has guessed.
        """
        digest = b"" if presented is None else presented.digest
        return HandshakeRefused(
            f"{self.client_id!a} is not let in: {why}",
            counts_as_failure=presented is not None and not digest,
            send=(self._verdict(why, digest, later=later),),
        )

    def _verdict(self, refusal: str, digest: bytes, *, later: bool = False) -> bytes:
        own = self._settings
        said = decide(own, refusal, later=later, proves=bool(digest))
        payload = seal(said, own, HandshakeRole.SERVER, self._transcript, digest)
        return encode_frame(control_frame(payload, Flag.STRONG))


class _PresentedProof:
    """What a client's proof was made with, once somebody has looked at it."""

    def __init__(self, sealed: SealedProofs) -> None:
        self._sealed = sealed
        self.digest = b""

    def made_with(self, digest: bytes) -> bool:
        """Say whether it was the token of this digest."""
        if not self._sealed.proves_token(digest, HandshakeRole.CLIENT):
            return False
        self.digest = digest
        return True


DOWNGRADE = (
    "it speaks the strong handshake and did not offer it: somebody in between has "
    "taken the offer out"
)


class ServerHandshake:
    """Waits for whoever comes from an address; see ``FleetHandshake``.

    In v1 and v2 our answer comes before the client's: whoever leaves with it, or gets
    it wrong, may have come for it, and counts as one who has guessed.
    """

    def __init__(self, settings: HandshakeSettings, address: str = "") -> None:
        self._settings = settings
        self._address = address
        self._certificate = b""
        self._deadline = 0.0
        self._next: Callable[[Frame, float], Step] = self._first
        self._client_id = ""
        self._challenge = b""  # that v1's or v2's client has to answer
        self._signed = False  # it is v2's
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
            raise self.disconnected(f"nothing came within {STEP_TIMEOUT:g} s")

    def disconnected(self, why: str) -> HandshakeRefused:
        who = f"{self._client_id!a}: " if self._client_id else ""
        return HandshakeRefused(f"{who}{why}", counts_as_failure=bool(self._challenge))

    # The first message, in the order in which it is looked at.

    def _first(self, frame: Frame, now: float) -> Step:
        own = self._settings
        if frame.type is not FrameType.CONTROL:
            raise HandshakeRefused(f"it began with {frame.type.name}, expected CONTROL")
        if frame.flags & Flag.STRONG and HandshakeStrength.STRONG in own.accepts:
            self._strong = StrongServerHandshake(own, self._address, self._certificate)
            send = self._strong.answer(frame)
            self._client_id = self._strong.client_id
            self._next = self._strong_third
            return Continue((send,))
        payload = bytes(frame.payload)
        if own.key is not None:
            return self._challenged(own.key, payload, frame.flags, now)
        return self._open(payload)

    def _open(self, payload: bytes) -> Agreed:
        own = self._settings
        if HandshakeStrength.OPEN not in own.accepts or own.digest:
            raise HandshakeRefused("only nodes of ours are let in here, and it is none")
        client = decode_id(payload)
        if client == own.node_id:
            raise HandshakeRefused(f"it claims our own id, {client!a}")
        send = (encode_frame(control_frame(own.node_id.encode(), 0)),)
        return Agreed(send, client, None, HandshakeStrength.OPEN)

    def _challenged(self, key: bytes, payload: bytes, flags: int, now: float) -> Step:
        """Answer a client of v1 or v2, and challenge it in turn."""
        own = self._settings
        client, theirs = decode_first(payload)
        strength = HandshakeStrength.V2 if flags & Flag.V2 else HandshakeStrength.V1
        if strength not in own.accepts:
            raise HandshakeRefused(
                f"{client!a} speaks the handshake {strength.value}, which is not "
                "accepted here"
            )
        if (why := self._objection(client, theirs)) is not None:
            raise HandshakeRefused(f"{client!a}: {why}", counts_as_failure=True)
        ours = draw_challenge(own)
        own.challenges.add(ours, now)
        self._client_id, self._challenge = client, ours
        self._signed = strength is HandshakeStrength.V2
        self._next = self._third
        profile = own.profile if self._signed else None
        second = encode_second(key, own.node_id, theirs, ours, profile)
        flag = Flag.V2 if self._signed else 0
        return Continue((encode_frame(control_frame(second, flag)),))

    def _objection(self, client: str, challenge: bytes) -> str | None:
        """Say why a challenge is not answered, or None."""
        own = self._settings
        if client == own.node_id:
            return "it claims our own id"
        if challenge in own.challenges:
            return "it hands a challenge of ours back"
        if HandshakeStrength.STRONG in own.accepts and is_shoal_challenge(challenge):
            return DOWNGRADE
        if resembles_heartbeat(challenge, own.node_id):
            return "its challenge could be a heartbeat, which we would sign"
        return None

    # The third, which is of the kind that the first was of, whatever it says.

    def _third(self, frame: Frame, now: float) -> Agreed:
        key = self._settings.key
        assert key is not None, "or there would have been no challenge"
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

    def _strong_third(self, frame: Frame, now: float) -> Agreed:
        assert self._strong is not None, "it has answered the first"
        return self._strong.conclude(frame)
