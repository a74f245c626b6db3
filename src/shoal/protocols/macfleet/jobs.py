"""The tasks of one connection: what Shoal sends to the peer, and the peer to Shoal.

Each call of a call stream is a task.  A task of the peer that cannot be done gets an
error result as long as its id can be read.  MacFleet workers leave such tasks
unanswered, and some then stop reading.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec import Raw

from shoal.domain import vocabulary as words
from shoal.domain.errors import InvalidRequest, PeerError, TooLarge
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Fault
from shoal.domain.work import Call, CallStream, Task
from shoal.protocols.macfleet.codec import tasks, values
from shoal.protocols.macfleet.codec.frames import Frame, FrameType, write_frame
from shoal.protocols.macfleet.function_probe import PROBE_FUNCTION, is_unknown_function
from shoal.protocols.macfleet.local_node import FleetRole
from shoal.protocols.seam import session
from shoal.protocols.seam.deadlines import DeadlineQueue

SEED_SIZE = 32  # bytes
ID_SIZE = 32  # hexadecimal digits, as in upstream
REASON_MAX = 1000  # characters of a rejection
RESULT_GRACE = 30.0  # seconds after a task's timeout in which its result may arrive

NO_FEATURES = (
    "MacFleet's workers accept MessagePack values, but no arrays, large values or code"
)
NO_RESULT = (
    "the worker sent no result; MacFleet's own workers send none that MessagePack "
    "cannot represent, such as a set or an array"
)


LeaseId: TypeAlias = tuple[JobId, LeaseNumber]

OPEN_JOBS_MAX = 4096  # open tasks of one peer
LEASE = LeaseNumber(1)  # a peer sends a task once

TOO_MANY = f"{OPEN_JOBS_MAX} tasks of this peer are already open"
NOT_PLAIN = (
    "the task returned an array or another value that only Shoal's programs can "
    "decode: return MessagePack types, such as lists and bytes"
)

InboundOutput: TypeAlias = words.RunJob | words.CancelJob | session.Output
JobEnd: TypeAlias = words.Completed | words.Rejected | words.Failed


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
            return session.Notice(f"ignored task {task_id!a}: its id is in use")
        if name == PROBE_FUNCTION and self._role is FleetRole.COORDINATOR:
            # A result would say that this node is a worker.
            return session.Notice(
                "ignored the probe of another coordinator", routine=True
            )
        if len(self._open) >= OPEN_JOBS_MAX:
            return _encode_failure(task_id, frame.stream, TOO_MANY)
        self._open[task_id] = frame.stream, timeout
        self._deadlines.set(task_id, None if timeout is None else now + timeout)
        call = Call(name, bytes(args), bytes(kwargs), timeout)
        return words.RunJob(JobId(task_id), LEASE, call, remaining=timeout)

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
            yield words.CancelJob(JobId(task_id), LEASE)

    def send_result(self, event: JobEnd) -> Iterator[session.Output]:
        """Return the result of a task; nothing if it has timed out."""
        task_id = str(event.job_id)
        if task_id not in self._open or event.lease != LEASE:
            return
        stream, _ = self._open.pop(task_id)
        self._deadlines.discard(task_id)
        match event:
            case words.Completed():
                yield _encode_value(task_id, stream, event.value or values.NIL)
            case words.Rejected(_, _, error) | words.Failed(_, _, error):
                yield _encode_failure(task_id, stream, error)

    def _refuse(self, task_id: str | None, frame: Frame, error: str) -> session.Output:
        """Return the reply to a task that cannot be read; a notice without an id."""
        if task_id is None or task_id in self._open:
            return session.Notice(f"ignored a task: {error}")
        return _encode_failure(task_id, frame.stream, error)


def _encode_value(task_id: str, stream: int, value: bytes) -> session.Output:
    if not values.is_plain_value(value):
        return _encode_failure(task_id, stream, NOT_PLAIN)
    try:
        parts = tasks.encode_result(task_id, value)
    except (InvalidRequest, TooLarge) as error:
        return _encode_failure(task_id, stream, str(error))
    return write_frame(FrameType.RESULT, *parts, stream=stream)


def _encode_failure(task_id: str, stream: int, error: str) -> session.Output:
    parts = tasks.encode_result(task_id, None, error)
    return write_frame(FrameType.RESULT, *parts, stream=stream)


@dataclass(slots=True)
class _SentTask:
    """A job that the peer has; ``as_json``: its value is converted to JSON."""

    lease_id: LeaseId
    as_json: bool


@dataclass(slots=True)
class _OpenCallStream:
    """A call stream that is open at the peer.

    ``calls`` maps the numbers of pending calls to the ids of their tasks; results of
    ``recalled`` calls are dropped.  A stream that is ``closing`` ends with its last
    pending call.  ``ends_by`` is when the job's total limit ends it; None: not known.
    """

    lease_id: LeaseId
    work: CallStream
    ends_by: float | None
    calls: dict[int, str] = field(default_factory=dict)
    recalled: set[int] = field(default_factory=set)
    closing: bool = False


@dataclass(slots=True)
class _SentCall:
    stream: _OpenCallStream
    number: int


class FleetOutboundJobs:
    """The jobs that this node has sent to one peer, which cannot cancel them.

    Results of finished or cancelled tasks are ignored.
    """

    def __init__(self, random_bytes: Callable[[int], bytes]) -> None:
        self._seed = hashlib.sha256(random_bytes(SEED_SIZE))
        self._count = 0  # task ids, all from one random seed
        self._deadlines: DeadlineQueue[str] = DeadlineQueue()  # of results, by task id
        # By task id, with the timeout in seconds.
        self._sent: dict[str, tuple[_SentTask | _SentCall, float]] = {}
        self._ids: dict[LeaseId, str] = {}  # of tasks
        self._streams: dict[LeaseId, _OpenCallStream] = {}

    def next_id(self) -> str:
        """Return a task id that was not used before."""
        self._count += 1
        digest = self._seed.copy()
        digest.update(self._count.to_bytes(8))
        return digest.hexdigest()[:ID_SIZE]

    def send(
        self, job: words.RunJob, work: Call | Task, now: float
    ) -> session.Output | words.Rejected | words.Failed:
        """Return the frame of a job, or why it was not sent."""
        lease_id = (job.job_id, job.lease)
        if isinstance(work, Call) and work.needs:
            return words.Rejected(*lease_id, NO_FEATURES)
        sent = _SentTask(lease_id, as_json=isinstance(work, Task))
        try:
            args, kwargs = (
                values.task_arguments(work)
                if isinstance(work, Task)
                else (work.args, work.kwargs)
            )
            task_id, output = self._encode(work, args, kwargs, job.remaining, sent, now)
        except (values.NotConvertible, TooLarge) as error:
            return words.Failed(*lease_id, str(error), Fault.REQUEST)
        except InvalidRequest as error:  # a worker on another wire may decode it
            return words.Rejected(
                *lease_id, f"MacFleet's workers cannot decode it: {error}"
            )
        self._ids[lease_id] = task_id
        return output

    def open_stream(
        self, job: words.RunJob, work: CallStream, now: float
    ) -> Sequence[words.Rejected]:
        """Open a call stream; return a rejection if the peer does not support it."""
        if work.needs:
            return (words.Rejected(job.job_id, job.lease, NO_FEATURES),)
        lease_id = (job.job_id, job.lease)
        ends_by = None if job.remaining is None else now + job.remaining
        self._streams[lease_id] = _OpenCallStream(lease_id, work, ends_by)
        return ()

    def push(
        self, command: words.PushCalls, now: float
    ) -> Iterator[session.Output | words.Event]:
        """Return a task for each call, and failures of calls that cannot be encoded."""
        stream = self._streams.get((command.job_id, command.lease))
        if stream is None or stream.closing:
            return
        failed: list[words.CallResult] = []
        remaining = None if stream.ends_by is None else max(0.0, stream.ends_by - now)
        for number, args, kwargs in command.calls:
            try:
                task_id, output = self._encode(
                    stream.work, args, kwargs, remaining, _SentCall(stream, number), now
                )
            except (InvalidRequest, TooLarge) as error:
                failed.append(words.CallResult(number, b"", str(error)))
                continue
            stream.calls[number] = task_id
            yield output
        if failed:
            yield words.CallsReturned(*stream.lease_id, failed)

    def recall(self, command: words.CancelCalls) -> None:
        """Drop the results of calls."""
        stream = self._streams.get((command.job_id, command.lease))
        if stream is not None:
            stream.recalled.update(stream.calls.keys() & set(command.numbers))

    def cancel(self, command: words.CancelJob) -> Sequence[words.Completed]:
        """Forget a job, or make no further calls in a call stream.

        Pending calls cannot be cancelled, so the slot is occupied until they end.
        Returns the end of a call stream if no call is pending.
        """
        lease_id = (command.job_id, command.lease)
        task_id = self._ids.pop(lease_id, None)
        if task_id is not None:
            del self._sent[task_id]
            self._deadlines.discard(task_id)
        if (stream := self._streams.get(lease_id)) is None:
            return ()
        stream.closing = True
        return self._finish(stream)

    def receive_result(self, result: tasks.TaskResult) -> Sequence[words.Event]:
        """Return the result of a job, or of a call in a call stream."""
        if (found := self._sent.pop(result.task_id, None)) is None:
            return ()
        sent, _ = found
        self._deadlines.discard(result.task_id)
        if isinstance(sent, _SentCall):
            return self._end_call(sent, result)
        del self._ids[sent.lease_id]
        if result.error is not None:
            return (_failure(sent.lease_id, result.error),)
        if not sent.as_json:
            return (words.Completed(*sent.lease_id, value=bytes(result.value)),)
        try:
            return (
                words.Completed(*sent.lease_id, rest=(values.to_json(result.value),)),
            )
        except values.NotConvertible as error:
            return (words.Failed(*sent.lease_id, str(error)),)

    @property
    def due(self) -> float | None:
        """When the first task is overdue; None: never."""
        return self._deadlines.next_due

    def expire(self, now: float) -> Iterator[words.Event]:
        """End the tasks whose results are overdue."""
        for task_id in self._deadlines.pop_due(now):
            if task_id not in self._sent:  # its stream has just failed
                continue
            _, timeout = self._sent[task_id]
            error = f"{tasks.timeout_error(timeout)}: {NO_RESULT}"
            yield from self.receive_result(
                tasks.TaskResult(task_id, Raw(values.NIL), error)
            )

    def _encode(
        self,
        work: Call | Task | CallStream,
        args: bytes,
        kwargs: bytes,
        remaining: float | None,
        sent: _SentTask | _SentCall,
        now: float,
    ) -> tuple[str, session.Output]:
        """Return a task's id and frame.

        Its timeout is what remains of the job's total limit, or its caller's timeout if
        that is less.  Without one, a result that MacFleet's own workers cannot encode
        would occupy a slot for ever.

        Raises as ``encode_task`` does.
        """
        named = None if isinstance(work, Task) else work.timeout
        limits = [each for each in (named, remaining) if each is not None]
        timeout = float(min(limits, default=tasks.TIMEOUT))
        task_id = self.next_id()
        parts = tasks.encode_task(task_id, work.name, args, kwargs, timeout)
        self._sent[task_id] = sent, timeout
        self._deadlines.set(task_id, now + timeout + RESULT_GRACE)
        return task_id, write_frame(FrameType.TASK, *parts)

    def _end_call(
        self, sent: _SentCall, result: tasks.TaskResult
    ) -> Sequence[words.Event]:
        """Return the result of a call.

        If the worker does not have the function, the call stream fails.
        """
        stream, number, error = sent.stream, sent.number, result.error
        del stream.calls[number]
        if stream.closing:
            return self._finish(stream)
        if error is not None and is_unknown_function(error):
            for task_id in stream.calls.values():
                del self._sent[task_id]
                self._deadlines.discard(task_id)
            del self._streams[stream.lease_id]
            return (_failure(stream.lease_id, error),)
        if number in stream.recalled:
            stream.recalled.remove(number)
            return ()
        value = b"" if error is not None else bytes(result.value)
        returned = words.CallResult(number, value, error or "")
        return (words.CallsReturned(*stream.lease_id, [returned]),)

    def _finish(self, stream: _OpenCallStream) -> Sequence[words.Completed]:
        """Return the end of a closing call stream if no call is pending."""
        if stream.calls:
            return ()
        del self._streams[stream.lease_id]
        return (words.Completed(*stream.lease_id),)


def _failure(lease_id: LeaseId, error: str) -> words.Rejected | words.Failed:
    """Return the failure of a task, or a rejection if the function is unknown."""
    if is_unknown_function(error):
        last = error.rstrip().rpartition("\n")[2]
        return words.Rejected(*lease_id, last[:REASON_MAX])
    return words.Failed(*lease_id, error)
