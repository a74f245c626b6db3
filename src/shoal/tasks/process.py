"""The worker's end of one task process."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias, cast

import msgspec

from shoal.domain.errors import ConfigError, Unavailable
from shoal.tasks import process_messages
from shoal.tasks.child_io import MARK, last_call_output
from shoal.tasks.errors import TASKS_FOLDER
from shoal.tasks.limits import (
    OUTPUT_DRAIN_TIMEOUT,
    START_TIMEOUT,
    STDERR_LINES_MAX,
    STDERR_MAX,
)

Timeouts: TypeAlias = Mapping[str, float | None]
"""The names of the tasks, and for how long each may run if its caller does not say."""

CHILD_MODULE = "shoal.tasks.child"
CLOSED = "the worker is stopping"
_STDERR = 2
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""The variables by which numeric libraries are told how many threads to use."""

_ROUTINE = re.compile(
    rf'\s*$|Extension modules: |  File "({re.escape(TASKS_FOLDER)}|<frozen runpy>)'
)
"""What ``faulthandler`` writes beside the lines of a task."""

_timeouts = msgspec.msgpack.Decoder(dict[str, float | None])


class ProcessUser(Protocol):
    """What a process works for."""

    def on_message(self, head: Sequence[Any], tail: bytes) -> None:
        """Take a message; its head begins with its code."""
        ...

    def on_exit(self, why: str) -> None:
        """Learn that the process has ended, and how."""
        ...


class CallProcess(Protocol):
    """Makes one call at a time for a user: a process, or what behaves like one."""

    user: ProcessUser | None

    @property
    def announces_start(self) -> bool:
        """Whether it says by itself when what it is sent begins."""
        ...

    @property
    def timeouts(self) -> Timeouts:
        """The tasks that it has."""
        ...

    def send(self, head: tuple[Any, ...], *tail: bytes) -> None:
        """Send a message.  To one that has ended it is lost: ``on_exit`` is told."""
        ...

    def kill(self) -> None:
        """End it at once, with what it has started; whoever began it is told."""
        ...

    async def wait_closed(self) -> None:
        """Wait until it has ended."""
        ...


class ChildProcess(asyncio.SubprocessProtocol):
    """A child process, which is a ``CallProcess``; ``start`` makes one.

    Args:
        ended: called once it has ended.
    """

    def __init__(self, ended: Callable[["ChildProcess"], None]) -> None:
        self.timeouts: Timeouts = {}
        self.announces_start = False
        self.slots = 0  # how many calls it makes at a time
        self.user: ProcessUser | None = None
        self.killed = False  # by us: what it says from then on is not heard
        self.pid = 0
        self._on_end = ended
        self._transport: asyncio.SubprocessTransport | None = None
        self._orders: asyncio.WriteTransport | None = None
        self._chunks: list[bytes] = []  # of a message that is not whole
        self._size = 0  # bytes of them
        self._awaited = 0  # bytes that they have to be
        self._log = b""  # what the call that runs has printed
        self._ready: asyncio.Future[Timeouts] = (
            asyncio.get_running_loop().create_future()
        )
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(
        cls,
        modules: Sequence[str],
        *,
        trust: bool,
        threads: int,
        ended: Callable[["ChildProcess"], None],
        program: Sequence[str] = (CHILD_MODULE,),
        within: float = START_TIMEOUT,
    ) -> "ChildProcess":
        """Start a process and have it import its modules.

        ``program`` is a module that carries out orders, and what else it is given.

        Raises ConfigError with the traceback if it cannot, Unavailable if it ends or
        takes too long.  If it is cancelled, the process has ended before it returns.
        """
        loop = asyncio.get_running_loop()
        environment = dict.fromkeys(THREAD_VARIABLES, str(threads)) | os.environ
        process = cls(ended)
        started = False
        try:
            # Cancelled while it opens the pipes, asyncio would leave some open.
            await _uninterrupted(
                loop.subprocess_exec(
                    lambda: process,
                    *(sys.executable, "-m", program[0], str(os.getpid()), *program[1:]),
                    env=environment,
                    # Its own group, to be killed with the processes that tasks start.
                    start_new_session=os.name == "posix",
                )
            )
            process.send((process_messages.PREPARE, [*modules], trust))
            async with asyncio.timeout(within):
                process.timeouts = await process._ready
            started = True
        except TimeoutError as error:
            raise Unavailable(
                f"the tasks were not imported within {within:g} s"
            ) from error
        finally:
            if not started and process._transport is not None:
                process._ready.cancel()  # nobody awaits it any more
                process.kill()
                await _uninterrupted(process.wait_closed())
        return process

    def send(self, head: tuple[Any, ...], *tail: bytes) -> None:
        if self._orders is None or self._orders.is_closing():
            return
        begin = process_messages.encode_head(head, sum(map(len, tail)))
        if sum(map(len, tail)) < 1 << 16:
            self._orders.write(b"".join((begin, *tail)))
        else:
            self._orders.writelines((begin, *tail))

    def close_input(self) -> None:
        """Let it end by itself, for there are no more orders."""
        if self._orders is not None:
            self._orders.close()

    def kill(self) -> None:
        self.killed = True
        if self._transport is None or self._over.done():
            return
        with suppress(ProcessLookupError, PermissionError):
            if os.name == "posix":
                os.killpg(self.pid, signal.SIGKILL)
            else:
                self._transport.kill()

    async def wait_closed(self) -> None:
        await asyncio.shield(self._over)

    # What follows is called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # What it is called with is such a transport, if only in its behaviour.
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self.pid = self._transport.get_pid()
        orders_to = self._transport.get_pipe_transport(0)
        self._orders = cast(asyncio.WriteTransport, orders_to)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == _STDERR:
            self._log = last_call_output(self._log, data)[-STDERR_MAX:]
            if text := data.replace(MARK, b"").decode(errors="replace"):
                sys.stderr.write(text)
                sys.stderr.flush()
            return
        if self._chunks:
            self._chunks.append(data)
            self._size += len(data)
            if self._size < self._awaited:
                return
            data = b"".join(self._chunks)
            self._chunks = []
        self._cut(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Learn that it has ended and that all of its words are there."""
        if self._over.done():
            return
        self._over.set_result(None)
        assert self._transport is not None
        self._transport.close()
        why = self._how_it_ended(self._transport.get_returncode())
        if not self._ready.done():
            self._ready.set_exception(Unavailable(why))
        user, self.user = self.user, None
        if user is not None and not self.killed:
            user.on_exit(why)
        self._on_end(self)

    def process_exited(self) -> None:
        assert self._transport is not None
        if self.killed:
            self._transport.close()
        else:
            # What it said last is still to be read, but not for as long as processes
            # that it has started hold its pipes.
            loop = asyncio.get_running_loop()
            loop.call_later(OUTPUT_DRAIN_TIMEOUT, self._transport.close)

    def _cut(self, data: bytes) -> None:
        at, end = 0, len(data)
        while end - at >= process_messages.SIZES.size:
            size, head_size = process_messages.SIZES.unpack_from(data, at)
            begin = at + process_messages.SIZES.size
            if end - begin < size:
                self._awaited = size + process_messages.SIZES.size
                break
            tail = begin + head_size
            at = begin + size
            if not self.killed:
                self._take(msgspec.msgpack.decode(data[begin:tail]), data[tail:at])
        else:
            self._awaited = 0
        if at < end:
            self._chunks = [data[at:]]
            self._size = end - at

    def _take(self, head: Sequence[Any], tail: bytes) -> None:
        if head[0] in (process_messages.READY, process_messages.IMPORT_FAILED):
            if self._ready.done():
                return  # the start was cancelled
            if head[0] == process_messages.READY:
                self.slots = head[1]
                self._ready.set_result(_timeouts.decode(tail))
            else:
                self._ready.set_exception(ConfigError(head[1]))
        elif self.user is not None:
            self.user.on_message(head, tail)

    def _how_it_ended(self, code: int | None) -> str:
        how = "ended" if code is None else f"ended with status {code}"
        if code is not None and code < 0:
            try:
                how = f"was ended by {signal.Signals(-code).name}"
            except ValueError:
                how = f"was ended by signal {-code}"
        if code == -9:
            how += " (the machine may have run out of memory)"
        lines = last_lines(self._log.decode(errors="replace"))
        said = "; it said last:\n" + "\n".join(lines) if lines else ""
        return f"the process that made the call {how}{said}"


async def _uninterrupted(work: Awaitable[object]) -> None:
    """Wait for what takes little time, even if cancelled, and be cancelled after it."""
    future = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    future.result()


def last_lines(log: str) -> list[str]:
    """Return the last lines of a log that are not about how a task is called."""
    lines = [line for line in log.splitlines() if not _ROUTINE.match(line)]
    return lines[-STDERR_LINES_MAX:]
