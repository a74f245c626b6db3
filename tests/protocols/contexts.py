"""The context of protocols' endpoints in tests: nothing in it is random or secret."""

from shoal.domain.errors import NotAdmitted
from shoal.ledger.keys import Signer, verify
from shoal.protocols.seam.admission import (
    WRONG_TOKEN,
    AdmissionCheck,
    AdmissionGrant,
    JoinRequest,
    proves_token,
)
from shoal.protocols.seam.context import ProtocolContext

SIGNER = Signer.from_seed(bytes(range(32)))


def protocol_context(
    epoch: float = 0.0, admission: AdmissionCheck | None = None
) -> ProtocolContext:
    """Return a context in which random bytes are zeros."""
    return ProtocolContext(admission or require_token(""), bytes, SIGNER, verify, epoch)


def require_token(token: str) -> AdmissionCheck:
    """Return a check that requires ``token``; an empty one admits every worker."""

    def admit(request: JoinRequest) -> AdmissionGrant:
        if proves_token(request.token, token):
            return AdmissionGrant()
        raise NotAdmitted(WRONG_TOKEN)

    return admit
