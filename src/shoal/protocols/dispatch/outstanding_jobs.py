"""The jobs assigned to a worker, and the events its reports about them cause."""

import re
from collections.abc import Sequence
from typing import TypeAlias

from shoal.domain.errors import PeerError
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import (
    Completed,
    Event,
    ReceiptSent,
    Rejected,
    RunJob,
)
from shoal.protocols.dispatch.answers import AssignedJob, read_answer
from shoal.protocols.dispatch.ecmascript_json import to_json, well_formed
from shoal.protocols.dispatch.messages import (
    REASON_MAX,
    DispatchErrorCode,
    ErrorMessage,
    InvalidMessage,
    JobComplete,
    JobReject,
    ReceiptSubmit,
)
from shoal.protocols.dispatch.receipts import UNREADABLE, read_submitted
from shoal.protocols.seam.session import Send

_ISSUED_ID = re.compile(r"[!-~]+")  # recorded ids are logged as well

NO_REASON = "no reason given"

STRAYS_MAX = 64  # reports on other jobs that are passed on: each is stored
UNSIGNED_MAX = 256  # ended jobs whose receipt may still arrive separately


class OutstandingJobs:
    """The jobs assigned on one connection."""

    def __init__(self) -> None:
        self._assigned: dict[str, AssignedJob] = {}
        self._unsigned: dict[JobId, None] = {}  # ended without a receipt, oldest first
        self._stray_reports_left = STRAYS_MAX

    def add(self, job: RunJob) -> None:
        """Record that a job is assigned to the worker."""
        self._assigned[job.job_id] = AssignedJob(
            job.job_id, job.lease, job.work.kind, bool(job.terms.form)
        )

    def find(self, job_id: str) -> AssignedJob | None:
        """Return an assigned job."""
        return self._assigned.get(job_id)

    def end(self, job: AssignedJob, *, signed: bool) -> None:
        """Record the end of a job; it allows one more report on other jobs."""
        del self._assigned[job.job_id]
        self._stray_reports_left = min(self._stray_reports_left + 1, STRAYS_MAX)
        if not signed:
            self._unsigned[job.job_id] = None
            if len(self._unsigned) > UNSIGNED_MAX:
                del self._unsigned[next(iter(self._unsigned))]

    def awaits_receipt(self, job_id: JobId) -> bool:
        """Return whether a job ended without a receipt; true only once per job."""
        if job_id not in self._unsigned:
            return False
        del self._unsigned[job_id]
        return True

    def may_report_stray(self, job_id: str) -> bool:
        """Return whether to pass on a report on a job of another connection.

        Such reports are rate-limited, and the id must be one that Shoal can issue.
        """
        if not self._stray_reports_left or not _ISSUED_ID.fullmatch(job_id):
            return False
        self._stray_reports_left -= 1
        return True


Report: TypeAlias = Sequence[Event | Send | InvalidMessage]
"""What a message causes.  An InvalidMessage counts against the worker, a Send does not:
an answer with a wrong hash is still an answer."""

NO_LEASE = LeaseNumber(0)  # no job has it, so the result counts as late


def completed(jobs: OutstandingJobs, message: JobComplete) -> Report:
    """Process an answer; if it is invalid, another worker gets the job."""
    job = jobs.find(message.job_id)
    if job is None:
        unknown = _unknown_job(message.job_id)
        if not jobs.may_report_stray(message.job_id):
            return (unknown,)
        return (Completed(JobId(message.job_id), NO_LEASE), unknown)
    try:
        event, warning = read_answer(job, message)
    except PeerError as error:
        jobs.end(job, signed=True)
        return (
            Rejected(job.job_id, job.lease, str(error)),
            _error_message(str(error)),
        )
    receipt = event.receipt if isinstance(event, Completed) else None
    jobs.end(job, signed=receipt is not None)
    report: list[Event | Send] = [event]
    if receipt is UNREADABLE:
        report.append(
            _error_message("job_complete: receipt: it or its signature cannot be read")
        )
    if warning:
        report.append(_error_message(warning))
    return report


def rejected(jobs: OutstandingJobs, message: JobReject) -> Report:
    """Process the rejection of a job."""
    job = jobs.find(message.job_id)
    if job is None:
        return (_unknown_job(message.job_id),)
    jobs.end(job, signed=True)
    given = message.reason
    reason = well_formed(given[:REASON_MAX]) if isinstance(given, str) else NO_REASON
    return (Rejected(job.job_id, job.lease, reason),)


def submitted(jobs: OutstandingJobs, message: ReceiptSubmit) -> Report:
    """Process a receipt that arrives separately, before or after its answer."""
    try:
        job_id, receipt = read_submitted(message)
    except PeerError as error:
        return (
            InvalidMessage(
                DispatchErrorCode.INVALID_MESSAGE, f"receipt_submit: {error}"
            ),
        )
    job = jobs.find(job_id)
    if job is not None:
        job.receipt = receipt  # passed on with the answer
        return ()
    if jobs.awaits_receipt(job_id) or jobs.may_report_stray(job_id):
        return (ReceiptSent(job_id, receipt),)
    return (_unknown_job(job_id),)


def _unknown_job(job_id: str) -> InvalidMessage:
    text = f"{ascii(job_id)[1:-1]} is not a job that this connection has"
    return InvalidMessage(DispatchErrorCode.NOT_YOUR_JOB, text)


def _error_message(text: str) -> Send:
    return Send(to_json(ErrorMessage(DispatchErrorCode.INVALID_MESSAGE, text)))
