"""What a worker says of its jobs: as events, with complaints about what is no good."""

from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Raw, UnsetType

from shoal.domain.errors import PeerError
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Fault
from shoal.domain.vocabulary import Completed, Event, Failed, Presented, Rejected
from shoal.protocols.dispatch.answers import read_answer
from shoal.protocols.dispatch.extension import Attempt, read_attempt
from shoal.protocols.dispatch.held import Held
from shoal.protocols.dispatch.javascript import well_formed, written
from shoal.protocols.dispatch.messages import (
    REASON_MAX,
    Code,
    Complaint,
    Error,
    JobComplete,
    JobReject,
    ReceiptSubmit,
)
from shoal.protocols.dispatch.receipts import UNREADABLE, read_submitted
from shoal.protocols.session import Send

Said: TypeAlias = Sequence[Event | Send | Complaint]
"""What came of a message.  Complaints count against the worker, what is sent does not:
an answer with an odd hash is an answer."""

NO_LEASE = LeaseNumber(0)  # no job has it, so that what is said of it came late


def completed(held: Held, message: JobComplete, *, extended: bool) -> Said:
    """Read an answer; one that cannot be read is given to another worker."""
    given = held.find(message.job_id, _attempt(message.shoal, extended=extended).lease)
    if given is None:
        strange = _not_theirs(message.job_id)
        if not held.hears_stray(message.job_id):
            return (strange,)
        return (Completed(JobId(message.job_id), NO_LEASE), strange)
    try:
        event, odd = read_answer(given, message, extended=extended)
    except PeerError as error:
        held.end(given, signed=True)
        return (Rejected(given.job_id, given.lease, str(error)), _error(str(error)))
    receipt = event.receipt if isinstance(event, Completed) else None
    held.end(given, signed=receipt is not None)
    said: list[Event | Send] = [event]
    if receipt is UNREADABLE:
        said.append(_error("job_complete: receipt: it or its signature cannot be read"))
    if odd:
        said.append(_error(odd))
    return said


def rejected(held: Held, message: JobReject, *, extended: bool) -> Said:
    """Read why a job was not done, or how it failed."""
    attempt = _attempt(message.shoal, extended=extended)
    given = held.find(message.job_id, attempt.lease)
    if given is None:
        return (_not_theirs(message.job_id),)
    held.end(given, signed=True)
    reason = well_formed(message.reason[:REASON_MAX])
    if not attempt.failed:
        return (Rejected(given.job_id, given.lease, reason),)
    fault = next((f for f in Fault if f.value == attempt.fault), Fault.WORKER)
    return (Failed(given.job_id, given.lease, reason, fault),)


def submitted(held: Held, message: ReceiptSubmit) -> Said:
    """Read a receipt that came apart from its answer: before it, or after."""
    try:
        job_id, receipt = read_submitted(message)
    except PeerError as error:
        return (Complaint(Code.INVALID_MESSAGE, f"receipt_submit: {error}"),)
    given = held.find(job_id)
    if given is not None:
        given.receipt = receipt  # it goes with the answer
        return ()
    if held.awaits_receipt(job_id) or held.hears_stray(job_id):
        return (Presented(job_id, receipt),)
    return (_not_theirs(job_id),)


def _attempt(shoal: Raw | UnsetType, *, extended: bool) -> Attempt:
    if isinstance(shoal, UnsetType) or not extended:
        return Attempt()
    return read_attempt(bytes(shoal))


def _not_theirs(job_id: str) -> Complaint:
    text = f"{ascii(job_id)[1:-1]} is not a job that this connection has"
    return Complaint(Code.NOT_YOUR_JOB, text)


def _error(text: str) -> Send:
    return Send(written(Error(Code.INVALID_MESSAGE, text)))
