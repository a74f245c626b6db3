"""The moderation of what clients ask for, and of what they are answered.

What a stored job has answered is moderated when it is shown.
"""

from collections.abc import Mapping

from shoal.domain.errors import (
    Cancelled,
    InvalidRequest,
    JobError,
    ShoalError,
    TimedOut,
)
from shoal.domain.moderation import AnswerModerator
from shoal.domain.outcome import Outcome
from shoal.domain.work import Embedding, Inference, Rerank, Work
from shoal.gateway.context import Gateway
from shoal.pool.lifecycle import JobState
from shoal.store.port import StoredJob


def check_work(gateway: Gateway, owner: str, work: Inference, field: str) -> None:
    """Raise InvalidRequest if the work matches the moderation list.

    ``field`` is the body's field with the texts that the model reads.
    """
    moderation = gateway.moderation_for(owner)
    if moderation is not None and moderation.blocks_work(work):
        raise InvalidRequest(f"the {field} match the moderation list", field)


def answer_moderator(gateway: Gateway, owner: str) -> AnswerModerator | None:
    """Return a moderator for one streamed answer to ``owner``, if it is moderated."""
    moderation = gateway.moderation_for(owner)
    return None if moderation is None else moderation.moderate_answer()


def shown_outcome(
    gateway: Gateway, owner: str, work: Work, outcome: Outcome
) -> Outcome:
    """Return the outcome that is shown: filtered, if its text matches."""
    moderation = gateway.moderation_for(owner)
    if moderation is None or isinstance(work, Embedding | Rerank):
        return outcome  # vectors and scores are no text
    return moderation.filter_outcome(outcome)


END_ERRORS: Mapping[JobState, type[ShoalError]] = {
    JobState.FAILED: JobError,
    JobState.CANCELLED: Cancelled,
    JobState.EXPIRED: TimedOut,
}


def stored_end(gateway: Gateway, stored: StoredJob) -> Outcome | ShoalError:
    """Return the moderated outcome of a job that has ended, or why it has none."""
    job, outcome = stored.job, stored.outcome
    if outcome is None:
        return END_ERRORS[stored.state](stored.error or stored.state.value)
    return shown_outcome(gateway, job.owner, job.work, outcome)
