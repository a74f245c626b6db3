"""Tasks that a peer sends to this node, and the replies.

A task that cannot be done gets an error result as long as its id can be read.  MacFleet
workers leave such tasks unanswered, and some then stop reading.
"""

from collections.abc import Iterator
from typing import TypeAlias

from shoal.domain.errors import InvalidRequest, PeerError, TooLarge
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import CancelJob, Completed, Failed, Rejected, RunJob
from shoal.domain.work import Call
from shoal.protocols.macfleet.codec import tasks
from shoal.protocols.macfleet.codec.frames import Frame, FrameType, write_frame
from shoal.protocols.macfleet.codec.values import NIL, is_plain_value
from shoal.protocols.macfleet.function_probe import PROBE_FUNCTION
from shoal.protocols.macfleet.local_node import FleetRole
from shoal.protocols.seam.deadlines import DeadlineQueue
from shoal.protocols.seam.session import Notice, Output

OPEN_JOBS_MAX = 4096  # open tasks of one peer
LEASE = LeaseNumber(1)  # a peer sends a task once

TOO_MANY = f"{OPEN_JOBS_MAX} tasks of this peer are already open"
NOT_PLAIN = (
    "the task returned an array or another value that only Shoal's programs can "
    "decode: return MessagePack types, such as lists and bytes"
)

InboundOutput: TypeAlias = RunJob | CancelJob | Output
JobEnd: TypeAlias = Completed | Rejected | Failed


class FleetInboundJobs:
    """The jobs that one peer has sent to this node.

    The answer to a task is sent on the frame stream of the task.
    """

    def __init__(self, role: FleetRole) -> None:
        self._role = role
        # The frame streams of open tasks, and their timeouts in seconds, by task id.
        self._open: dict[str, tuple[int, float | None]] = {}
        self._deadlines: DeadlineQueue[str] = DeadlineQueue()

    def receive_task(self, frame: Frame, now: float) -> InboundOutput:
        """Return the job of a task, or the reply if it cannot be run.

        The peer's timeout is both how long the function may run and the limit of the
        whole task, whether it then runs or waits, as at upstream workers.
        """
        if frame.dropped:
            error = tasks.arguments_too_large(len(frame.payload) + frame.dropped)
            return self._refuse(
                tasks.task_id_at_start(frame.payload), frame, tasks.error_text(error)
            )
        try:
            request = tasks.decode_task(frame.payload)
        except PeerError as error:
            return self._refuse(tasks.task_id_in(frame.payload), frame, str(error))
        task_id, name, args, kwargs, timeout = request
        if task_id in self._open:
            # A reply would end the first.
            return Notice(f"ignored task {task_id!a}: its id is in use")
        if name == PROBE_FUNCTION and self._role is FleetRole.COORDINATOR:
            # A result would say that this node is a worker.
            return Notice("ignored the probe of another coordinator", routine=True)
        if len(self._open) >= OPEN_JOBS_MAX:
            return _encode_failure(task_id, frame.stream, TOO_MANY)
        self._open[task_id] = frame.stream, timeout
        self._deadlines.set(task_id, None if timeout is None else now + timeout)
        call = Call(name, bytes(args), bytes(kwargs), timeout)
        return RunJob(JobId(task_id), LEASE, call, remaining=timeout)

    @property
    def due(self) -> float | None:
        """When the first task times out; None: never."""
        return self._deadlines.next_due

    def expire(self, now: float) -> Iterator[InboundOutput]:
        """Answer the tasks that have timed out, and cancel their jobs."""
        for task_id in self._deadlines.pop_due(now):
            stream, timeout = self._open.pop(task_id)
            assert timeout is not None, "it has a deadline"
            yield _encode_failure(task_id, stream, tasks.timeout_error(timeout))
            yield CancelJob(JobId(task_id), LEASE)

    def send_result(self, event: JobEnd) -> Iterator[Output]:
        """Return the result of a task; nothing if it has timed out."""
        task_id = str(event.job_id)
        if task_id not in self._open or event.lease != LEASE:
            return
        stream, _ = self._open.pop(task_id)
        self._deadlines.discard(task_id)
        match event:
            case Completed():
                yield _encode_value(task_id, stream, event.value or NIL)
            case Rejected(_, _, error) | Failed(_, _, error):
                yield _encode_failure(task_id, stream, error)

    def _refuse(self, task_id: str | None, frame: Frame, error: str) -> Output:
        """Return the reply to a task that cannot be read; a notice without an id."""
        if task_id is None or task_id in self._open:
            return Notice(f"ignored a task: {error}")
        return _encode_failure(task_id, frame.stream, error)


def _encode_value(task_id: str, stream: int, value: bytes) -> Output:
    if not is_plain_value(value):
        return _encode_failure(task_id, stream, NOT_PLAIN)
    try:
        parts = tasks.encode_result(task_id, value)
    except (InvalidRequest, TooLarge) as error:
        return _encode_failure(task_id, stream, str(error))
    return write_frame(FrameType.RESULT, *parts, stream=stream)


def _encode_failure(task_id: str, stream: int, error: str) -> Output:
    parts = tasks.encode_result(task_id, None, error)
    return write_frame(FrameType.RESULT, *parts, stream=stream)
