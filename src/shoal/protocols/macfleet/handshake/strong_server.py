"""The server's part in the handshake between nodes of ours; see ``strong``."""

from shoal.domain.errors import NotAdmitted, PeerError, Unavailable
from shoal.protocols.crowd import BY_NO_TOKEN
from shoal.protocols.macfleet.handshake.messages import (
    control,
    read_first,
    read_id,
    write_first,
)
from shoal.protocols.macfleet.handshake.sealed import (
    Introduction,
    Sealed,
    fleet_of,
    seal,
    unseal,
    verdict,
)
from shoal.protocols.macfleet.handshake.steps import (
    CHALLENGE,
    Agreed,
    Own,
    Refusal,
    Strength,
    StrongPeer,
)
from shoal.protocols.macfleet.handshake.strong import Role, Transcript
from shoal.protocols.macfleet.wire.frames import Flag, Frame, encode
from shoal.protocols.macfleet.wire.hardware import read_profile
from shoal.protocols.session import WRONG_TOKEN, Applicant, Pass, Proof

CHECK = "check --token"
NO_TOKEN = "a token is needed here, and none was presented: give it with --token"
OPEN_HERE = "here is no token, and one was presented: leave --token out"
OTHER_FLEET = "the fleet here has another id: check the id, or leave it out"
SAME_ID = "the node here has the same id: choose another with --name"


class StrongServer:
    """What a server does that was offered this handshake.

    ``client`` is the id that the client claims.
    """

    def __init__(self, own: Own, address: str, certificate: bytes) -> None:
        self._own = own
        self._address = address
        self._transcript = Transcript(certificate)
        self.client = ""

    def answer(self, frame: Frame) -> bytes:
        """Take M1 and return M2, in which nothing is made of a secret.

        Raises Refusal.
        """
        payload = bytes(frame.payload)
        with_challenge = frame.flags & Flag.V2
        self.client = (
            read_first(payload).node_id if with_challenge else read_id(payload)
        )
        if not self.client:
            raise Refusal("a node without an id")
        own = self._own
        second = control(write_first(own.node_id, own.draw(CHALLENGE)), Flag.STRONG)
        self._transcript.add(frame)
        self._transcript.add(second)
        return encode(second)

    def conclude(self, frame: Frame) -> Agreed:
        """Take M3 and return M4.

        Raises Refusal: without M4 if what came makes no sense or is not genuine, so
        that whoever wrote it has no use for reasons.
        """
        try:
            said, sealed = unseal(frame, Introduction, self._transcript)
            profile = read_profile(said.profile)
        except PeerError as error:
            raise Refusal(str(error)) from error
        if said.key and not sealed.signed(self._own, said.key, Role.CLIENT):
            raise Refusal(f"{self.client!a} did not prove the key that it names")
        self._transcript.add(frame)
        shown = _Shown(sealed)
        # Last of all, for it may use a token up.
        admitted = self._pass_for(said, shown)
        verified = self._own.verifies is not None
        peer = StrongPeer(
            has_token=bool(shown.digest),
            public_key=said.key if verified else b"",
            admitted=admitted,
            features=frozenset(said.features),
            version=said.version,
        )
        send = (self._verdict("", shown.digest),)
        return Agreed(send, self.client, profile, Strength.STRONG, peer)

    def _pass_for(self, said: Introduction, shown: "_Shown") -> Pass:
        own = self._own
        if self.client == own.node_id:
            raise self._turned_away(SAME_ID)
        if said.fleet and fleet_of(own) not in (b"", said.fleet):
            raise self._turned_away(OTHER_FLEET)
        token = Proof(said.hint, shown.made_with) if said.proves else ""
        applicant = Applicant(token, self.client, frozenset(), self._address)
        admission = own.admission or self._by_digest
        try:
            admitted = admission(applicant)
        except Unavailable as error:  # the address has guessed too often
            raise self._turned_away(str(error), later=True) from error
        except NotAdmitted as error:
            if not said.proves:
                raise self._turned_away(NO_TOKEN) from error
            raise self._turned_away(f"{error}: {CHECK}", shown) from error
        if said.proves and not shown.digest:
            raise self._turned_away(OPEN_HERE)
        return admitted

    def _by_digest(self, applicant: Applicant) -> Pass:
        """Let in whoever has our own token; without one, everybody."""
        shown, digest = applicant.token, self._own.digest
        if not digest or (isinstance(shown, Proof) and shown.made_with(digest)):
            return BY_NO_TOKEN
        raise NotAdmitted(WRONG_TOKEN)

    def _turned_away(
        self, why: str, shown: "_Shown | None" = None, *, later: bool = False
    ) -> Refusal:
        """Return a refusal that tells the client why.

        ``shown`` is there if a token was looked at: who had it is told with a proof
        that it is us who do not want it, and who had not has guessed.
        """
        digest = b"" if shown is None else shown.digest
        return Refusal(
            f"{self.client!a} is not let in: {why}",
            counts=shown is not None and not digest,
            send=(self._verdict(why, digest, later=later),),
        )

    def _verdict(self, refusal: str, digest: bytes, *, later: bool = False) -> bytes:
        own = self._own
        said = verdict(own, refusal, later=later, proves=bool(digest))
        payload = seal(said, own, Role.SERVER, self._transcript, digest)
        return encode(control(payload, Flag.STRONG))


class _Shown:
    """What a client's proof was made with, once somebody has looked at it."""

    def __init__(self, sealed: Sealed) -> None:
        self._sealed = sealed
        self.digest = b""

    def made_with(self, digest: bytes) -> bool:
        """Say whether it was the token of this digest."""
        if not self._sealed.proves(digest, Role.CLIENT):
            return False
        self.digest = digest
        return True
