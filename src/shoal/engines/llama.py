"""The embedded engine: llama.cpp in a child process of its own.

A crash in native code costs the chats that were running, never the worker: they fail
as unavailable, and the next chat finds a new child.
"""

import asyncio
import math
import os
import sys
from collections.abc import AsyncIterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.domain.errors import ConfigError, JobError, LimitExceeded, Unavailable
from shoal.domain.work import JSON, Chat, Feature, Usage, text_of
from shoal.engines.llama_process import LlamaProcess
from shoal.engines.llama_wire import Ended, Load, Refused
from shoal.engines.port import Finished, Piece

CONTEXT = 4096  # tokens of each slot, unless the model was trained for fewer
CHATS_PER_SLOT = 4  # that llama.cpp may hold, aborted ones that wind down included
RESTART_DELAY_MAX = 60.0  # seconds

# What the engine decides; an option of that name would contradict it.
OURS = frozenset(
    "messages model stream stream_options n max_tokens max_completion_tokens n_predict "
    "temperature add_generation_prompt continue_final_message return_progress".split()
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
        self._restart_at = 0.0  # monotonic
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

    async def chat(self, chat: Chat, continues: str = "") -> AsyncIterator[Piece]:
        request = request_of(chat)
        process = await self._running()
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
        end as soon as they start: a broken one is not restarted in a tight loop.
        """
        async with self._starting:
            if self._closed:
                raise Unavailable("the engine was closed")
            if self._process is not None and self._process.gone is None:
                return self._process
            await self._bury()
            ...
        raise AssertionError
