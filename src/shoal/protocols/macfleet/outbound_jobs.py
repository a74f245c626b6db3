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
from shoal.domain.work import Call, Feature, Task
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

SEED_SIZE = 32  # bytes
ID_SIZE = 32  # hexadecimal digits, as real peers have it


class FleetTaskIds:
    """Makes one id after the other, out of what is drawn once."""

    def __init__(self, draw: Callable[[int], bytes]) -> None:
        self._seed = hashlib.sha256(draw(SEED_SIZE))
        self._count = 0

    def next(self) -> str:
        """Return an id that was not there before."""
        self._count += 1
        made = self._seed.copy()
        made.update(self._count.to_bytes(8))
        return made.hexdigest()[:ID_SIZE]


REASON_MAX = 1000  # characters of why a worker would not do a task

NEEDS_SHOAL_WORKER = (
    "the worker is no Shoal worker: it takes what MessagePack has and no arrays, "
    "large values or code"
)
NO_CODE = (
    "code is only sent to workers that were let in by a token, and no token is needed "
    "here: give the fleet one with --macfleet-token"
)


@dataclass(slots=True)
class _SentTask:
    """A task that the peer has.

    ``as_json``: its value is wanted as JSON text.  ``in_order``: it was large, so that
    what is said about it may come before it.
    """

    job_id: JobId
    lease: LeaseNumber
    as_json: bool
    in_order: bool


class FleetOutboundJobs:
    """Our side as the one who asks.

    What is said of tasks that are over, or that were cancelled, is not heard.
    """

    def __init__(
        self, peer: FleetPeer, task_ids: FleetTaskIds, writer: FrameWriter
    ) -> None:
        self._peer = peer
        self._task_ids = task_ids
        self._writer = writer
        self._sent: dict[str, _SentTask] = {}  # by the task's id
        self._ids: dict[tuple[JobId, LeaseNumber], str] = {}

    def send(self, job: RunJob, work: Call | Task) -> Output | Rejected | Failed:
        """Return how the peer is asked for a job, or why it is not."""
        number = (job.job_id, job.lease)
        if reason := refusal(self._peer, needs_of(work)):
            return Rejected(*number, reason)
        task_id = self._task_ids.next()
        try:
            parts = self._encode_task(task_id, work)
        except (NotConvertible, TooLarge) as error:
            return Failed(*number, str(error), Fault.REQUEST)
        except InvalidRequest as error:
            if not self._peer.is_shoal:  # one of ours may be able to read it
                return Rejected(*number, f"the worker is no Shoal worker: {error}")
            return Failed(*number, str(error), Fault.REQUEST)
        in_turn = may_reference_blob(*parts)
        said = self._writer.write_parts(FrameType.TASK, *parts, in_order=in_turn)
        as_json = isinstance(work, Task)
        self._sent[task_id] = _SentTask(*number, as_json, isinstance(said, Bulk))
        self._ids[number] = task_id
        return said

    def cancel(self, command: CancelJob) -> Sequence[Output]:
        """Forget a job; return how the peer is told, if it can be."""
        task_id = self._ids.get((command.job_id, command.lease))
        if task_id is None:
            return ()
        asked = self._forget(task_id)
        if not self._peer.is_shoal:
            return ()
        payload = encode_control(CancelMessage(task_id))
        said = self._writer.write(FrameType.CONTROL, payload, in_order=asked.in_order)
        return (said,)

    def job_of(self, task_id: str) -> tuple[JobId, LeaseNumber] | None:
        """Return which job of ours a task is; None: none, or no more."""
        asked = self._sent.get(task_id)
        return None if asked is None else (asked.job_id, asked.lease)

    def receive_result(self, result: TaskResult) -> Sequence[Event]:
        """Return what came of a job.

        Raises PeerError if one of ours says what it cannot mean.
        """
        if result.task_id not in self._sent:
            return ()
        ending = (
            decode_result_details(result.extension) if self._peer.is_shoal else None
        )
        asked = self._forget(result.task_id)
        number = (asked.job_id, asked.lease)
        if result.error is not None:
            return (failure(*number, self._peer, result),)
        if not asked.as_json:
            blobs = () if ending is None else ending.blobs
            return (Completed(*number, value=bytes(result.value), blobs=blobs),)
        try:
            return (Completed(*number, rest=(to_json(result.value),)),)
        except NotConvertible as error:
            return (Failed(*number, str(error)),)

    def _encode_task(self, task_id: str, work: Call | Task) -> PayloadParts:
        strict = not self._peer.is_shoal
        if isinstance(work, Task):
            args, kwargs = task_arguments(work)
            return encode_task_parts(
                task_id, work.name, args, kwargs, None, strict=strict
            )
        more = (
            encode_requirements(work.needs, work.blobs) if self._peer.is_shoal else None
        )
        return encode_task_parts(
            task_id,
            work.name,
            work.args,
            work.kwargs,
            work.timeout,
            more,
            strict=strict,
        )

    def _forget(self, task_id: str) -> _SentTask:
        asked = self._sent.pop(task_id)
        del self._ids[asked.job_id, asked.lease]
        return asked


def needs_of(work: Call | Task) -> frozenset[Feature]:
    """Return what a worker must be able to do, for which this wire has a word."""
    return work.needs if isinstance(work, Call) else frozenset()


def refusal(peer: FleetPeer, needs: frozenset[Feature]) -> str:
    """Say why a peer cannot be asked for what needs this; empty: it can."""
    if needs and not peer.is_shoal:
        return NEEDS_SHOAL_WORKER
    if Feature.CODE in needs and not peer.trusted:
        return NO_CODE
    return ""


def failure(
    job_id: JobId, lease: LeaseNumber, peer: FleetPeer, result: TaskResult
) -> Rejected | Failed:
    """Return that a task was not done: whether another worker may do it, ours say.

    Of others only those say so that do not have the function.
    """
    error = result.error or ""
    if peer.is_shoal:
        ending = decode_result_details(result.extension)
        if ending.rejected:
            return Rejected(job_id, lease, error[:REASON_MAX])
        return Failed(job_id, lease, error, fault_of(ending))
    if is_unknown_function(error):
        last = error.rstrip().rpartition("\n")[2]
        return Rejected(job_id, lease, last[:REASON_MAX])
    return Failed(job_id, lease, error)
