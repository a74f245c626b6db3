"""Which error the end of a job is, for whoever asked."""

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
    WorkerLost,
)
from shoal.domain.facts import JobCancelled, JobExpired, JobFailed
from shoal.domain.outcome import Fault
from shoal.domain.work import Limit

FAULTS: Mapping[Fault, type[ShoalError]] = {
    Fault.WORKER: JobError,
    Fault.REQUEST: InvalidRequest,
    Fault.CONTEXT: ContextExceeded,
}
EXPIRIES: Mapping[Limit, type[ShoalError]] = {
    Limit.QUEUE: NoWorker,
    Limit.FIRST_OUTPUT: NoFirstOutput,
    Limit.SILENCE: OutputStalled,
    Limit.TOTAL: TookTooLong,
}


def error_of(fact: JobFailed | JobCancelled | JobExpired) -> ShoalError:
    """Return what is raised where somebody waits for the job."""
    match fact:
        case JobFailed(error=error, lost=True):
            return WorkerLost(error)
        case JobFailed(error=error, fault=fault):
            return FAULTS[fault](error)
        case JobCancelled(reason=reason):
            return Cancelled(reason)
        case JobExpired(limit=limit, error=error):
            return EXPIRIES[limit](error)
