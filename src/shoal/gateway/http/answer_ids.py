"""The ids of answers: a prefix for each kind of answer, and the id of its job."""

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


def job_id_of(answer_id: str) -> JobId:
    """Return the job of an answer; an id without a prefix is the job's own."""
    for prefix in ANSWER_ID_PREFIXES:
        answer_id = answer_id.removeprefix(prefix)
    return JobId(answer_id)
