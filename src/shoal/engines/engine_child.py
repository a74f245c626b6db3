"""A child process that runs a model or a part of one: its log, its work and its end.

``LlamaProcess`` is the engine's end of the one that runs llama.cpp's server.
"""

import asyncio
import contextlib
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence

import msgspec
import psutil

from shoal.domain.errors import ConfigError, Unavailable
from shoal.domain.work import JobKind
from shoal.engines.engine import Activity
from shoal.engines.llama_child import ModelToOpen, OpenFailed, Reply, ServerOpened
from shoal.engines.openai_server import OpenAIEngine
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


EMBEDDED = ("-m", "shoal.engines.llama_child")  # Python's arguments


class LlamaProcess:
    """A running ``child`` that serves a model; its owner must always ``close`` it."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.child = EngineChild(process, explain_exit)
        self._commands = process.stdin
        self._replies = process.stdout
        self._server: OpenAIEngine | None = None
        self._closing = False

    @classmethod
    async def spawn(cls, child: Sequence[str] = EMBEDDED) -> "LlamaProcess":
        """Start a child without a model; ``child`` are Python's arguments."""
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, *child), stdin=PIPE, stdout=PIPE, stderr=PIPE
            )
        )

    async def open(self, model: ModelToOpen) -> tuple[OpenAIEngine, frozenset[JobKind]]:
        """Load the model; return its server, and its kinds of work.

        Raises ConfigError if llama.cpp cannot, and Unavailable if the process ends.
        """
        self._commands.write(msgspec.json.encode(model) + b"\n")
        line = await self._replies.readline()
        reply: Reply | None = msgspec.json.decode(line, type=Reply) if line else None
        match reply:
            case ServerOpened(url, key, kinds):
                server = OpenAIEngine(url, slots=model.slots, api_key=key)
                try:
                    await server.start()
                except ConfigError as error:
                    reason = await self.child.exit_reason_soon()
                    raise Unavailable(reason or str(error)) from error
                if self._closing:
                    await server.close()
                    raise Unavailable(CLOSED)
                self._server = server
                return server, kinds
            case OpenFailed(reason):
                # The child exits after this, and its log has the details.
                await self.child.exited
                raise ConfigError(first_error(self.child.log) or reason)
            case None:
                raise Unavailable(await self.child.exited)

    async def close(self) -> None:
        """End the process, killing it if necessary, and wait for its end."""
        self._closing = True
        await self.child.end()
        if self._server is not None:
            await self._server.close()
        with contextlib.suppress(OSError):
            await self._commands.wait_closed()


def explain_exit(ended: str, log: str) -> str:
    """Return why llama.cpp has ended."""
    return f"llama.cpp {ended}{last_unformatted_line(log)}"


def first_error(log: str) -> str | None:
    """Return the first error in llama.cpp's log, the most specific one."""
    found = re.search(r"^\S+ E +[^:]*: (?:error loading model: )?(.*)$", log, re.M)
    return found[1] if found else None


def last_unformatted_line(log: str) -> str:
    """Return, after a colon, the last line that is not a regular log entry.

    It may be a failed assertion or a missing library.
    """
    lines = [line for line in log.splitlines() if not re.match(r"\S+ [IWE] ", line)]
    return f": {lines[-1].strip()}" if lines else ""
