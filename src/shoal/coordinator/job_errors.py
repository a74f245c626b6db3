"""The error that a client sees for a job that failed, was cancelled or expired."""

from collections.abc import Mapping

from shoal.domain import errors
from shoal.domain.facts import JobCancelled, JobExpired, JobFailed
from shoal.domain.job import TimeLimit
from shoal.domain.outcome import Fault

FAULT_ERRORS: Mapping[Fault, type[errors.ShoalError]] = {
    Fault.WORKER: errors.JobError,
    Fault.ENGINE: errors.JobError,
    Fault.REQUEST: errors.InvalidRequest,
    Fault.CONTEXT: errors.ContextExceeded,
    Fault.SIZE: errors.TooLarge,
    Fault.VALUES: errors.Unprocessable,
}
LIMIT_ERRORS: Mapping[TimeLimit, type[errors.ShoalError]] = {
    TimeLimit.QUEUE: errors.NoWorker,
    TimeLimit.FIRST_OUTPUT: errors.NoFirstOutput,
    TimeLimit.SILENCE: errors.OutputStalled,
    TimeLimit.TOTAL: errors.TookTooLong,
}


def error_of(fact: JobFailed | JobCancelled | JobExpired) -> errors.ShoalError:
    """Return the error that clients of the job get."""
    match fact:
        case JobFailed(error=error, lost=True):
            return errors.WorkerLost(error)
        case JobFailed(error=error, fault=Fault.WORKER, exception=exception):
            return errors.JobError(error, exception)
        case JobFailed(error=error, fault=fault):
            return FAULT_ERRORS[fault](error)
        case JobCancelled(reason=reason):
            return errors.Cancelled(reason)
        case JobExpired(error=error, retry_after=seconds) if seconds:
            return errors.NoWorker(error, seconds)
        case JobExpired(limit=limit, error=error):
            return LIMIT_ERRORS[limit](error)
