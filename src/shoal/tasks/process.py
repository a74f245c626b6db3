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
from shoal.processes.programs import describe_exit
from shoal.tasks import limits, process_messages
from shoal.tasks.child_io import MARK, last_call_output
from shoal.tasks.errors import TASKS_FOLDER

Timeouts: TypeAlias = Mapping[str, float | None]
"""Task names, each with its default timeout in seconds."""

CHILD_MODULE = "shoal.tasks.child"
CLOSED = "the worker is stopping"
_STDERR = 2
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that set the thread count of numeric libraries."""
NO_VARIABLES: Mapping[str, str] = {}

_ROUTINE = re.compile(
    rf'\s*$|Extension modules: |  File "({re.escape(TASKS_FOLDER)}|<frozen runpy>)'
    # From Python 3.14 on, that of C follows, and would leave no line of the task's.
    r"|Current thread's C stack trace |  Binary file |  <truncated rest of calls>"
)
"""Lines of a ``faulthandler`` traceback that do not come from a task."""

_timeouts = msgspec.msgpack.Decoder(dict[str, float | None])


class ProcessUser(Protocol):
    """Receives the messages and the exit of a process."""

    def on_message(self, head: Sequence[Any], tail: bytes) -> None:
        """Handle a message; its head begins with its code."""

    def on_exit(self, reason: str) -> None:
        """Handle the end of the process; ``reason`` describes its exit."""


class CallProcess(Protocol):
    """Makes one call at a time for a user: a child process or an equivalent."""

    user: ProcessUser | None
    on_waiting: "Callable[[CallProcess, bool], None] | None"
    """Receives whether its call waits for calls of its own."""

    @property
    def announces_start(self) -> bool:
        """Whether it sends STARTED when a call begins."""

    @property
    def timeouts(self) -> Timeouts:
        """Its tasks, with their default timeouts."""

    def send(self, head: tuple[Any, ...], *tail: bytes) -> None:
        """Send a message; after the end of the process it is dropped."""

    def kill(self) -> None:
        """Kill the process and its children; its owner is notified."""

    async def wait_closed(self) -> None:
        """Wait for the process to end."""


class ChildProcess(asyncio.SubprocessProtocol):
    """A ``CallProcess`` that is a child process; ``start`` creates it.

    Args:
        on_end: called when the process has ended.
    """

    def __init__(self, on_end: Callable[["ChildProcess"], None]) -> None:
        self.timeouts: Timeouts = {}
        self.announces_start = False
        self.slots = 0  # concurrent calls
        self.remarks: Sequence[str] = ()  # about its tasks, for the worker's owner
        self.user: ProcessUser | None = None
        self.on_waiting: Callable[[CallProcess, bool], None] | None = None
        self.killed = False  # by the worker; later messages are ignored
        self.pid = 0
        self._on_end = on_end
        self._transport: asyncio.SubprocessTransport | None = None
        self._commands: asyncio.WriteTransport | None = None
        self._chunks: list[bytes] = []  # of an incomplete message
        self._size = 0  # bytes in _chunks
        self._awaited = 0  # bytes of the complete message
        self._log = b""  # standard error of the running call
        self._ready: asyncio.Future[Timeouts] = (
            asyncio.get_running_loop().create_future()
        )
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(
        cls,
        modules: Sequence[str],
        on_end: Callable[["ChildProcess"], None],
        *,
        trust: bool,
        threads: int,
        program: Sequence[str] = (CHILD_MODULE,),
        within: float = limits.START_TIMEOUT,
        variables: Mapping[str, str] = NO_VARIABLES,
    ) -> "ChildProcess":
        """Start a process that imports ``modules``.

        ``program`` is the module to run, with its further arguments, and ``variables``
        are added to its environment.

        Raises ConfigError with the traceback if an import fails, Unavailable if the
        process ends or exceeds ``within`` seconds.  On cancellation, the process has
        ended before this returns.
        """
        loop = asyncio.get_running_loop()
        environment = dict.fromkeys(THREAD_VARIABLES, str(threads)) | os.environ
        environment |= variables
        process = cls(on_end)
        started = False
        try:
            # A cancelled subprocess_exec can leak open pipes.
            await _run_to_completion(
                loop.subprocess_exec(
                    lambda: process,
                    *(sys.executable, "-m", program[0], str(os.getpid()), *program[1:]),
                    env=environment,
                    # Own process group: a kill includes processes that tasks start.
                    start_new_session=sys.platform != "win32",
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
                process._ready.cancel()  # has no awaiter left
                process.kill()
                await _run_to_completion(process.wait_closed())
        return process

    def send(self, head: tuple[Any, ...], *tail: bytes) -> None:
        if self._commands is None or self._commands.is_closing():
            return
        begin = process_messages.encode_head(head, sum(map(len, tail)))
        if sum(map(len, tail)) < 1 << 16:
            self._commands.write(b"".join((begin, *tail)))
        else:
            self._commands.writelines((begin, *tail))

    def close_input(self) -> None:
        """Close standard input, so that the process exits by itself."""
        if self._commands is not None:
            self._commands.close()

    def kill(self) -> None:
        self.killed = True
        if self._transport is None or self._closed.done():
            return
        if sys.platform != "win32":  # where transports would take the exit status
            self._kill_group()
            return
        with suppress(ProcessLookupError, PermissionError):
            self._transport.kill()

    def _kill_group(self) -> None:
        """Kill the process and those that tasks have started, also if it has ended.

        No other process gets its number while the group has members.
        """
        if sys.platform != "win32":
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def wait_closed(self) -> None:
        await asyncio.shield(self._closed)

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Any event loop's transport has this interface, whatever its base class.
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self.pid = self._transport.get_pid()
        stdin = self._transport.get_pipe_transport(0)
        self._commands = cast(asyncio.WriteTransport, stdin)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == _STDERR:
            self._log = last_call_output(self._log, data)[-limits.STDERR_MAX :]
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
        self._split_messages(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the process, after all of its output."""
        if self._closed.done():
            return
        self._closed.set_result(None)
        assert self._transport is not None
        self._transport.close()
        reason = self._exit_reason(self._transport.get_returncode())
        if not self._ready.done():
            self._ready.set_exception(Unavailable(reason))
        user, self.user = self.user, None
        if user is not None and not self.killed:
            user.on_exit(reason)
        self._on_end(self)

    def process_exited(self) -> None:
        assert self._transport is not None
        self._kill_group()
        if self.killed:
            self._transport.close()
        else:
            # Drain its output, but with a limit: processes that it has started may
            # keep its pipes open, in a group of their own.
            loop = asyncio.get_running_loop()
            loop.call_later(limits.OUTPUT_DRAIN_TIMEOUT, self._transport.close)

    def _split_messages(self, data: bytes) -> None:
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
                self._receive(msgspec.msgpack.decode(data[begin:tail]), data[tail:at])
        else:
            self._awaited = 0
        if at < end:
            self._chunks = [data[at:]]
            self._size = end - at

    def _receive(self, head: Sequence[Any], tail: bytes) -> None:
        if head[0] in (process_messages.READY, process_messages.IMPORT_FAILED):
            if self._ready.done():
                return  # the start was cancelled
            if head[0] == process_messages.READY:
                self.slots, self.remarks = head[1:]
                self._ready.set_result(_timeouts.decode(tail))
            else:
                self._ready.set_exception(ConfigError(head[1]))
        elif head[0] == process_messages.WAITING:
            if self.on_waiting is not None:
                self.on_waiting(self, head[1])
        elif self.user is not None:
            self.user.on_message(head, tail)

    def _exit_reason(self, code: int | None) -> str:
        hint = " (the machine may have run out of memory)" if code == -9 else ""
        lines = last_task_lines(self._log.decode(errors="replace"))
        output = "; its last output:\n" + "\n".join(lines) if lines else ""
        return f"the process that ran the call {describe_exit(code)}{hint}{output}"


async def _run_to_completion(work: Awaitable[object]) -> None:
    """Finish a short operation even if cancelled; then raise CancelledError."""
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


def last_task_lines(log: str) -> list[str]:
    """Return the last lines of a log, without those of the call machinery."""
    lines = [line for line in log.splitlines() if not _ROUTINE.match(line)]
    return lines[-limits.STDERR_LINES_MAX :]
