"""The engine's end of the child process that runs llama.cpp's server."""

import asyncio
import contextlib
import re
import sys
from asyncio.subprocess import PIPE, Process

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
LOG_MAX = 8192  # bytes of its standard error that are kept for error texts


class LlamaProcess:
    """A running child process; its owner must always ``close`` it.

    ``exit_reason`` is None while the process runs.
    """

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.exit_reason: str | None = None
        self.pid = process.pid
        self._process = process
        self._commands = process.stdin
        self._replies = process.stdout
        self._server: OpenAIEngine | None = None
        self._closing = False
        self._log = b""
        # Runs until the process ends; awaited in close().
        self._exit = asyncio.create_task(self._await_exit(process.stderr))

    @classmethod
    async def spawn(cls) -> "LlamaProcess":
        """Start a child without a model."""
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "shoal.engines.llama_child"),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
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
                    reason = await self.exit_reason_soon()
                    raise Unavailable(reason or str(error)) from error
                if self._closing:
                    await server.close()
                    raise Unavailable(CLOSED)
                self._server = server
                return server, kinds
            case OpenFailed(reason):
                # The child exits after this, and its log has the details.
                await self._exit
                raise ConfigError(first_error(self._log_text) or reason)
            case None:
                raise Unavailable(await self._exit)

    def activity(self) -> Activity | None:
        """Return what the process has done so far; None: it has ended."""
        try:
            process = psutil.Process(self.pid)
            times, memory = process.cpu_times(), process.memory_info().rss
            # Not on macOS, where the time to wait for a disk does not count.
            counters = getattr(process, "io_counters", None)
            read = counters().read_bytes if counters else 0
        except psutil.Error:
            return None
        return Activity(times.user + times.system, read, memory)

    async def exit_reason_soon(self) -> str | None:
        """Wait shortly for the end of the process; return its reason, or None."""
        await asyncio.wait({self._exit}, timeout=EXIT_LIMIT)
        return self.exit_reason

    async def close(self) -> None:
        """End the process, killing it if necessary, and wait for its end."""
        self._closing = True
        self._commands.close()
        try:
            for send_signal in (self._process.terminate, self._process.kill):
                if await self.exit_reason_soon() is not None:
                    break
                with contextlib.suppress(ProcessLookupError):
                    send_signal()
            await self._exit
        finally:
            if self._process.returncode is None:
                self._process.kill()
        if self._server is not None:
            await self._server.close()
        with contextlib.suppress(OSError):
            await self._commands.wait_closed()

    @property
    def _log_text(self) -> str:
        return self._log.decode(errors="replace")

    async def _await_exit(self, errors: asyncio.StreamReader) -> str:
        """Keep the end of the log until the process ends; return the reason."""
        while data := await errors.read(LOG_MAX):
            self._log = (self._log + data)[-LOG_MAX:]
        ended = describe_exit(await self._process.wait())
        self.exit_reason = (
            CLOSED
            if self._closing
            else f"llama.cpp {ended}{last_unformatted_line(self._log_text)}"
        )
        return self.exit_reason


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
