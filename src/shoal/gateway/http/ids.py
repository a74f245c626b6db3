"""Unique ids for jobs and requests, not for secrets, and how answers are named.

They come from a generator that the system seeds once: asking the system for each id
costs more than everything else about it.
"""

import random
import secrets

from shoal.domain.ids import JobId

CHAT_ID_PREFIX = "chatcmpl-"
COMPLETION_ID_PREFIX = "cmpl-"
RERANK_ID_PREFIX = "rerank-"
RESPONSE_ID_PREFIX = "resp_"
MESSAGE_ID_PREFIX = "msg_"

ANSWER_ID_PREFIXES = (
    *(CHAT_ID_PREFIX, COMPLETION_ID_PREFIX),
    *(RERANK_ID_PREFIX, RESPONSE_ID_PREFIX, MESSAGE_ID_PREFIX),
)
"""The id of an answer is one of these and its job's id."""

_random = random.Random(secrets.randbits(256))


def new_id() -> str:
    """Return 24 hexadecimal digits."""
    return f"{_random.getrandbits(96):024x}"


def job_id_of(answer_id: str) -> JobId:
    """Return the job of an answer; an id without a prefix is the job's own."""
    for prefix in ANSWER_ID_PREFIXES:
        answer_id = answer_id.removeprefix(prefix)
    return JobId(answer_id)
