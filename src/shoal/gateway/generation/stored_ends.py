"""How a stored job ended, as its answer shows it."""

from collections.abc import Mapping

from shoal.domain.errors import Cancelled, JobError, ShoalError, TimedOut
from shoal.domain.outcome import Outcome
from shoal.gateway.context import Gateway
from shoal.gateway.generation.moderation import shown_outcome
from shoal.pool.lifecycle import JobState
from shoal.store.port import StoredJob

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
