"""Tasks that Shoal sends to a peer, their ids, and the results that come back."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.domain.errors import InvalidRequest, TooLarge
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Fault
from shoal.domain.vocabulary import (
    CancelJob,
    Completed,
    Event,
    Failed,
    Rejected,
    RunJob,
)
from shoal.domain.work import Call, CallStream, Feature, Task
from shoal.protocols.macfleet.codec.control import CancelMessage, encode_control
from shoal.protocols.macfleet.codec.frame_writer import FrameWriter
from shoal.protocols.macfleet.codec.frames import FrameType
from shoal.protocols.macfleet.codec.reserved_frames import may_reference_blob
from shoal.protocols.macfleet.codec.task_extension import (
    decode_result_details,
    encode_requirements,
    fault_of,
)
from shoal.protocols.macfleet.codec.tasks import (
    TIMEOUT,
    PayloadParts,
    TaskResult,
    encode_task_parts,
)
from shoal.protocols.macfleet.codec.values import (
    NotConvertible,
    task_arguments,
    to_json,
)
from shoal.protocols.macfleet.function_probe import is_unknown_function
from shoal.protocols.macfleet.local_node import FleetPeer
from shoal.protocols.seam.session import Bulk, Output
from shoal.protocols.seam.task_deadlines import TaskDeadlines

SEED_SIZE = 32  # bytes
ID_SIZE = 32  # hexadecimal digits, as in upstream


class FleetTaskIds:
    """Generates task ids from one random seed."""

    def __init__(self, random_bytes: Callable[[int], bytes]) -> None:
        self._seed = hashlib.sha256(random_bytes(SEED_SIZE))
        self._count = 0

    def next(self) -> str:
        """Return an id that was not used before."""
        self._count += 1
        digest = self._seed.copy()
        digest.update(self._count.to_bytes(8))
        return digest.hexdigest()[:ID_SIZE]


REASON_MAX = 1000  # characters of a rejection

NEEDS_SHOAL_WORKER = (
    "the worker is not a Shoal worker: it accepts MessagePack values, but no arrays, "
    "large values or code"
)
NO_CODE = (
    "code is only sent to workers that were admitted by a token, and this fleet has "
    "none: set --macfleet-token"
)


@dataclass(slots=True)
class _SentTask:
    """A task that the peer has.

    ``as_json``: its value is converted to JSON.  ``in_order``: the task went out as
    bulk data, so messages about it must not overtake it.
    """

    job_id: JobId
    lease: LeaseNumber
    as_json: bool
    in_order: bool


class FleetOutboundJobs:
    """The jobs that this node has sent to one peer.

    Results of finished or cancelled tasks are ignored.
    """

    def __init__(
        self,
        peer: FleetPeer,
        task_ids: FleetTaskIds,
        writer: FrameWriter,
        deadlines: TaskDeadlines,
    ) -> None:
        self._peer = peer
        self._task_ids = task_ids
        self._writer = writer
        self._deadlines = deadlines  # of the peer's tasks, unless it is Shoal's
        self._sent: dict[str, _SentTask] = {}  # by task id
        self._ids: dict[tuple[JobId, LeaseNumber], str] = {}

    def send(
        self, job: RunJob, work: Call | Task, now: float
    ) -> Output | Rejected | Failed:
        """Return the frame of a job, or why it was not sent."""
        lease_id = (job.job_id, job.lease)
        if reason := refusal(self._peer, needs_of(work)):
            return Rejected(*lease_id, reason)
        task_id = self._task_ids.next()
        try:
            timeout = task_timeout(work, job.remaining)
            parts = self._encode_task(task_id, job, work, timeout)
        except (NotConvertible, TooLarge) as error:
            return Failed(*lease_id, str(error), Fault.REQUEST)
        except InvalidRequest as error:
            if not self._peer.is_shoal:  # a Shoal worker may be able to decode it
                return Rejected(*lease_id, f"the worker is not a Shoal worker: {error}")
            return Failed(*lease_id, str(error), Fault.REQUEST)
        in_order = may_reference_blob(*parts)
        output = self._writer.write_parts(FrameType.TASK, *parts, in_order=in_order)
        as_json = isinstance(work, Task)
        self._sent[task_id] = _SentTask(*lease_id, as_json, isinstance(output, Bulk))
        self._ids[lease_id] = task_id
        if not self._peer.is_shoal:
            self._deadlines.add(task_id, timeout, now)
        return output

    def cancel(self, command: CancelJob) -> Sequence[Output]:
        """Forget a job; return the frame that cancels it, if the peer supports that."""
        task_id = self._ids.get((command.job_id, command.lease))
        if task_id is None:
            return ()
        sent = self._forget(task_id)
        if not self._peer.is_shoal:
            return ()
        payload = encode_control(CancelMessage(task_id))
        output = self._writer.write(FrameType.CONTROL, payload, in_order=sent.in_order)
        return (output,)

    def job_of(self, task_id: str) -> tuple[JobId, LeaseNumber] | None:
        """Return the job of a task; None if there is none, or no longer."""
        sent = self._sent.get(task_id)
        return None if sent is None else (sent.job_id, sent.lease)

    def receive_result(self, result: TaskResult) -> Sequence[Event]:
        """Return the result of a job.

        Raises PeerError if a Shoal peer's result is malformed.
        """
        if result.task_id not in self._sent:
            return ()
        details = (
            decode_result_details(result.extension) if self._peer.is_shoal else None
        )
        sent = self._forget(result.task_id)
        lease_id = (sent.job_id, sent.lease)
        if result.error is not None:
            return (failure(*lease_id, self._peer, result),)
        if not sent.as_json:
            blobs = () if details is None else details.blobs
            return (Completed(*lease_id, value=bytes(result.value), blobs=blobs),)
        try:
            return (Completed(*lease_id, rest=(to_json(result.value),)),)
        except NotConvertible as error:
            return (Failed(*lease_id, str(error)),)

    def _encode_task(
        self, task_id: str, job: RunJob, work: Call | Task, timeout: float
    ) -> PayloadParts:
        peer, is_shoal = self._peer, self._peer.is_shoal
        args, kwargs = (
            task_arguments(work) if isinstance(work, Task) else (work.args, work.kwargs)
        )
        return encode_task_parts(
            *(task_id, work.name, args, kwargs, timeout),
            encode_requirements(work, grant_for(peer, job)) if is_shoal else None,
            strict=not is_shoal,
        )

    def _forget(self, task_id: str) -> _SentTask:
        sent = self._sent.pop(task_id)
        del self._ids[sent.job_id, sent.lease]
        self._deadlines.remove(task_id)
        return sent


def task_timeout(work: Call | Task | CallStream, remaining: float | None) -> float:
    """Return the timeout of a task, in seconds.

    That is what remains of the job's total limit, or its caller's timeout if that is
    less.  Without one, a result that MacFleet's own workers cannot encode would occupy
    a slot for ever.
    """
    named = None if isinstance(work, Task) else work.timeout
    limits = [each for each in (named, remaining) if each is not None]
    return float(min(limits, default=TIMEOUT))


def needs_of(work: Call | Task) -> frozenset[Feature]:
    """Return the features that a worker needs for a job."""
    return work.needs if isinstance(work, Call) else frozenset()


def refusal(peer: FleetPeer, needs: frozenset[Feature]) -> str:
    """Return why a peer does not support these features; empty: it does."""
    if needs and not peer.is_shoal:
        return NEEDS_SHOAL_WORKER
    if Feature.CODE in needs and not peer.trusted:
        return NO_CODE
    return ""


def grant_for(peer: FleetPeer, job: RunJob) -> str:
    """Return the grant of a job, if the peer may have it."""
    return job.grant if peer.is_shoal and peer.trusted else ""


def failure(
    job_id: JobId, lease: LeaseNumber, peer: FleetPeer, result: TaskResult
) -> Rejected | Failed:
    """Return the failure of a task, or a rejection if another worker may run it.

    Shoal workers say which; of upstream errors only an unknown function is a rejection.
    """
    error = result.error or ""
    if peer.is_shoal:
        details = decode_result_details(result.extension)
        if details.rejected:
            return Rejected(job_id, lease, error[:REASON_MAX])
        return Failed(job_id, lease, error, fault_of(details), details.exception)
    if is_unknown_function(error):
        last = error.rstrip().rpartition("\n")[2]
        return Rejected(job_id, lease, last[:REASON_MAX])
    return Failed(job_id, lease, error)
