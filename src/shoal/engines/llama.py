"""The embedded engine: llama.cpp in a child process of its own.

A crash in native code costs the chats that were running, never the worker: they fail
as unavailable, and the next chat finds a new child.
"""

import asyncio
import math
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.domain.errors import ConfigError, JobError, LimitExceeded, Unavailable
from shoal.domain.work import JSON, Chat, Feature, Usage, text_of
from shoal.engines.llama_process import CLOSED, LlamaProcess
from shoal.engines.llama_wire import Ended, Load, Refused
from shoal.engines.port import Finished, Piece

CONTEXT = 4096  # tokens of each slot, unless the model was trained for fewer
CHATS_PER_SLOT = 4  # that llama.cpp may hold, aborted ones that wind down included
RESTART_DELAY_MAX = 60.0  # seconds

# What the engine decides; an option of that name would contradict it.
OURS = frozenset(
    {
        *("messages", "model", "stream", "stream_options", "n", "return_progress"),
        *("temperature", "max_tokens", "max_completion_tokens", "n_predict"),
        *("add_generation_prompt", "continue_final_message"),
    }
)


class LlamaEngine:
    """Runs a GGUF file.

    Args:
        model: the name that users ask for.
        path: the GGUF file.
        slots: chats that run at the same time; each has its own share of memory.
        context: tokens that a chat and its answer may have together.
        threads: processor threads; None: as many as do not slow each other down.
    """

    features = frozenset({Feature.CONTINUE, Feature.OPTIONS, Feature.STOP})

    def __init__(
        self,
        model: str,
        path: Path,
        *,
        slots: int = 4,
        context: int = CONTEXT,
        threads: int | None = None,
    ) -> None:
        self.model = model
        self.slots = slots
        self._path = path
        self._load = Load(
            path=str(path),
            slots=slots,
            context=context,
            threads=threads or threads_for(*processors()),
        )
        self._process: LlamaProcess | None = None
        self._closed = False
        self._failures = 0  # processes lost since one last finished a chat
        self._restart_at = 0.0  # on the loop's clock
        self._why_restart = ""
        # Chats that come while there is no process wait for the same new one.
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The process that does the work, for whoever watches it."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        await asyncio.to_thread(check_installed, self._path)
        try:
            await self._running()
        except Unavailable as error:
            raise ConfigError(f"{self._path}: {error}") from error

    async def chat(
        self, chat: Chat, continues: str = ""
    ) -> AsyncGenerator[Piece, None]:
        request = request_of(chat)
        try:
            process = await self._running()
        except ConfigError as error:
            raise Unavailable(str(error)) from error
        if process.chats >= CHATS_PER_SLOT * self.slots:
            raise Unavailable(f"{process.chats} chats for {self.slots} slots")
        try:
            id, answer = process.run(request, continues, chat.max_tokens)
        except LimitExceeded as error:
            raise JobError(str(error)) from error
        try:
            while True:
                match await answer.read():
                    case str() as text:
                        yield text
                    case Refused(_, reason):
                        raise JobError(reason)
                    case Ended(_, reason, read, written):
                        self._failures = 0
                        yield Finished(reason, Usage(read, written))
                        return
        finally:
            process.abort(id)

    async def close(self) -> None:
        self._closed = True
        if self._process is not None:
            await self._process.close()

    async def _running(self) -> LlamaProcess:
        """Return a process with the model loaded, a new one if need be.

        Raises ConfigError if the model cannot be loaded, and Unavailable if processes
        end one after the other: they are not restarted in a tight loop.
        """
        async with self._starting:
            now = asyncio.get_running_loop().time()
            if self._process is not None:
                if self._process.gone is None:
                    return self._process
                await self._process.close()
                self._why_restart = self._process.gone
                self._process = None
                self._failures += 1
                self._restart_at = now + restart_delay(self._failures)
            if (wait := self._restart_at - now) > 0:
                raise Unavailable(self._why_restart, retry_after=math.ceil(wait))
            return await self._start_process()

    async def _start_process(self) -> LlamaProcess:
        if self._closed:
            raise Unavailable(CLOSED)
        try:
            process = await LlamaProcess.spawn()
        except OSError as error:
            raise Unavailable(f"cannot start a process: {error}") from error
        # Known from here on, so that close() can end it while it loads.
        self._process = process
        try:
            if self._closed:
                raise Unavailable(CLOSED)
            await process.open(self._load)
        except ConfigError as error:
            await process.close()
            raise ConfigError(
                f"{self._path} cannot be loaded: {error}. Download it again, or choose "
                "a model that this version of llama.cpp knows."
            ) from error
        except BaseException:
            await process.close()
            raise
        return process


def request_of(chat: Chat) -> dict[str, Any]:
    """Return the chat as llama.cpp wants it, but for its limit of tokens.

    Raises JobError if a message is more than text.
    """
    request: dict[str, Any] = {
        name: value for name, value in chat.options.items() if name not in OURS
    }
    if chat.temperature is not None:
        request["temperature"] = chat.temperature
    request["messages"] = [plain(message) for message in chat.messages]
    return request


def plain(message: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the message with its parts joined to one text.

    Raises JobError if a part is none: to leave it out would answer another question.
    """
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else part
            if kind != "text":
                raise JobError(f"this model reads text only, and not {kind!r:.40}")
    return {**message, "content": text_of(message)}


def restart_delay(failures: int) -> float:
    """Return how long to wait, in seconds, after so many processes lost in a row.

    The first is replaced at once: most crashes are a matter of one odd chat.
    """
    if failures <= 1:
        return 0.0
    return min(2.0 ** min(failures - 2, 10), RESTART_DELAY_MAX)


def check_installed(path: Path) -> None:
    """Raise ConfigError if the engine or the model file is plainly not there."""
    if find_spec("xllamacpp") is None:
        raise ConfigError(
            "the embedded engine is not installed: pip install 'shoal[llm]'"
        )
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. Give the path of a GGUF file."
        ) from error
    if magic != b"GGUF":
        raise ConfigError(f"{path} is no GGUF file: it begins with {magic!r}")


def threads_for(logical: int, physical: int) -> int:
    """Return how many threads generate fastest beside everything else.

    llama.cpp's threads wait for each other by spinning.  With one for each processor,
    anything else that runs stops them all: with two processors and a busy neighbour,
    two threads were measured at a sixth of the speed of one.
    """
    return 1 if logical <= 2 else max(1, min(logical - 1, physical))


def processors() -> tuple[int, int]:
    """Return how many processors this process may use, and on how many cores."""
    if hasattr(os, "sched_getaffinity"):
        usable = os.sched_getaffinity(0)
        siblings = {
            siblings_of(Path(f"/sys/devices/system/cpu/cpu{number}"))
            for number in usable
        }
        return len(usable), len(siblings)
    logical = os.cpu_count() or 1
    # Macs have one thread a core or count so; elsewhere two is the safe guess.
    return logical, logical if sys.platform == "darwin" else max(1, logical // 2)


def siblings_of(processor: Path) -> str:
    """Return what the processors of one core have in common."""
    try:
        return (processor / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return processor.name
