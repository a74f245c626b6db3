"""The context of protocols' endpoints in tests: nothing in it is random or secret."""

from shoal.ledger.keys import Signer, verify
from shoal.protocols.seam.admission import AdmissionCheck, require_token
from shoal.protocols.seam.context import ProtocolContext

SIGNER = Signer.from_seed(bytes(range(32)))


def protocol_context(
    epoch: float = 0.0, admission: AdmissionCheck | None = None
) -> ProtocolContext:
    """Return a context in which random bytes are zeros."""
    return ProtocolContext(admission or require_token(""), bytes, SIGNER, verify, epoch)
