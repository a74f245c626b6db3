"""Calls on one process: a single call, or a call stream that keeps it busy."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from shoal.domain.errors import InvalidRequest, JobError, ShoalError, Unavailable
from shoal.domain.vocabulary import CallResult, StreamedCall
from shoal.domain.work import Call, CallStream, Feature
from shoal.tasks import limits, process_messages
from shoal.tasks.function_caller import OnProgress
from shoal.tasks.invocation import BLOB_MISSING, REFUSED
from shoal.tasks.process import CallProcess
from shoal.tasks.process_messages import Mode

OnReturned = Callable[[list[CallResult]], None]

_encode = msgspec.msgpack.Encoder().encode
_returns = msgspec.msgpack.Decoder(list[CallResult])


def timeout_message(timeout: float) -> str:
    """Return the error text of a timed-out call, identical on all peers."""
    return f"Task timed out after {timeout or 0}s"


def mode_of(work: Call | CallStream) -> Mode:
    """Return how the calls of some work are made."""
    code = Mode.CODE if Feature.CODE in work.needs else Mode(0)
    return code | (Mode.EXACT if work.exact else Mode(0))


def too_many_calls(calls: Sequence[StreamedCall]) -> list[CallResult]:
    """Return the results of calls that a call stream has no room for."""
    reason = f"more than {limits.STREAM_CALLS_MAX} calls wait in the call stream"
    return [CallResult(each.number, b"", reason) for each in calls]


class ProcessCallStream:
    """Runs the calls of one call stream on one process.

    A process that is killed or dies is replaced.  The call that ran on it returns an
    error; its other calls are made again.  While other calls wait for a process, an
    idle stream gives its own back, and a busy one after its turn.

    Args:
        request_process: requests a process; calls its argument with it.
        release_process: returns the process; True: it is busy and must be killed.
        is_process_wanted: says whether other calls wait for a process.
        send_blob: sends a blob to a process.
        on_close: called when the slot is free again.
        grant: as in ``RunJob``.
    """

    def __init__(
        self,
        stream: CallStream,
        timeout: float | None,
        on_returned: OnReturned,
        request_process: Callable[[Callable[[CallProcess | Unavailable], None]], None],
        release_process: Callable[[CallProcess, bool], None],
        is_process_wanted: Callable[[], bool],
        send_blob: Callable[[CallProcess, bytes], None],
        on_close: Callable[[], None],
        grant: str = "",
    ) -> None:
        self._stream = stream
        self._timeout = timeout
        self._on_returned = on_returned
        self._request_process = request_process
        self._release_process = release_process
        self._is_process_wanted = is_process_wanted
        self._send_blob = send_blob
        self._on_close = on_close
        self._grant = grant
        self._process: CallProcess | None = None
        self._process_requested = False
        self._turn_ends = 0.0
        self._closed = False
        # Whether the process sends each result before it begins the next call.
        self._flush_each = timeout is not None
        self._queue: deque[StreamedCall] = deque()
        self._sent: dict[int, StreamedCall] = {}  # in call order
        self._sent_bytes = 0
        self._recalled: set[int] = set()
        self._not_started = False  # whether the first sent call has yet to begin
        self._started_at = 0.0  # approximate start of the first sent call
        self._timer: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        return not (self._sent or self._queue)

    def push(self, calls: Sequence[StreamedCall]) -> None:
        if len(self._queue) + len(calls) > limits.STREAM_CALLS_MAX:
            self._on_returned(too_many_calls(calls))
            return
        self._queue.extend(calls)
        self._pump()

    def recall(self, numbers: Sequence[int]) -> None:
        recalled = set(numbers)
        self._queue = deque(each for each in self._queue if each.number not in recalled)
        self._recalled |= recalled & self._sent.keys()
        self._schedule_check()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._on_close()
        if self._timer is not None:
            self._timer.cancel()
        self._queue.clear()
        if self._process is not None:
            self._release(busy=bool(self._sent))

    def yield_process(self) -> None:
        """Give the process back if it is idle, or its turn is over.

        Called when another call begins to wait for a process.
        """
        self._pump()

    def on_message(self, head: Sequence[Any], tail: bytes) -> None:
        if head[0] == process_messages.BLOB_NEEDED:
            assert self._process is not None
            self._send_blob(self._process, head[1])
            return
        if head[0] == process_messages.STARTED:
            self._not_started = False
            self._started_at = asyncio.get_running_loop().time()
            self._schedule_check()
            return
        assert head[0] == process_messages.RETURNS, "unexpected message from a process"
        returns = _returns.decode(tail)
        for number, *_ in returns:
            self._forget(number)
        self._started_at = asyncio.get_running_loop().time()
        if self._recalled:
            kept = [each for each in returns if each.number not in self._recalled]
            self._recalled.difference_update(each.number for each in returns)
            returns = kept
        if returns:
            self._on_returned(returns)
        self._pump()

    def on_exit(self, reason: str) -> None:
        self._process = None
        if not self._sent:
            return
        if len(self._sent) > 1 and not self._flush_each:
            # It may have finished calls whose results it had not sent.
            self._flush_each = True
            self._requeue()
        else:
            self._fail_running(reason)

    def _fail_running(self, reason: str) -> None:
        """Fail the running call and make the others again."""
        running = next(iter(self._sent))
        self._forget(running)
        recalled = running in self._recalled
        self._recalled.discard(running)
        self._requeue()
        if not recalled:
            self._on_returned([CallResult(running, b"", reason)])

    def _requeue(self) -> None:
        self._queue.extendleft(
            each
            for number, each in reversed(self._sent.items())
            if number not in self._recalled
        )
        self._recalled.clear()
        self._sent.clear()
        self._sent_bytes = 0
        self._pump()

    def _pump(self) -> None:
        """Send queued calls to the process, up to its limits, unless others wait."""
        if self._closed:
            return
        if self._process is not None and self._is_turn_over():
            if self._sent:
                return  # until these have returned
            self._release(busy=False)
        if not self._queue:
            return
        if self._process is None:
            if not self._process_requested:
                self._process_requested = True
                self._request_process(self._use_process)
            return
        batch: list[StreamedCall] = []
        while self._queue and len(self._sent) < limits.SENT_AHEAD_MAX:
            call = self._queue[0]
            size = len(call.args) + len(call.kwargs)
            if self._sent and self._sent_bytes + size > limits.SENT_AHEAD_BYTES:
                break
            if not self._sent:
                self._started_at = asyncio.get_running_loop().time()
            self._sent[call.number] = self._queue.popleft()
            self._sent_bytes += size
            batch.append(call)
        if batch:
            self._process.send((process_messages.PUSH,), _encode(batch))
            self._schedule_check()

    def _is_turn_over(self) -> bool:
        """Say whether the process should serve others now."""
        if not self._is_process_wanted():
            return False
        return self.idle or asyncio.get_running_loop().time() >= self._turn_ends

    def _use_process(self, process: CallProcess | Unavailable) -> None:
        """Use the process, or fail the queued calls if there is none."""
        self._process_requested = False
        if isinstance(process, Unavailable):
            failed, self._queue = self._queue, deque()
            self._on_returned(
                [CallResult(each.number, b"", str(process)) for each in failed]
            )
            return
        self._process = process
        self._turn_ends = asyncio.get_running_loop().time() + limits.STREAM_TURN
        self._not_started = process.announces_start
        process.user = self
        if self._closed:
            self._release(busy=False)
            return
        mode = mode_of(self._stream)
        opening = self._stream.name, mode, self._flush_each, self._grant
        process.send((process_messages.OPEN_STREAM, *opening))
        self._pump()

    def _release(self, *, busy: bool) -> None:
        assert self._process is not None
        process, self._process = self._process, None
        self._release_process(process, busy)

    def _forget(self, number: int) -> None:
        call = self._sent.pop(number)
        self._sent_bytes -= len(call.args) + len(call.kwargs)

    def _schedule_check(self) -> None:
        """Schedule a check of the running call for its deadline, if it has one."""
        limit = limits.RECALL_GRACE if self._recalled else self._timeout
        if limit is None or self._closed or self._not_started or not self._sent:
            return
        if self._timer is not None:
            self._timer.cancel()
        due = self._started_at + limit
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(max(due, loop.time()), self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if not self._sent or self._process is None:
            return
        now = asyncio.get_running_loop().time()
        running = next(iter(self._sent))
        if running in self._recalled and now - self._started_at >= limits.RECALL_GRACE:
            self._release(busy=True)
            self._fail_running("")
        elif self._timeout is not None and now - self._started_at >= self._timeout:
            self._release(busy=True)
            self._fail_running(timeout_message(self._timeout))
        self._schedule_check()


_ERRORS: dict[int, type[ShoalError]] = {
    REFUSED: InvalidRequest,
    BLOB_MISSING: Unavailable,
}


def _error(reason: int, tail: bytes, size: int) -> ShoalError:
    """Return a call's error; ``size`` is that of the traceback in ``tail``."""
    text = tail[:size].decode()
    if (kind := _ERRORS.get(reason)) is not None:
        return kind(text)
    return JobError(text, tail[size:])


class ProcessCall:
    """One call that a process is making."""

    def __init__(
        self, number: int, on_progress: OnProgress, send_blob: Callable[[bytes], None]
    ) -> None:
        self.number = number
        self.returned = False
        self.result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.timeout: tuple[asyncio.Timeout, float | None] | None = None
        self._on_progress = on_progress
        self._send_blob = send_blob

    def on_message(self, head: Sequence[Any], tail: bytes) -> None:
        code, subject = head[0], head[1]
        if code == process_messages.BLOB_NEEDED:
            self._send_blob(subject)
        elif subject != self.number:
            return  # progress of a thread that an earlier call left running
        elif code == process_messages.PROGRESS:
            self._on_progress(*head[2:])
        elif code == process_messages.STARTED:
            self._on_started()
        elif not self.result.done():
            self.returned = True
            if code == process_messages.DONE:
                self.result.set_result(tail)
            else:
                self.result.set_exception(_error(head[2], tail, head[3]))

    def _on_started(self) -> None:
        if self.timeout is None or self.result.done():
            return
        limit, timeout = self.timeout
        if timeout is not None:
            limit.reschedule(asyncio.get_running_loop().time() + timeout)

    def on_exit(self, reason: str) -> None:
        if not self.result.done():
            self.result.set_exception(JobError(reason))
