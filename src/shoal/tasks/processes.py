"""Calls functions in processes that are started ahead, one for each slot."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from shoal.domain.errors import (
    ConfigError,
    InvalidRequest,
    JobError,
    NotFound,
    ShoalError,
    Unavailable,
)
from shoal.domain.vocabulary import LaneReturn
from shoal.domain.work import Call, Feature, Lane
from shoal.tasks import orders
from shoal.tasks.lanes import ProcessLane, timed_out
from shoal.tasks.limits import PROCESSES_MAX, RESTART_AFTER, WAITING_MAX
from shoal.tasks.one_call import OneCall
from shoal.tasks.port import Fetch, OpenLane, Remark
from shoal.tasks.process import CLOSED, Process, Runner, Timeouts
from shoal.tasks.registry import not_among
from shoal.tasks.running import NOT_TRUSTED

Give = Callable[[Runner | Unavailable], None]
Start = Callable[[Callable[[Runner], None]], Awaitable[Runner]]

log = logging.getLogger("shoal.tasks")


class Processes:
    """A ``Caller`` whose calls run on this machine.

    Args:
        modules: what has the tasks; see ``import_tasks``.
        threads: what each process tells numeric libraries to use.
        start: starts what behaves like a process, elsewhere, and tells when it ends.
    """

    def __init__(
        self,
        modules: Sequence[str],
        slots: int,
        *,
        trust_code: bool,
        threads: int = 1,
        start: Start | None = None,
    ) -> None:
        assert 0 < slots <= PROCESSES_MAX
        self.slots = slots
        self.names: frozenset[str] = frozenset()
        self.trusts_code = trust_code
        self._start: Start = start or partial(
            _child, modules, trust=trust_code, threads=threads
        )
        self._timeouts: Timeouts = {}
        self._idle: deque[Runner] = deque()
        self._all: set[Runner] = set()
        self._waiting: deque[Give] = deque()
        self._lanes = 0
        self._number = 0
        self._why_none = ""  # why none could be started lately
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()  # awaited in close()

    async def start(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                starting = [
                    tasks.create_task(self._started()) for _ in range(self.slots)
                ]
        except ExceptionGroup as group:
            await self.close()
            error = group.exceptions[0]  # they have one cause
            if isinstance(error, Unavailable):
                raise ConfigError(
                    f"the processes for tasks cannot be started: {error}"
                ) from error
            raise error from None
        self._idle.extend(each.result() for each in starting)
        self._timeouts = self._idle[0].timeouts
        self.names = frozenset(self._timeouts)

    async def call(self, call: Call, fetch: Fetch, remark: Remark) -> bytes:
        self._check(call)
        timeout = self._timeout(call)
        if timeout is not None and timeout <= 0:
            raise JobError(timed_out(timeout))
        process = await self._free()
        self._number += 1
        one = OneCall(
            self._number, remark, lambda digest: self._blob(process, digest, fetch)
        )
        process.user = one
        code = Feature.CODE in call.needs
        process.send(
            (
                *(orders.CALL, one.number, call.name, code, len(call.args)),
                timeout is not None,
            ),
            call.args,
            call.kwargs,
        )
        try:
            async with asyncio.timeout(None if process.late else timeout) as limit:
                one.limit = limit, timeout
                return await one.result
        except TimeoutError as error:
            assert timeout is not None
            raise JobError(timed_out(timeout)) from error
        finally:
            self._give_back(process, not one.returned)

    def lane(
        self, lane: Lane, fetch: Fetch, returned: Callable[[list[LaneReturn]], None]
    ) -> OpenLane:
        self._check(lane)
        if self._lanes >= self.slots:
            raise Unavailable(f"all {self.slots} slots are taken")
        self._lanes += 1
        return ProcessLane(
            lane,
            self._timeout(lane),
            returned,
            self._want,
            self._give_back,
            lambda process, digest: self._blob(process, digest, fetch),
            self._lane_closed,
        )

    async def close(self) -> None:
        self._closing = True
        self._fail_waiting(CLOSED)
        for process in self._all:
            process.kill()
        for task in self._tasks:
            task.cancel()
        for process in [*self._all]:
            await process.gone()
        if self._tasks:
            await asyncio.wait([*self._tasks])

    def _lane_closed(self) -> None:
        self._lanes -= 1

    def _check(self, work: Call | Lane) -> None:
        """Raise NotFound or InvalidRequest for what is not called here."""
        if Feature.CODE in work.needs:
            if not self.trusts_code:
                raise InvalidRequest(NOT_TRUSTED)
        elif work.name not in self.names:
            raise NotFound(not_among(work.name, sorted(self.names)))

    def _timeout(self, work: Call | Lane) -> float | None:
        if work.timeout is not None or Feature.CODE in work.needs:
            return work.timeout
        return self._timeouts[work.name]

    async def _free(self) -> Runner:
        """Wait for a process.  Raises Unavailable if there will be none."""
        if self._idle and not self._waiting:
            return self._idle.popleft()
        if len(self._waiting) >= WAITING_MAX:
            raise Unavailable(f"{WAITING_MAX} calls wait already")
        got: asyncio.Future[Runner] = asyncio.get_running_loop().create_future()

        def give(process: Runner | Unavailable) -> None:
            if isinstance(process, Unavailable):
                if not got.done():
                    got.set_exception(process)
            elif got.done():  # whoever waited does so no more
                self._give(process)
            else:
                got.set_result(process)

        self._want(give)
        try:
            return await got
        except asyncio.CancelledError:
            if got.done() and not got.cancelled() and got.exception() is None:
                self._give(got.result())
            raise

    def _want(self, give: Give) -> None:
        if self._idle:
            give(self._idle.popleft())
        elif self._closing or (self._why_none and not self._all):
            give(Unavailable(self._why_none or CLOSED))
        else:
            self._waiting.append(give)

    def _give(self, process: Runner) -> None:
        """Pass a process on to who waits longest."""
        if process not in self._all:
            return  # it has just ended
        if self._waiting:
            self._waiting.popleft()(process)
        else:
            self._idle.append(process)

    def _give_back(self, process: Runner, busy: bool) -> None:
        process.user = None
        if busy:
            process.kill()  # which has it replaced
        else:
            self._give(process)

    def _blob(self, process: Runner, digest: bytes, fetch: Fetch) -> None:
        """Let a process have what it lacks."""

        async def find() -> None:
            try:
                path = await fetch(digest)
                process.send((orders.BLOB, str(path), ""))
            except Unavailable as error:
                process.send((orders.BLOB, "", str(error)))

        self._spawn(find())

    async def _started(self) -> Runner:
        process = await self._start(self._ended)
        self._all.add(process)
        return process

    def _ended(self, process: Runner) -> None:
        if process not in self._all:
            return  # it never was ready
        self._all.discard(process)
        with suppress(ValueError):
            self._idle.remove(process)
        if not self._closing:
            self._spawn(self._replace())

    async def _replace(self) -> None:
        """Start a process in the place of one that has ended."""
        while not self._closing:
            try:
                process = await self._started()
            except ShoalError as error:
                self._why_none = str(error)
                log.error("no process for tasks could be started: %s", error)
                if not self._all:
                    self._fail_waiting(self._why_none)
                await asyncio.sleep(RESTART_AFTER)
            else:
                self._why_none = ""
                self._give(process)
                return

    def _fail_waiting(self, why: str) -> None:
        waiting, self._waiting = self._waiting, deque()
        for give in waiting:
            give(Unavailable(why))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _child(
    modules: Sequence[str],
    ended: Callable[[Runner], None],
    *,
    trust: bool,
    threads: int,
) -> Runner:
    return await Process.start(modules, trust=trust, threads=threads, ended=ended)
