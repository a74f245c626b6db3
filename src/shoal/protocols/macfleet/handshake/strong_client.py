"""The client's part in the handshake between nodes of ours; see ``strong``."""

from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.handshake.messages import control, read_first
from shoal.protocols.macfleet.handshake.sealed import (
    Verdict,
    introduction,
    seal,
    unseal,
)
from shoal.protocols.macfleet.handshake.steps import (
    Agreed,
    Own,
    Refusal,
    Strength,
    StrongPeer,
)
from shoal.protocols.macfleet.handshake.strong import Role, Transcript
from shoal.protocols.macfleet.wire.frames import Flag, Frame, encode
from shoal.protocols.macfleet.wire.hardware import read_profile


class StrongClient:
    """What a client does whose offer was taken up; ``where`` is whom it dialled."""

    def __init__(self, own: Own, where: str, certificate: bytes, first: Frame) -> None:
        self._own = own
        self._where = where
        self._transcript = Transcript(certificate)
        self._transcript.add(first)
        self._server = ""

    def prove(self, frame: Frame, expected: str) -> bytes:
        """Take M2 and return M3; ``expected`` is the server's id, if that is known.

        Raises Refusal.
        """
        self._server = read_first(bytes(frame.payload)).node_id
        who_answers(self._own, self._where, self._server, expected)
        self._transcript.add(frame)
        own = self._own
        said = introduction(own)
        payload = seal(said, own, Role.CLIENT, self._transcript, own.digest)
        third = control(payload, Flag.STRONG)
        self._transcript.add(third)
        return encode(third)

    def conclude(self, frame: Frame) -> Agreed:
        """Take M4.

        Raises Refusal, with what to do.
        """
        own = self._own
        try:
            said, sealed = unseal(frame, Verdict, self._transcript)
            profile = read_profile(said.profile)
        except PeerError as error:
            raise Refusal(f"{self._where}: {error}") from error
        if said.refusal:
            raise Refusal(
                f"{self._where} does not let {own.node_id!a} in: "
                f"{_shown(said.refusal)}",
                final=not said.later,
            )
        proved = said.proves and sealed.proves(own.digest, Role.SERVER)
        if own.digest and not proved:
            raise Refusal(
                f"{self._where} has not proved that it has our token: somebody else "
                "may listen there",
            )
        if said.key and not sealed.signed(own, said.key, Role.SERVER):
            raise Refusal(f"{self._where} has not proved the key that it names")
        peer = StrongPeer(
            has_token=bool(own.digest),
            public_key=said.key if own.verifies is not None else b"",
            features=frozenset(said.features),
            version=said.version,
        )
        return Agreed((), self._server, profile, Strength.STRONG, peer)


def who_answers(own: Own, where: str, said: str, expected: str) -> None:
    """Look at the id of whom we dialled.

    Raises Refusal if it is our own, or another than was expected.
    """
    if said == own.node_id:
        raise Refusal(
            f"{where} has our own id, {said!a}: it is this node itself, or a name was "
            "given to two (--name)",
            namesake=True,
        )
    if expected and said != expected:
        raise Refusal(f"{where} is {said!a}, expected {expected!a}")


def _shown(refusal: str) -> str:
    """Return what a peer says, fit for a terminal."""
    return ascii(refusal)[1:-1]
