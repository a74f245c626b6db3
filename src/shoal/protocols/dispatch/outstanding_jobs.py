"""The jobs assigned to a worker, and the events its reports about them cause."""

import re
from collections.abc import Sequence

from shoal.domain.errors import PeerError
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.receipts import SignedReceipt
from shoal.domain.vocabulary import Completed, Event, ReceiptSent, Rejected, RunJob
from shoal.protocols.dispatch.answers import read_answer
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
NO_LEASE = LeaseNumber(0)  # no job has it, so the result counts as late

STRAYS_MAX = 64  # reports on other jobs that are passed on: each is stored
UNSIGNED_MAX = 256  # ended jobs whose receipt may still arrive separately


class OutstandingJobs:
    """The jobs assigned on one connection.

    Of reports on other jobs a limited number is passed on, with an id that Shoal can
    issue; each job that ends allows one more.  The methods raise InvalidMessage.
    """

    def __init__(self) -> None:
        self._assigned: dict[str, RunJob] = {}
        self._early: dict[str, SignedReceipt] = {}  # that came before their answers
        self._unsigned: dict[JobId, None] = {}  # ended without a receipt, oldest first
        self._stray_reports_left = STRAYS_MAX

    def add(self, job: RunJob) -> None:
        """Record that a job is assigned to the worker."""
        self._assigned[job.job_id] = job

    def completed(self, message: JobComplete) -> Sequence[Event | Send]:
        """Process an answer; if it is invalid, another worker gets the job.

        An answer with a wrong hash is still an answer.
        """
        job = self._assigned.get(message.job_id)
        if job is None:
            late = Completed(JobId(message.job_id), NO_LEASE)
            stray = self._may_report_stray(message.job_id)
            raise _unknown_job(message.job_id, late if stray else None)
        early = self._early.get(message.job_id)
        try:
            event, warning = read_answer(job, message, early)
        except PeerError as error:
            self._end(job)
            return (_rejected(job, str(error)), _error_message(str(error)))
        receipt = event.receipt if isinstance(event, Completed) else None
        self._end(job, signed=receipt is not None)
        report: list[Event | Send] = [event]
        if receipt is UNREADABLE:
            text = "job_complete: receipt: it or its signature cannot be read"
            report.append(_error_message(text))
        if warning:
            report.append(_error_message(warning))
        return report

    def rejected(self, message: JobReject) -> Sequence[Event]:
        """Process the rejection of a job."""
        job = self._assigned.get(message.job_id)
        if job is None:
            raise _unknown_job(message.job_id)
        self._end(job)
        given = message.reason
        reason = given[:REASON_MAX] if isinstance(given, str) else NO_REASON
        return (_rejected(job, well_formed(reason)),)

    def submitted(self, message: ReceiptSubmit) -> Sequence[Event]:
        """Process a receipt that arrives separately, before or after its answer."""
        try:
            job_id, receipt = read_submitted(message)
        except PeerError as error:
            text = f"receipt_submit: {error}"
            raise InvalidMessage(DispatchErrorCode.INVALID_MESSAGE, text) from error
        if job_id in self._assigned:
            self._early[job_id] = receipt  # passed on with the answer
            return ()
        if job_id in self._unsigned:
            del self._unsigned[job_id]
        elif not self._may_report_stray(job_id):
            raise _unknown_job(job_id)
        return (ReceiptSent(job_id, receipt),)

    def _end(self, job: RunJob, *, signed: bool = True) -> None:
        """Record the end of a job; unless it is ``signed``, a receipt may follow."""
        del self._assigned[job.job_id]
        self._early.pop(job.job_id, None)
        self._stray_reports_left = min(self._stray_reports_left + 1, STRAYS_MAX)
        if not signed:
            self._unsigned[job.job_id] = None
            if len(self._unsigned) > UNSIGNED_MAX:
                del self._unsigned[next(iter(self._unsigned))]

    def _may_report_stray(self, job_id: str) -> bool:
        if not self._stray_reports_left or not _ISSUED_ID.fullmatch(job_id):
            return False
        self._stray_reports_left -= 1
        return True


def _rejected(job: RunJob, reason: str) -> Rejected:
    return Rejected(job.job_id, job.lease, reason)


def _unknown_job(job_id: str, event: Event | None = None) -> InvalidMessage:
    text = f"{ascii(job_id)[1:-1]} is not a job that this connection has"
    return InvalidMessage(DispatchErrorCode.NOT_YOUR_JOB, text, event=event)


def _error_message(text: str) -> Send:
    return Send(to_json(ErrorMessage(DispatchErrorCode.INVALID_MESSAGE, text)))
