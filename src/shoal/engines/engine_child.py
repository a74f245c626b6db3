"""A child process that runs a model or a part of one: its log, its work and its end."""

import asyncio
import contextlib
from asyncio.subprocess import Process
from collections.abc import Callable

import psutil

from shoal.engines.engine import Activity
from shoal.processes.programs import describe_exit

EXIT_LIMIT = 2.0  # seconds for a process to exit by itself, and again after SIGTERM
CLOSED = "the engine was closed"
BY_SIGNAL = 128  # and the signal's number: the status of a process that a signal ended
SIGNALLED = range(BY_SIGNAL + 1, BY_SIGNAL + 65)
LOG_MAX = 8192  # bytes of its standard error that are kept for error texts


class EngineChild:
    """A running child; its owner must always ``end`` it.

    ``exited`` is done with the reason when the process has ended; ``explain`` makes
    that from how it ended, such as "ended with status 1", and its log.
    """

    def __init__(self, process: Process, explain: Callable[[str, str], str]) -> None:
        assert process.stderr is not None
        self.pid = process.pid
        self._process = process
        self._explain = explain
        self._ending = False
        self._log = b""
        # Runs until the process ends; awaited in end().
        self.exited = asyncio.create_task(self._await_exit(process.stderr))

    @property
    def exit_reason(self) -> str | None:
        """Why the process has ended; None: it runs."""
        return self.exited.result() if self.exited.done() else None

    @property
    def log(self) -> str:
        """The end of its standard error."""
        return self._log.decode(errors="replace")

    async def exit_reason_soon(self) -> str | None:
        """Wait shortly for the end of the process; return its reason, or None."""
        await asyncio.wait({self.exited}, timeout=EXIT_LIMIT)
        return self.exit_reason

    async def end(self) -> None:
        """End the process, killing it if necessary, and wait for its end."""
        self._ending = True
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            for send_signal in (self._process.terminate, self._process.kill):
                if await self.exit_reason_soon() is not None:
                    break
                with contextlib.suppress(ProcessLookupError):
                    send_signal()
            await self.exited
        finally:
            if self._process.returncode is None:
                self._process.kill()

    async def _await_exit(self, errors: asyncio.StreamReader) -> str:
        """Keep the end of the log until the process ends; return the reason."""
        while data := await errors.read(LOG_MAX):
            self._log = (self._log + data)[-LOG_MAX:]
        code = await self._process.wait()
        ended = describe_exit(BY_SIGNAL - code if code in SIGNALLED else code)
        return CLOSED if self._ending else self._explain(ended, self.log)


def activity_of(pid: int) -> Activity | None:
    """Return what a process has done so far; None: it has ended."""
    try:
        process = psutil.Process(pid)
        times, memory = process.cpu_times(), process.memory_info().rss
        # Not on macOS, where the time to wait for a disk does not count.
        counters = getattr(process, "io_counters", None)
        read = counters().read_bytes if counters else 0
    except psutil.Error:
        return None
    return Activity(times.user + times.system, read, memory)
