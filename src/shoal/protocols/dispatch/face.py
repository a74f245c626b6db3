"""What a worker asks of a Dispatch coordinator over HTTP.

Source: exchanges recorded with the original coordinator.
"""

from collections.abc import Mapping

from shoal.domain.errors import NotAdmitted
from shoal.protocols import Face, Pairing

ERROR_MAX = 300  # characters of what a coordinator says went wrong that are shown

HEALTH = frozenset({"status", "workers_online", "network"})

REFUSALS = {
    "invalid_code": "there is no such code: ask for a new one",
    "already_claimed": "the code has been used; if this worker did, it is paired",
    "expired": "the code has expired: ask for a new one",
}


def is_health(answer: object) -> bool:
    """Say whether this is what the original answers, asked how it is."""
    return isinstance(answer, Mapping) and answer.keys() >= HEALTH


def claim(code: str, public_key: bytes) -> dict[str, object]:
    """Return what a worker posts to be paired."""
    # The original makes codes of capitals, and compares letter by letter.
    return {"pairing_code": code.upper(), "provider_pubkey": public_key.hex()}


def paired_with(answer: object) -> str:
    """Return the user who made the code.

    Raises NotAdmitted, saying why the worker is not paired.
    """
    match answer:
        case {"user_id": str() as user}:
            return user
        case {"error": str() as error} | {"error": {"message": str() as error}}:
            raise NotAdmitted(REFUSALS.get(error, error[:ERROR_MAX]))
        case _:
            raise NotAdmitted("the coordinator knows nothing of pairing codes")


FACE = Face("/v1/health", is_health)
PAIRING = Pairing("/v1/trust/claim", claim, paired_with)
