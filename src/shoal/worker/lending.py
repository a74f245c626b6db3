"""Lends memory of this machine to models that other machines of the pool run.

A *shard* is a part of such a model: a process, with a port that only the machine which
runs the model is admitted to.  It holds its memory until the coordinator says that it
is no longer needed, the owner pauses the worker, or no machine has used it for long.
"""

import asyncio
import hashlib
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from msgspec.structs import replace

from shoal.domain.errors import JobError, ShoalError
from shoal.domain.work import ModelOrder
from shoal.domain.worker import LentShard, MeasuredLink, MemoryLoan
from shoal.engines.shards.shard_caches import trim_caches
from shoal.pool.models.machine import shown_size
from shoal.transports.relayed_sockets import OpenRelay
from shoal.worker.owner_throttle import OwnerThrottle
from shoal.worker.shard_port import LentProcess, ShardPort

UNUSED_MAX = 120.0  # seconds that a shard waits for the machine that runs the model
FAILURES_MAX = 3  # lost shards until this machine lends no more for a while
FAILURE_PAUSE = 600.0  # seconds
FOLDER_LENGTH = 32  # characters of the name of a model's folder
UNFIT = "this machine lends nothing now: {}"
OWN, COPIED = "own", "copied"  # folders in it: what its process writes, and what not

StartShard = Callable[[Path, Path | None, int], Awaitable[LentProcess]]
"""Starts a process for a shard, with a folder of its own and memory in bytes.

The second folder is the cache from which it only reads; None: it has its own one.
Raises ShoalError.
"""

OnCopied = Callable[[int, int | None], None]
"""Receives the bytes that have arrived, and all of them, if known; in any thread."""

CopyLayers = Callable[[ModelOrder, Path, OnCopied], Coroutine[None, None, Path]]
"""Copies the layers of an order from other machines; returns the cache they are in.

That is in the folder given.  Raises ShoalError.
"""


@dataclass(slots=True, eq=False)
class _HeldShard:
    """A part of a model that this machine holds.

    ``changed`` is set when the machine that runs the model connects or leaves.
    ``watching`` ends with the shard, and so does ``ending``, once its memory is free.
    """

    order: ModelOrder
    port: ShardPort
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    watching: "asyncio.Task[None] | None" = None
    ending: "asyncio.Task[None] | None" = None

    @property
    def lent(self) -> LentShard:
        port = self.port
        where = port.hosts, port.port, port.fingerprint
        return LentShard(self.order, *where, used=port.is_used)


class Lender:
    """The shards of this machine.

    Args:
        terms: what the owner lends, and to whom, without any shards.
        start: starts the process of a shard.
        folder: for the caches of shards, one for each model.
        host: the address to listen at; empty: all of the machine's.
        throttle: while it is paused, nothing is lent.
        report: receives what happens to a shard, by model, for the owner.
        relay: leads to machines that cannot reach this one; None: there is none.
        links: those to machines with which this one runs models, by machine.
        copy: copies layers from others than the machine that runs a model; None: that
            sends them all.
    """

    def __init__(
        self,
        terms: MemoryLoan,
        start: StartShard,
        folder: Path,
        host: str,
        throttle: OwnerThrottle,
        report: Callable[[str, str], None],
        relay: OpenRelay | None = None,
        links: Mapping[str, MeasuredLink] = MappingProxyType({}),
        copy: CopyLayers | None = None,
    ) -> None:
        self._terms = terms
        self._start = start
        self._folder = folder
        self._host = host
        self._throttle = throttle
        self._report = report
        self._relay = relay
        self._links = links
        self._copy = copy
        self._copying: set[asyncio.Task[Path]] = set()
        self._shards: dict[str, _HeldShard] = {}  # by group
        self._starting: dict[str, ModelOrder] = {}  # by group
        self._failures = 0
        self._forgiving: asyncio.TimerHandle | None = None
        self.on_change: Callable[[], None] = _ignore
        throttle.listen(self._on_throttle)

    @property
    def loan(self) -> MemoryLoan:
        """What is lent now, with the shards."""
        memory, unfit = self._terms.memory, self._unfit if self._terms.memory else ""
        if unfit:
            memory = sum(each.order.own_memory for each in self._shards.values())
        shards = tuple(each.lent for each in self._shards.values())
        return replace(
            self._terms,
            memory=memory,
            shards=shards,
            unfit=unfit,
            links=tuple(self._links.values()),
        )

    async def lend(
        self, order: ModelOrder, on_copied: OnCopied = lambda copied, whole: None
    ) -> None:
        """Hold a part of a model, from now on; ``on_copied`` is as in ``CopyLayers``.

        Raises JobError if the owner does not lend as much, or not to that machine.
        """
        if order.group in self._shards:
            return
        if why := self._refusal(order):
            raise JobError(why)
        self._starting[order.group] = order
        try:
            port = await self._open(order, on_copied)
        except JobError:  # the owner needs the machine, and no part was lost
            raise
        except ShoalError as error:
            self._report(order.name, f"no part of it can be held: {error}")
            self._count_failure()
            raise JobError(f"no part of {order.name} can be held: {error}") from error
        finally:
            del self._starting[order.group]
        shard = self._shards[order.group] = _HeldShard(order, port)
        port.on_use = shard.changed.set
        shard.watching = asyncio.create_task(self._watch(shard))
        if why := self._throttle.why_paused:  # meanwhile
            await self._end(shard, why)
            raise JobError(UNFIT.format(why))
        size = shown_size(order.own_memory)
        self._report(order.name, f"lends {size} to the machine that runs it")
        self.on_change()

    async def _open(self, order: ModelOrder, on_copied: OnCopied) -> ShardPort:
        """Start the process of a part, and open its port.  Raises ShoalError."""
        orders = (*self._starting.values(), *(x.order for x in self._shards.values()))
        used = {self._folder_of(each) for each in orders}
        await asyncio.to_thread(trim_caches, self._folder, self._terms.memory, used)
        folder, cache = self._folder_of(order), None
        if order.has_copies and self._copy is not None:
            cache = await self._copied(order, folder / COPIED, self._copy, on_copied)
        if cache is not None:  # the same layers, which it was sent
            await asyncio.to_thread(shutil.rmtree, folder / OWN, ignore_errors=True)
        process = await self._start(folder / OWN, cache, order.own_memory)
        try:
            return await ShardPort.open(
                *(self._host, order.group, order.runner, process),
                relay=self._relay,
                relay_id=order.machine,
            )
        except BaseException:  # also if the order is cancelled
            await process.close()
            raise

    def _folder_of(self, order: ModelOrder) -> Path:
        name = hashlib.sha256(order.name.encode(errors="surrogatepass")).hexdigest()
        return self._folder / name[:FOLDER_LENGTH]

    async def _copied(
        self,
        order: ModelOrder,
        folder: Path,
        copy: CopyLayers,
        on_copied: OnCopied,
    ) -> Path | None:
        """Copy the layers of a part; return their cache, or None if none has them all.

        Raises JobError if the owner needs the machine meanwhile.
        """
        self._report(order.name, "copies its layers from other machines")
        copying = asyncio.create_task(copy(order, folder, on_copied))
        self._copying.add(copying)
        try:
            return await copying
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise JobError(UNFIT.format(self._unfit)) from None
        except ShoalError as error:
            why = f"the machine that runs it sends its layers, since {error}"
            self._report(order.name, why)
            return None
        finally:
            self._copying.discard(copying)

    async def free(self, order: ModelOrder) -> None:
        """Hold a part of a model no longer."""
        if (shard := self._shards.get(order.group)) is not None:
            await self._end(shard, "freed on order")

    async def close(self) -> None:
        """Free all shards."""
        if self._forgiving is not None:
            self._forgiving.cancel()
        for each in [*self._shards.values()]:
            await self._end(each, "this worker stops")

    def _refusal(self, order: ModelOrder) -> str:
        """Return why a part of a model is not held; empty: it may be."""
        terms, need = self._terms, order.own_memory
        if not terms.memory:
            return "this machine lends no memory: its owner has to say --lend-memory"
        if terms.runners and order.runner not in terms.runners:
            return (
                f"this machine lends no memory to the key {order.runner!a:.80}: its "
                "owner named others with --lend-for"
            )
        if why := self._unfit:
            return UNFIT.format(why)
        if order.group in self._starting:
            return f"this machine is starting its part of {order.name} already"
        starting = sum(each.own_memory for each in self._starting.values())
        free = self.loan.free - starting
        if not 0 < need <= free:
            return (
                f"a part of {shown_size(need)} does not fit into the "
                f"{shown_size(free)} that this machine still lends"
            )
        return ""

    async def _watch(self, shard: _HeldShard) -> None:
        """Free a shard when its process has ended, or no machine has used it."""
        port = shard.port
        while not port.lost.done():
            changed = asyncio.ensure_future(shard.changed.wait())
            await asyncio.wait(
                (changed, port.lost),
                timeout=None if port.is_used else UNUSED_MAX,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not (changed.done() or port.lost.done()):
                changed.cancel()
                await self._end(shard, f"unused for {UNUSED_MAX:.0f} s")
                return
            changed.cancel()
            shard.changed.clear()
            self.on_change()
        self._count_failure()
        await self._end(shard, port.lost.result())

    async def _end(self, shard: _HeldShard, reason: str) -> None:
        """Free a shard, even if the caller is cancelled."""
        await asyncio.shield(self._begin_end(shard, reason))

    def _begin_end(self, shard: _HeldShard, reason: str) -> "asyncio.Task[None]":
        if shard.ending is None:
            shard.ending = asyncio.create_task(self._close(shard, reason))
        return shard.ending

    async def _close(self, shard: _HeldShard, reason: str) -> None:
        if shard.watching is not None:
            shard.watching.cancel()
        await shard.port.close()
        del self._shards[shard.order.group]
        self._report(shard.order.name, f"lends no more memory to it: {reason}")
        self.on_change()

    def _on_throttle(self) -> None:
        """Free all shards while the owner needs the machine."""
        if why := self._throttle.why_paused:
            for copying in self._copying:
                copying.cancel()
            for shard in self._shards.values():
                self._begin_end(shard, why)

    def _count_failure(self) -> None:
        self._failures += 1
        if self._failures == FAILURES_MAX:
            self.on_change()
            loop = asyncio.get_running_loop()
            self._forgiving = loop.call_later(FAILURE_PAUSE, self._forgive)

    def _forgive(self) -> None:
        """Lend again."""
        self._failures = 0
        self.on_change()

    @property
    def _unfit(self) -> str:
        """Why nothing is lent for now; empty: it is."""
        if self._throttle.paused:
            return self._throttle.why_paused
        if self._failures < FAILURES_MAX:
            return ""
        return f"{FAILURES_MAX} parts were lost here, so it rests for ten minutes"


def _ignore() -> None:
    """Report no change: no coordinator is connected yet."""
