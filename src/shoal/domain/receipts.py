"""A worker's receipt for a job, and the verdict on it."""

from enum import Enum

import msgspec

RECEIPT_SIZE_MAX = 65_536
"""Maximum size of a worker's receipt in bytes; real ones have about 300."""


class Verdict(Enum):
    """The verdict on a worker's receipt; the value is for display."""

    VALID = "the worker signed this output of this job"
    UNSIGNED = "the worker's protocol carries no receipts"
    MISSING = "the worker sent no receipt"
    MALFORMED = "the worker's receipt cannot be read"
    WRONG_JOB = "the worker's receipt is for another job"
    WRONG_WORKER = "the worker's receipt names the key of another worker"
    WRONG_OUTPUT = "the worker's receipt is for another output"
    BAD_SIGNATURE = "the signature is not the worker's"

    __hash__ = object.__hash__  # members are singletons, hashed very often


class SignedReceipt(msgspec.Struct, frozen=True):
    """A worker's receipt; ``body`` holds exactly the signed bytes."""

    body: bytes
    signature: bytes
