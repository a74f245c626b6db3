"""What Shoal's ranks of a training run say to each other: a handshake, then segments.

Each handshake message is a head (its kind and the size of its body) and a body::

    HELLO     dialling rank: 32 random bytes, and its id
    HELLO     accepting rank: the same
    PROOF     dialling rank: that it has the secret of the group
    PROOF     accepting rank: the same

``REFUSED`` with a reason ends it instead.  The proofs are those of ``token_proof``.
Their binding covers both ids, both random values and the server's certificate, so that
one made for another connection, rank or role proves nothing.
"""

import hmac
from collections.abc import Callable
from enum import IntEnum
from hashlib import sha256
from struct import Struct
from typing import Final

from shoal.domain.credentials import digest_of
from shoal.domain.errors import NotAdmitted, PeerError
from shoal.protocols.seam.ranks import (
    HandshakeStep,
    RankIdentity,
    RankRefused,
    SegmentHead,
    SegmentLabel,
)
from shoal.protocols.seam.token_proof import ProofRole, prove_token

RANDOM_SIZE: Final = 32  # bytes
BODY_MAX: Final = 1024  # bytes of a handshake message
OTHER_SECRET: Final = "the other rank has not proved the secret of this group"

_LABEL: Final = b"shoal ranks 1\n"
_MESSAGE: Final = Struct("!BH")  # kind, and size of the body
_SEGMENT: Final = Struct("!BHIIIQ")  # kind, generation, operation, segment, step, size


class _Kind(IntEnum):
    HELLO = 1
    PROOF = 2
    REFUSED = 3


class ShoalRanks:
    """The messages and handshakes of one rank; see ``SegmentWire``."""

    head_size = _SEGMENT.size

    def client(
        self, identity: RankIdentity, server: str, address: str
    ) -> "RankHandshakeEnd":
        def secret_of(name: str) -> str:
            if name != server:
                raise NotAdmitted(f"{name!a} listens at {address}, and not {server!a}")
            return identity.secret

        return RankHandshakeEnd(identity, ProofRole.DIALLING, secret_of)

    def server(
        self, identity: RankIdentity, address: str, secret_of: Callable[[str], str]
    ) -> "RankHandshakeEnd":
        return RankHandshakeEnd(identity, ProofRole.ACCEPTING, secret_of)

    def encode_segment(self, label: SegmentLabel, size: int) -> bytes:
        kind, operation, segment, generation, step = label
        return _SEGMENT.pack(kind, generation, operation, segment, step, size)

    def decode_segment(self, head: bytes) -> SegmentHead:
        kind, generation, operation, segment, step, size = _SEGMENT.unpack(head)
        label = SegmentLabel(kind, operation, segment, generation, step)
        return SegmentHead(label, size)


class RankHandshakeEnd:
    """One end of a handshake; see ``RankHandshake``.

    ``role`` is DIALLING for the rank that dials.  ``secret_of`` takes the other rank's
    id and returns the secret of their group, or raises NotAdmitted.
    """

    head_size = _MESSAGE.size

    def __init__(
        self, identity: RankIdentity, role: ProofRole, secret_of: Callable[[str], str]
    ) -> None:
        self._role = role
        self._secret_of = secret_of
        random = identity.random_bytes(RANDOM_SIZE)
        self._hello = _encode(_Kind.HELLO, random + identity.node_id.encode())
        self._transcript = sha256(_LABEL)
        self._peer: str | None = None
        self._digest = b""  # of the secret

    def on_open(self, certificate: bytes) -> None:
        self._transcript.update(sha256(certificate).digest())

    def start(self, now: float) -> bytes:
        return self._hello if self._role is ProofRole.DIALLING else b""

    def body_size(self, head: bytes) -> int:
        kind, size = _MESSAGE.unpack(head)
        expected = _Kind.HELLO if self._peer is None else _Kind.PROOF
        if kind not in (expected, _Kind.REFUSED) or size > BODY_MAX:
            raise RankRefused(f"a message of kind {kind} and {size} bytes is not due")
        return int(size)

    def receive(self, head: bytes, body: bytes, now: float) -> HandshakeStep:
        kind, _ = _MESSAGE.unpack(head)
        if kind == _Kind.REFUSED:
            raise RankRefused(body.decode(errors="replace"))
        try:
            if self._peer is None:
                return self._on_hello(head + body, body)
            return self._on_proof(body)
        except (NotAdmitted, PeerError) as error:
            reason = str(error)
            refused = _encode(_Kind.REFUSED, reason.encode()[:BODY_MAX])
            raise RankRefused(reason, refused) from error

    def _on_hello(self, message: bytes, body: bytes) -> HandshakeStep:
        try:
            peer = body[RANDOM_SIZE:].decode()
        except UnicodeDecodeError as error:
            raise PeerError("the id of the other rank is not UTF-8") from error
        if len(body) <= RANDOM_SIZE:
            raise PeerError("the other rank has no id")
        self._digest = digest_of(self._secret_of(peer))
        self._peer = peer
        if self._role is ProofRole.ACCEPTING:
            self._transcript.update(message + self._hello)
            return HandshakeStep(self._hello, None)
        self._transcript.update(self._hello + message)
        return HandshakeStep(self._proof(self._role), None)

    def _on_proof(self, body: bytes) -> HandshakeStep:
        # The dialling rank proves first, so a stranger gets nothing to guess from.
        if self._role is ProofRole.ACCEPTING:
            expected, answer = ProofRole.DIALLING, self._proof(self._role)
        else:
            expected, answer = ProofRole.ACCEPTING, b""
        if not hmac.compare_digest(self._proof(expected), _encode(_Kind.PROOF, body)):
            raise NotAdmitted(OTHER_SECRET)
        return HandshakeStep(answer, self._peer)

    def _proof(self, role: ProofRole) -> bytes:
        binding = self._transcript.digest()
        return _encode(_Kind.PROOF, prove_token(self._digest, role, binding))


def _encode(kind: _Kind, body: bytes) -> bytes:
    return _MESSAGE.pack(kind, len(body)) + body
