"""Calls functions in a pool of prestarted processes, one per slot."""

import asyncio
import logging
from collections import deque
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import suppress
from functools import partial
from typing import Any

from shoal.domain import errors
from shoal.domain.vocabulary import CallResult
from shoal.domain.work import Call, CallStream, Feature
from shoal.tasks import limits, process_calls, process_messages
from shoal.tasks.function_caller import CallStreamSlot, FetchBlob, OnProgress
from shoal.tasks.invocation import CODE_NOT_TRUSTED
from shoal.tasks.process import (
    CLOSED,
    NO_VARIABLES,
    CallProcess,
    ChildProcess,
    Timeouts,
)
from shoal.tasks.registry import PYTHON, unknown_task_message

OnProcess = Callable[[CallProcess | errors.Unavailable], None]
StartProcess = Callable[[Callable[[CallProcess], None]], Awaitable[CallProcess]]

log = logging.getLogger("shoal.tasks")


def check_supported(
    work: Call | CallStream, names: Collection[str], *, trusts_code: bool
) -> None:
    """Raise an error if a caller cannot do the work; see ``FunctionCaller``."""
    if Feature.CODE in work.needs:
        if not trusts_code:
            raise errors.InvalidRequest(CODE_NOT_TRUSTED)
        if work.python not in ("", PYTHON):
            # Another version's bytecode can crash the process.
            raise errors.Unavailable(
                f"code of Python {work.python}; this worker has {PYTHON}"
            )
    elif work.name not in names:
        raise errors.NotFound(unknown_task_message(work.name, sorted(names)))


class ProcessPool:
    """A ``FunctionCaller`` whose calls run on this machine.

    Args:
        modules: modules that define the tasks; see ``import_tasks``.
        threads: thread count of numeric libraries in each process.
        sharers: coordinators that may use it; each may open a stream for each slot.
        start: starts a ``CallProcess`` elsewhere; calls its argument when it ends.
        variables: added to the environment of each process.
    """

    def __init__(
        self,
        modules: Sequence[str],
        slots: int,
        *,
        trust_code: bool,
        threads: int = 1,
        sharers: int = 1,
        start: StartProcess | None = None,
        variables: Mapping[str, str] = NO_VARIABLES,
    ) -> None:
        assert 0 < slots <= limits.PROCESSES_MAX
        self.slots = slots
        self.on_lent: Callable[[int], None] | None = None
        self.names: frozenset[str] = frozenset()
        self.trusts_code = trust_code
        self._sharers = sharers
        self._start: StartProcess = start or partial(
            ChildProcess.start,
            modules,
            trust=trust_code,
            threads=threads,
            variables=variables,
        )
        self._timeouts: Timeouts = {}
        self._idle: deque[CallProcess] = deque()
        self._all: set[CallProcess] = set()
        self._starting = 0  # replacements, and further processes
        self._lent: set[CallProcess] = set()  # their calls wait for calls of their own
        self._spare_timer: asyncio.TimerHandle | None = None
        self._waiting: deque[OnProcess] = deque()
        self._streams = 0
        self._number = 0
        self._start_failure = ""  # why the last start failed
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()  # awaited in close()

    async def start(self) -> None:
        self._starting = self.slots
        try:
            async with asyncio.TaskGroup() as tasks:
                starting = [
                    tasks.create_task(self._start_process()) for _ in range(self.slots)
                ]
        except ExceptionGroup as group:
            await self.close()
            error = group.exceptions[0]  # all have the same cause
            if isinstance(error, errors.Unavailable):
                raise errors.ConfigError(
                    f"the processes for tasks cannot be started: {error}"
                ) from error
            raise error from None
        finally:
            self._starting -= self.slots
        self._idle.extend(each.result() for each in starting)
        self._timeouts = self._idle[0].timeouts
        self.names = frozenset(self._timeouts)
        if isinstance(first := self._idle[0], ChildProcess):
            for remark in first.remarks:
                log.warning("%s", remark)

    async def call(
        self, call: Call, fetch: FetchBlob, on_progress: OnProgress, grant: str = ""
    ) -> bytes:
        check_supported(call, self.names, trusts_code=self.trusts_code)
        timeout = self._timeout(call)
        if timeout is not None and timeout <= 0:
            raise errors.JobError(process_calls.timeout_message(timeout))
        process = await self._idle_process()
        self._number += 1
        running = process_calls.ProcessCall(
            self._number,
            on_progress,
            lambda digest: self._send_blob(process, digest, fetch),
        )
        process.user = running
        process.send(
            (
                process_messages.CALL,
                running.number,
                call.name,
                process_calls.mode_of(call),
                len(call.args),
                timeout is not None,
                grant,
            ),
            call.args,
            call.kwargs,
        )
        try:
            async with asyncio.timeout(
                None if process.announces_start else timeout
            ) as limit:
                running.timeout = limit, timeout
                return await running.result
        except TimeoutError as error:
            assert timeout is not None
            raise errors.JobError(process_calls.timeout_message(timeout)) from error
        finally:
            self._release(process, not running.returned)

    def open_stream(
        self,
        stream: CallStream,
        fetch: FetchBlob,
        on_returned: Callable[[list[CallResult]], None],
        grant: str = "",
    ) -> CallStreamSlot:
        check_supported(stream, self.names, trusts_code=self.trusts_code)
        if self._streams >= self._capacity * self._sharers:
            raise errors.Unavailable(f"all {self._capacity} slots are taken")
        self._streams += 1
        return process_calls.ProcessCallStream(
            stream,
            self._timeout(stream),
            on_returned,
            self._request_process,
            self._release,
            lambda: bool(self._waiting),
            lambda process, digest: self._send_blob(process, digest, fetch),
            self._on_stream_closed,
            grant,
        )

    async def close(self) -> None:
        self._closing = True
        if self._spare_timer is not None:
            self._spare_timer.cancel()
        self._fail_waiting(CLOSED)
        for process in self._all:
            process.kill()
        for task in self._tasks:
            task.cancel()
        for process in [*self._all]:
            await process.wait_closed()
        if self._tasks:
            await asyncio.wait([*self._tasks])

    @property
    def _capacity(self) -> int:
        """The number of calls that may run, or wait for calls of their own."""
        return self.slots + len(self._lent)

    def _on_waiting(self, process: CallProcess, waits: bool) -> None:
        """Lend the slot of a process, or end that.

        The call goes on at once after its wait, beside the one that has its slot.
        """
        if not waits:
            self._end_loan(process)
        elif process.user is not None and process not in self._lent:
            if len(self._lent) >= limits.LENT_MAX:
                log.warning(
                    "more than %d calls wait for calls of their own; they may wait for "
                    "ever: start more workers",
                    limits.LENT_MAX,
                )
                return
            self._lent.add(process)
            self._start_missing()
            self._report_lent()

    def _end_loan(self, process: CallProcess) -> None:
        if process in self._lent:
            self._lent.remove(process)
            self._report_lent()
            if self._spare_timer is None:
                self._set_spare_timer()

    def _report_lent(self) -> None:
        if self.on_lent is not None and not self._closing:
            self.on_lent(len(self._lent))

    def _set_spare_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._spare_timer = loop.call_later(
            limits.SPARE_TIMEOUT, self._end_spare_processes
        )

    def _end_spare_processes(self) -> None:
        """End idle processes beyond the slots: they were for slots that were lent."""
        self._spare_timer = None
        spare = len(self._all) - self._capacity
        for _ in range(min(spare, len(self._idle))):
            self._idle.pop().kill()
        if spare > 0:
            self._set_spare_timer()

    def _on_stream_closed(self) -> None:
        self._streams -= 1

    def _timeout(self, work: Call | CallStream) -> float | None:
        if work.timeout is not None or Feature.CODE in work.needs:
            return work.timeout
        return self._timeouts[work.name]

    async def _idle_process(self) -> CallProcess:
        """Wait for an idle process.  Raises Unavailable if none can start."""
        if self._idle and not self._waiting:
            return self._idle.popleft()
        if len(self._waiting) >= limits.WAITING_MAX:
            raise errors.Unavailable(f"{limits.WAITING_MAX} calls wait already")
        assigned: asyncio.Future[CallProcess] = (
            asyncio.get_running_loop().create_future()
        )

        def use(process: CallProcess | errors.Unavailable) -> None:
            if isinstance(process, errors.Unavailable):
                if not assigned.done():
                    assigned.set_exception(process)
            elif assigned.done():  # the waiting call was cancelled
                self._assign(process)
            else:
                assigned.set_result(process)

        self._request_process(use)
        try:
            return await assigned
        except asyncio.CancelledError:
            if (
                assigned.done()
                and not assigned.cancelled()
                and assigned.exception() is None
            ):
                self._assign(assigned.result())
            raise

    def _request_process(self, use: OnProcess) -> None:
        if self._idle:
            use(self._idle.popleft())
        elif self._closing or (self._start_failure and not self._all):
            use(errors.Unavailable(self._start_failure or CLOSED))
        else:
            self._waiting.append(use)
            for process in [*self._all]:
                if isinstance(process.user, process_calls.ProcessCallStream):
                    process.user.yield_process()

    def _assign(self, process: CallProcess) -> None:
        """Pass a process to the longest waiting call, or mark it idle."""
        if process not in self._all:
            return  # it has just ended
        if self._waiting:
            self._waiting.popleft()(process)
        else:
            self._idle.append(process)

    def _release(self, process: CallProcess, busy: bool) -> None:
        process.user = None
        self._end_loan(process)
        if busy:
            process.kill()  # its end starts a replacement
        else:
            self._assign(process)

    def _send_blob(self, process: CallProcess, digest: bytes, fetch: FetchBlob) -> None:
        """Fetch a blob and send its path, or the error, to a process."""

        async def send() -> None:
            try:
                path = await fetch(digest)
                process.send((process_messages.BLOB, str(path), ""))
            except errors.Unavailable as error:
                process.send((process_messages.BLOB, "", str(error)))

        self._spawn(send())

    async def _start_process(self) -> CallProcess:
        process = await self._start(self._on_end)
        process.on_waiting = self._on_waiting
        self._all.add(process)
        return process

    def _on_end(self, process: CallProcess) -> None:
        if process not in self._all:
            return  # it ended during its start
        self._all.discard(process)
        with suppress(ValueError):
            self._idle.remove(process)
        if not self._closing:
            self._end_loan(process)
            self._start_missing()

    def _start_missing(self) -> None:
        """Start processes up to the capacity."""
        while len(self._all) + self._starting < self._capacity:
            self._starting += 1
            self._spawn(self._start_one())

    async def _start_one(self) -> None:
        try:
            await self._add_process()
        finally:
            self._starting -= 1

    async def _add_process(self) -> None:
        """Start a process, as often as it takes."""
        while not self._closing and len(self._all) < self._capacity:
            try:
                process = await self._start_process()
            except errors.ShoalError as error:
                self._start_failure = str(error)
                log.error("task process failed to start: %s", error)
                if not self._all:
                    self._fail_waiting(self._start_failure)
                await asyncio.sleep(limits.RESTART_DELAY)
            else:
                self._start_failure = ""
                self._assign(process)
                return

    def _fail_waiting(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, deque()
        for use in waiting:
            use(errors.Unavailable(reason))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
