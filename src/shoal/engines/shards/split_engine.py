"""The engine for a model of several machines: llama.cpp's server, and shards of others.

When a shard is lost, the server aborts: the jobs fail as unavailable, and so does the
engine from then on.  It is never started again, because only the pool can find other
machines.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from shoal.domain import work as works
from shoal.domain.errors import ConfigError, Unavailable
from shoal.domain.worker import ServedModel
from shoal.engines.engine import Activity, Item
from shoal.engines.engine_child import CLOSED, LlamaProcess, activity_of
from shoal.engines.llama_child import BATCH_TOKENS
from shoal.engines.llama_engine import CONTEXT, LlamaEngine
from shoal.engines.server_kinds import TEXT
from shoal.engines.shards.programs import ShardPrograms
from shoal.engines.shards.split_child import SplitOptions

CHILD = "shoal.engines.shards.split_child"
REASON_WITHIN = 1.5  # seconds in which a lost shard is known after the server's end


class ShardPorts(Protocol):
    """Where the shards of a model are reached."""

    @property
    def ports(self) -> Sequence[int]:
        """A loopback port for each shard."""

    @property
    def lost(self) -> "asyncio.Future[str]":
        """Done with the reason when a shard is lost."""

    async def close(self) -> None:
        """Leave all shards."""


class SplitEngine:
    """Runs a GGUF file whose layers are on several machines.

    Args:
        model: name that clients request.
        path: the GGUF file.
        programs: llama.cpp's programs of this machine, with its server.
        layers: how many each machine holds, this one last.
        links: the shards of the others, which are closed with the engine.
        projector: the GGUF file that makes images or audio tokens of the model.
        slots: concurrent jobs; each has its own share of memory.
        context: maximum tokens of a prompt and its answer together.
        threads: CPU threads; None: the engine's choice for this machine.
        kinds: the kinds of work that the file declares; loading it shows the rest.
        batch: tokens of a prompt that are read at a time: fewer take less memory.
    """

    def __init__(
        self,
        model: str,
        path: Path,
        *,
        programs: ShardPrograms,
        layers: Sequence[int],
        links: ShardPorts,
        projector: Path | None = None,
        slots: int = 4,
        context: int = CONTEXT,
        threads: int | None = None,
        kinds: frozenset[works.JobKind] = TEXT,
        batch: int = BATCH_TOKENS,
    ) -> None:
        assert programs.llama_server is not None, "only where it is, a model is run"
        self.model = model
        self.slots = slots
        self._split = SplitOptions(
            str(programs.llama_server),
            programs.device,
            tuple(links.ports),
            tuple(layers),
            batch,
        )
        self._links = links
        self._engine = LlamaEngine(
            model,
            path,
            projector=projector,
            slots=slots,
            context=context,
            threads=threads,
            kinds=kinds,
            spawn=self._spawn,
        )
        self._process: LlamaProcess | None = None
        self._watching: asyncio.Task[None] | None = None
        self._ended = ""  # why
        # Done with the reason when it has ended for good.
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int | None:
        """Process ID of the child, for monitoring."""
        return self._engine.pid

    def activity(self) -> Activity | None:
        """Return what llama.cpp's server has done so far; None: there is none."""
        if self.pid is None:
            return None
        try:
            servers = psutil.Process(self.pid).children()
        except psutil.Error:
            return None
        return activity_of(servers[0].pid) if servers else None

    @property
    def models(self) -> Sequence[ServedModel]:
        return self._engine.models

    async def start(self) -> None:
        """Load the model: the layers go to their shards.

        Raises ConfigError if the file cannot be loaded, and Unavailable if a shard was
        lost meanwhile.
        """
        try:
            await self._engine.start()
        except ConfigError as error:
            if (reason := await self._reason_soon()) is not None:
                raise Unavailable(reason) from error
            raise

    async def refresh(self) -> None:
        if self._ended:
            raise Unavailable(self._ended)
        await self._engine.refresh()

    async def run(
        self, work: works.Inference, continues: str = "", thoughts: str = ""
    ) -> AsyncGenerator[Item, None]:
        if self._ended:
            raise Unavailable(self._ended)
        try:
            async with aclosing(self._engine.run(work, continues, thoughts)) as items:
                async for item in items:
                    yield item
        except Unavailable as error:
            if self._process is None or self._process.child.exit_reason is None:
                raise
            reason = await self._reason_soon() or str(error)
            raise Unavailable(reason) from error

    async def close(self) -> None:
        self._ended = self._ended or CLOSED
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        await self._engine.close()
        await self._links.close()

    async def _spawn(self) -> LlamaProcess:
        """Start the server, once."""
        if self._process is not None or self._ended:
            raise Unavailable(self._ended or CLOSED)
        split = msgspec.json.encode(self._split).decode()
        self._process = await LlamaProcess.spawn(("-m", CHILD, split))
        # Ends with the process; cancelled in close().
        self._watching = asyncio.create_task(self._watch(self._process))
        return self._process

    async def _watch(self, process: LlamaProcess) -> None:
        """End all when the server or a shard does."""
        await asyncio.wait(
            {process.child.exited, self._links.lost},
            return_when=asyncio.FIRST_COMPLETED,
        )
        self._ended = await self._reason_soon() or process.child.exit_reason or CLOSED
        if not self.lost.done():
            self.lost.set_result(self._ended)
        await process.close()
        await self._links.close()

    async def _reason_soon(self) -> str | None:
        """Wait shortly for the loss of a shard, which ends the server; return why."""
        await asyncio.wait({self._links.lost}, timeout=REASON_WITHIN)
        return self._links.lost.result() if self._links.lost.done() else None
