"""The token of a run, and the id that it certifies.

Only the members of a run, and who submitted it, have the token.  The id is its digest,
so that the coordinator checks a token without storing any.
"""

import hashlib

TOKEN_SIZE = 32  # random bytes
ID_SIZE = 32  # hexadecimal digits of a run's id


def member_key(run_id: str, node: int) -> str:
    """Return the idempotency key of a member's call, by which its job is found."""
    return f"{run_id}/{node}"


def run_id_of(token: str) -> str:
    """Return the id of the run that a token belongs to."""
    return hashlib.sha256(token.encode()).hexdigest()[:ID_SIZE]
