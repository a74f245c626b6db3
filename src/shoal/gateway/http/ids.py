"""Unique ids for jobs, requests and spans, and the ids of answers.

They are random bytes of the system: known ids do not reveal the next one.  An answer
has the id of its job after a prefix for its kind.
"""

import os

from shoal.domain.ids import JobId


def new_id() -> str:
    """Return 24 hexadecimal digits."""
    return os.urandom(12).hex()


def new_trace_id() -> str:
    """Return 32 hexadecimal digits."""
    return os.urandom(16).hex()


def new_span_id() -> str:
    """Return 16 hexadecimal digits."""
    return os.urandom(8).hex()


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
