"""Unique ids for jobs, requests and spans, not for secrets, and the ids of answers.

They come from a generator that the system seeds once in each process: asking the
system for each id costs more than everything else about it.  An answer has the id of
its job after a prefix for its kind.
"""

import os
import random
import secrets  # noqa: TID251  # for the first state alone

from shoal.domain.ids import JobId

_random = random.Random(secrets.randbits(256))
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=lambda: _random.seed(secrets.randbits(256)))


def new_id() -> str:
    """Return 24 hexadecimal digits."""
    return f"{_random.getrandbits(96):024x}"


def new_trace_id() -> str:
    """Return 32 hexadecimal digits, not all 0."""
    return f"{_random.randrange(1, 1 << 128):032x}"


def new_span_id() -> str:
    """Return 16 hexadecimal digits, not all 0."""
    return f"{_random.randrange(1, 1 << 64):016x}"


CHAT_ID_PREFIX = "chatcmpl-"
COMPLETION_ID_PREFIX = "cmpl-"
RERANK_ID_PREFIX = "rerank-"
RESPONSE_ID_PREFIX = "resp_"
MESSAGE_ID_PREFIX = "msg_"

ANSWER_ID_PREFIXES = (
    *(CHAT_ID_PREFIX, COMPLETION_ID_PREFIX),
    *(RERANK_ID_PREFIX, RESPONSE_ID_PREFIX, MESSAGE_ID_PREFIX),
)


def job_id_of(answer_id: str) -> JobId:
    """Return the job of an answer; an id without a prefix is the job's own."""
    for prefix in ANSWER_ID_PREFIXES:
        answer_id = answer_id.removeprefix(prefix)
    return JobId(answer_id)
