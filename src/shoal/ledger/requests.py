"""The request of a job, as the bytes that receipts hash, and the salt of the hash.

Without the salt, anyone who sees a receipt could guess a short question, and test the
guess.  Only the owner of the job gets it.
"""

import hashlib

import msgspec

from shoal.domain.ids import JobId
from shoal.domain.job_kinds import WORK_TYPES
from shoal.domain.work import JSON, Call, CallStream, JobKind, ModelOrder, Work
from shoal.ledger.canonical import encode_any
from shoal.ledger.keys import Signer
from shoal.ledger.worker_receipts import HASH

SALT_SIZE = 16  # bytes
SALT_PURPOSE = b"shoal request salt v1\n"


def request_of(work: Work) -> bytes:
    """Return what a job asks for as canonical JSON, with what ``encode_any`` replaces.

    Fields that the request leaves open are absent.
    """
    found: dict[str, JSON] = {"kind": _KINDS[work.kind]}
    match work:
        case Call(args=args, kwargs=kwargs, blobs=blobs):
            found |= {"args": _hash(args), "kwargs": _hash(kwargs)}
            found["blobs"] = [HASH + digest.hex() for digest in blobs] or None
            found |= _call_fields(work)
        case CallStream():
            found |= _call_fields(work)
        case ModelOrder():
            found |= msgspec.to_builtins(work)
        case _:
            for name in _NAMES[type(work)]:
                found[name] = getattr(work, name)
            found["options"] = found.get("options") or None
    return encode_any(
        {name: value for name, value in found.items() if value is not None}
    )


_KINDS = {each: each.name.lower() for each in JobKind}
_NAMES = {work: work.__struct_fields__ for work in WORK_TYPES.values()}
"""The fields of each kind of work."""


def _call_fields(work: Call | CallStream) -> dict[str, JSON]:
    return {
        "name": work.name,
        "timeout": work.timeout,
        "needs": sorted(each.value for each in work.needs) or None,
        "python": work.python or None,
    }


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return HASH + digest.hexdigest()


def request_salt(signer: Signer, job_id: JobId) -> bytes:
    """Return the salt of a job's request: only this key's owner can compute it."""
    return signer.derive(SALT_PURPOSE + job_id.encode())[:SALT_SIZE]


def request_hash_of(salt: bytes, request: bytes) -> str:
    """Return a request's hash in the form of the coordinator's receipts."""
    return _hash(salt, request)
