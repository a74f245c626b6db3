"""Calls on one process: a single call, or a call stream that keeps it busy."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from shoal.domain.errors import InvalidRequest, JobError, ShoalError, Unavailable
from shoal.domain.vocabulary import CallResult, StreamedCall
from shoal.domain.work import CallStream, Feature
from shoal.tasks import process_messages
from shoal.tasks.function_caller import OnProgress
from shoal.tasks.invocation import BLOB_MISSING, REFUSED
from shoal.tasks.limits import (
    RECALL_GRACE,
    SENT_AHEAD_BYTES,
    SENT_AHEAD_MAX,
    STREAM_CALLS_MAX,
)
from shoal.tasks.process import CallProcess

OnReturned = Callable[[list[CallResult]], None]

TOO_MANY_CALLS = f"more than {STREAM_CALLS_MAX} calls wait in the call stream"

_encode = msgspec.msgpack.Encoder().encode
_returns = msgspec.msgpack.Decoder(list[CallResult])


def timeout_message(timeout: float) -> str:
    """Return the error text of a timed-out call, identical on all peers."""
    return f"Task timed out after {timeout or 0}s"


class ProcessCallStream:
    """Runs the calls of one call stream on one process.

    A process that is killed or dies is replaced.  The call that ran on it returns an
    error; its other calls are made again.

    Args:
        want: requests a process; calls its argument with it.
        give_back: returns the process; True: it is busy and must be killed.
        blob: sends a blob to a process.
        closed: called when the slot is free again.
    """

    def __init__(
        self,
        lane: CallStream,
        timeout: float | None,
        returned: OnReturned,
        want: Callable[[Callable[[CallProcess | Unavailable], None]], None],
        give_back: Callable[[CallProcess, bool], None],
        blob: Callable[[CallProcess, bytes], None],
        closed: Callable[[], None],
    ) -> None:
        self._lane = lane
        self._timeout = timeout
        self._returned = returned
        self._want = want
        self._give_back = give_back
        self._blob = blob
        self._on_close = closed
        self._process: CallProcess | None = None
        self._wanting = False
        self._closed = False
        # Whether the process sends each result before it begins the next call.
        self._at_once = timeout is not None
        self._queue: deque[StreamedCall] = deque()
        self._sent: dict[int, StreamedCall] = {}  # in call order
        self._sent_bytes = 0
        self._recalled: set[int] = set()
        self._late = False  # whether the first sent call has yet to begin
        self._began = 0.0  # approximate start of the first sent call
        self._timer: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        return not (self._sent or self._queue)

    def push(self, calls: Sequence[StreamedCall]) -> None:
        if len(self._queue) + len(calls) > STREAM_CALLS_MAX:
            self._returned(
                [CallResult(each.number, b"", TOO_MANY_CALLS) for each in calls]
            )
            return
        self._queue.extend(calls)
        self._pump()

    def recall(self, numbers: Sequence[int]) -> None:
        unwanted = set(numbers)
        self._queue = deque(each for each in self._queue if each.number not in unwanted)
        self._recalled |= unwanted & self._sent.keys()
        self._watch()

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

    def on_message(self, head: Sequence[Any], tail: bytes) -> None:
        if head[0] == process_messages.BLOB_NEEDED:
            assert self._process is not None
            self._blob(self._process, head[1])
            return
        if head[0] == process_messages.STARTED:
            self._late = False
            self._began = asyncio.get_running_loop().time()
            self._watch()
            return
        assert head[0] == process_messages.RETURNS, "unexpected message from a process"
        returns = _returns.decode(tail)
        for number, *_ in returns:
            self._forget(number)
        self._began = asyncio.get_running_loop().time()
        if self._recalled:
            kept = [each for each in returns if each.number not in self._recalled]
            self._recalled.difference_update(each.number for each in returns)
            returns = kept
        if returns:
            self._returned(returns)
        self._pump()

    def on_exit(self, why: str) -> None:
        self._process = None
        if not self._sent:
            return
        if len(self._sent) > 1 and not self._at_once:
            # It may have finished calls whose results it had not sent.
            self._at_once = True
            self._again()
        else:
            self._fail_first(why)

    def _fail_first(self, why: str) -> None:
        """Fail the running call and make the others again."""
        first = next(iter(self._sent))
        self._forget(first)
        recalled = first in self._recalled
        self._recalled.discard(first)
        self._again()
        if not recalled:
            self._returned([CallResult(first, b"", why)])

    def _again(self) -> None:
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
        """Send queued calls to the process, up to its limits."""
        if not self._queue or self._closed:
            return
        if self._process is None:
            if not self._wanting:
                self._wanting = True
                self._want(self._got)
            return
        batch: list[StreamedCall] = []
        while self._queue and len(self._sent) < SENT_AHEAD_MAX:
            call = self._queue[0]
            size = len(call.args) + len(call.kwargs)
            if self._sent and self._sent_bytes + size > SENT_AHEAD_BYTES:
                break
            if not self._sent:
                self._began = asyncio.get_running_loop().time()
            self._sent[call.number] = self._queue.popleft()
            self._sent_bytes += size
            batch.append(call)
        if batch:
            self._process.send((process_messages.PUSH,), _encode(batch))
            self._watch()

    def _got(self, process: CallProcess | Unavailable) -> None:
        """Use the process, or fail the queued calls if there is none."""
        self._wanting = False
        if isinstance(process, Unavailable):
            failed, self._queue = self._queue, deque()
            self._returned(
                [CallResult(each.number, b"", str(process)) for each in failed]
            )
            return
        self._process = process
        self._late = process.announces_start
        process.user = self
        if self._closed:
            self._release(busy=False)
            return
        code = Feature.CODE in self._lane.needs
        process.send(
            (process_messages.OPEN_STREAM, self._lane.name, code, self._at_once)
        )
        self._pump()

    def _release(self, *, busy: bool) -> None:
        assert self._process is not None
        process, self._process = self._process, None
        self._give_back(process, busy)

    def _forget(self, number: int) -> None:
        call = self._sent.pop(number)
        self._sent_bytes -= len(call.args) + len(call.kwargs)

    def _watch(self) -> None:
        """Schedule a check of the running call for its deadline, if it has one."""
        limit = RECALL_GRACE if self._recalled else self._timeout
        if limit is None or self._closed or self._late or not self._sent:
            return
        if self._timer is not None:
            self._timer.cancel()
        due = self._began + limit
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(max(due, loop.time()), self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._sent or self._process is None:
            return
        now = asyncio.get_running_loop().time()
        first = next(iter(self._sent))
        if first in self._recalled and now - self._began >= RECALL_GRACE:
            self._release(busy=True)
            self._fail_first("")
        elif self._timeout is not None and now - self._began >= self._timeout:
            self._release(busy=True)
            self._fail_first(timeout_message(self._timeout))
        self._watch()


_ERRORS: dict[int, type[ShoalError]] = {
    REFUSED: InvalidRequest,
    BLOB_MISSING: Unavailable,
}


class ProcessCall:
    """One call that a process is making."""

    def __init__(
        self, number: int, remark: OnProgress, blob: Callable[[bytes], None]
    ) -> None:
        self.number = number
        self.returned = False
        self.result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.timeout: tuple[asyncio.Timeout, float | None] | None = None
        self._remark = remark
        self._blob = blob

    def on_message(self, head: Sequence[Any], tail: bytes) -> None:
        code, about = head[0], head[1]
        if code == process_messages.BLOB_NEEDED:
            self._blob(about)
        elif about != self.number:
            return  # progress of a thread that an earlier call left running
        elif code == process_messages.PROGRESS:
            self._remark(*head[2:])
        elif code == process_messages.STARTED:
            self._begun()
        elif not self.result.done():
            self.returned = True
            if code == process_messages.DONE:
                self.result.set_result(tail)
            else:
                error = _ERRORS.get(head[2], JobError)
                self.result.set_exception(error(tail.decode()))

    def _begun(self) -> None:
        if self.timeout is None or self.result.done():
            return
        limit, timeout = self.timeout
        if timeout is not None:
            limit.reschedule(asyncio.get_running_loop().time() + timeout)

    def on_exit(self, why: str) -> None:
        if not self.result.done():
            self.result.set_exception(JobError(why))
