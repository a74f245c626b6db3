import pytest

from shoal.domain.credentials import digest_of
from shoal.protocols.seam.token_proof import PresentedProof, ProofRole, prove_token

DIGEST = digest_of("a token")
BINDING = b"a channel"


def test_a_proof_matches_its_token_and_remembers_it() -> None:
    proof = prove_token(DIGEST, ProofRole.DIALLING, BINDING)
    presented = PresentedProof(proof, ProofRole.DIALLING, BINDING)

    assert not presented.matches(digest_of("another"))
    assert presented.digest == b""
    assert presented.matches(DIGEST)
    assert presented.digest == DIGEST


@pytest.mark.parametrize(
    ("role", "binding"),
    [(ProofRole.ACCEPTING, BINDING), (ProofRole.DIALLING, b"another channel")],
    ids=["reflected", "of another channel"],
)
def test_a_proof_is_valid_for_one_role_and_one_channel(
    role: ProofRole, binding: bytes
) -> None:
    proof = prove_token(DIGEST, ProofRole.DIALLING, BINDING)

    assert not PresentedProof(proof, role, binding).matches(DIGEST)


@pytest.mark.parametrize("proof", [b"", bytes(31), bytes(32), bytes(64)])
def test_garbage_proves_nothing(proof: bytes) -> None:
    assert not PresentedProof(proof, ProofRole.DIALLING, BINDING).matches(DIGEST)


def test_a_proof_reveals_neither_the_token_nor_its_digest() -> None:
    proof = prove_token(DIGEST, ProofRole.DIALLING, BINDING)

    assert proof != DIGEST
    assert len(proof) == 32
