"""The error that a client sees for a job that failed, was cancelled or expired."""

from collections.abc import Mapping

from shoal.domain.errors import (
    Cancelled,
    ContextExceeded,
    InvalidRequest,
    JobError,
    NoFirstOutput,
    NoWorker,
    OutputStalled,
    ShoalError,
    TookTooLong,
    TooLarge,
    Unprocessable,
    WorkerLost,
)
from shoal.domain.facts import JobCancelled, JobExpired, JobFailed
from shoal.domain.job import TimeLimit
from shoal.domain.outcome import Fault

FAULT_ERRORS: Mapping[Fault, type[ShoalError]] = {
    Fault.WORKER: JobError,
    Fault.ENGINE: JobError,
    Fault.REQUEST: InvalidRequest,
    Fault.CONTEXT: ContextExceeded,
    Fault.SIZE: TooLarge,
    Fault.VALUES: Unprocessable,
}
LIMIT_ERRORS: Mapping[TimeLimit, type[ShoalError]] = {
    TimeLimit.QUEUE: NoWorker,
    TimeLimit.FIRST_OUTPUT: NoFirstOutput,
    TimeLimit.SILENCE: OutputStalled,
    TimeLimit.TOTAL: TookTooLong,
}


def error_of(fact: JobFailed | JobCancelled | JobExpired) -> ShoalError:
    """Return the error that clients of the job get."""
    match fact:
        case JobFailed(error=error, lost=True):
            return WorkerLost(error)
        case JobFailed(error=error, fault=Fault.WORKER, exception=exception):
            return JobError(error, exception)
        case JobFailed(error=error, fault=fault):
            return FAULT_ERRORS[fault](error)
        case JobCancelled(reason=reason):
            return Cancelled(reason)
        case JobExpired(error=error, retry_after=seconds) if seconds:
            return NoWorker(error, seconds)
        case JobExpired(limit=limit, error=error):
            return LIMIT_ERRORS[limit](error)
