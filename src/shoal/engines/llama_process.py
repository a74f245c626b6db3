"""The engine's end of the child process that runs llama.cpp's server."""

import asyncio
import contextlib
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

import msgspec

from shoal.domain.errors import ConfigError, Unavailable
from shoal.domain.work import JobKind
from shoal.engines.engine_child import CLOSED, EngineChild
from shoal.engines.llama_child import ModelToOpen, OpenFailed, Reply, ServerOpened
from shoal.engines.openai_server import OpenAIEngine

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
