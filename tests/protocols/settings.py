"""What protocols' endpoints are given in tests: nothing in it is drawn or secret."""

from shoal.ledger.keys import Signer, verify
from shoal.protocols.session import Admission, Setting, by_token

SIGNER = Signer.from_seed(bytes(range(32)))


def setting(start: int = 1, admission: Admission | None = None) -> Setting:
    """Return a setting in which random bytes are zeros."""
    return Setting(start, admission or by_token(""), bytes, SIGNER, verify)
