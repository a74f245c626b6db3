"""Carries out a coordinator's orders to load and unload models of this machine.

The coordinator knows what is waited for; this machine knows what it has, and how much
memory its owner lends.  Several orders for one model wait for the same load, which ends
if the last of them is cancelled; what is loaded stays.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from msgspec.structs import replace

from shoal.domain.errors import ConfigError, JobError, NotFound, ShoalError, Unavailable
from shoal.domain.work import ModelAction, ModelOrder, Work
from shoal.domain.worker import LoadableModel, ModelLibrary, Offer
from shoal.engines.engine import Activity, Finished, Progress
from shoal.pool.models.machine import shown_size
from shoal.worker.agent import WorkerEvent
from shoal.worker.jobs import AWAY, EngineSlots, ModelBackend
from shoal.worker.lending import Lender
from shoal.worker.model_offers import CHECK_INTERVAL, OfferedEngine
from shoal.worker.server_orders import (
    LEAVING,
    PROGRESS_INTERVAL,
    UNLOADED,
    ControlledServer,
    ServerOrders,
)

ORDERS = 2  # at a time
COPY_SHARE = 0.9  # of a load, if the model is copied first
SHOWN_STEP = 0.1  # of a load, between lines for the owner
SLOTS_MAX = 1024  # of a model
CONTEXT_MAX = 2**31 - 1  # tokens
NO_GROUPS = "this machine runs no models together with others"

FetchModel: TypeAlias = Callable[
    [ModelOrder, Callable[[int, int | None], None]], Awaitable[None]
]
"""Copies the model of an order from elsewhere to where a scan finds it.

Calls what it is given with the bytes that have arrived, and all of them, if known.
Raises ShoalError.
"""


OpenGroup: TypeAlias = Callable[
    [LoadableModel, ModelOrder], Awaitable["LoadableEngine"]
]


@dataclass(frozen=True, slots=True)
class LoadableEngine:
    """An engine of its own for a model, which is not loaded yet.

    ``activity`` returns what its process has done so far; None: there is none.
    ``lost`` is done, with the reason, when an engine that runs on several machines has
    ended for good; None: it starts again by itself.
    """

    offered: OfferedEngine
    activity: Callable[[], Activity | None]
    lost: "asyncio.Future[str] | None" = None


@dataclass(slots=True, eq=False)
class _HeldModel:
    """A model that is loaded, or is being loaded or unloaded.

    ``memory`` is what it needs; 0: that is not known yet.  ``copied`` are the bytes
    that another machine has sent of it, and ``whole`` all; 0: unknown.  ``reports`` is
    how often it was said that the copy goes on.  ``group`` is the order to run it
    together with others; None: it runs here alone.  ``loading`` is
    None once it is loaded; ``orders`` wait for that, or it is ``unattended``.  ``gone``
    is set when its memory is free again.
    """

    memory: int
    copied: int = 0
    whole: int = 0
    reports: int = 0
    engine: LoadableEngine | None = None
    group: ModelOrder | None = None
    loading: asyncio.Task[None] | None = None
    orders: int = 0
    unattended: bool = False
    ending: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def activity(self) -> Activity | None:
        """Return what has been done for it so far; None: nothing is being done."""
        if self.engine is not None:
            return self.engine.activity()
        return Activity(0.0, self.reports, 0) if self.reports else None

    def on_copied(self, copied: int, whole: int | None) -> None:
        """Note how much of it another machine has sent."""
        self.copied, self.whole = copied, whole or 0
        self.reports += 1

    def reached(self, now: Activity) -> tuple[float, str]:
        """Return the share of a load that is done, 0 if it is unknown, and a remark."""
        begun = COPY_SHARE if self.copied else 0.0
        if self.engine is None:
            if not (self.copied or self.whole):
                return 0.0, "another machine hashes it, to send it"
            of = f" of {shown_size(self.whole)}" if self.whole else ""
            share = begun * self.copied / self.whole if self.whole else 0.0
            return share, f"{shown_size(self.copied)}{of} copied"
        loaded = min(0.99, now.memory / self.memory) if self.memory else 0.0
        return begun + (1.0 - begun) * loaded, f"{shown_size(now.memory)} in memory"


class ModelOrders:
    """Loads and unloads the models of a library.

    Args:
        library: returns the models that can be loaded, as of the last ``scan``, and the
            limits.
        scan: looks for models again.
        describe: returns the offer of a library.
        open_engine: returns an engine for a model, with a context in tokens for each of
            a number of slots.  Raises ConfigError.
        report: receives the events of a model, for the owner: loading, and failed.
        slots: those of orders.
        fetch: copies a model from elsewhere; None: only what is here is loaded.
        servers: load models of their own.
        lender: holds parts of models for other machines; None: this one runs no model
            together with others.
        open_group: returns an engine for a model that several machines run, by the
            order.  Raises ShoalError.
        free: returns the bytes that models may take now, besides those that are
            loaded, of whose memory so much is mapped from files; 0: unknown.  None:
            only the library's limit counts.
    """

    def __init__(
        self,
        library: Callable[[], ModelLibrary],
        scan: Callable[[], Awaitable[None]],
        describe: Callable[[ModelLibrary], Offer],
        open_engine: Callable[[LoadableModel, int, int], Awaitable[LoadableEngine]],
        report: Callable[[str, WorkerEvent], None],
        slots: EngineSlots,
        fetch: FetchModel | None = None,
        servers: Sequence[ControlledServer] = (),
        lender: Lender | None = None,
        open_group: OpenGroup | None = None,
        free: Callable[[int], int] | None = None,
    ) -> None:
        self.backend = ModelBackend(self, slots)
        self._library = library
        self._scan = scan
        self._describe = describe
        self._open_engine = open_engine
        self._report = report
        self._fetch = fetch
        self._servers = ServerOrders(servers, report)
        self._lender = lender
        self._open_group = open_group
        self._free = free
        self._losing: set[asyncio.Task[None]] = set()
        self._held: dict[str, _HeldModel] = {}
        self._leaving = False
        self._add: Callable[[OfferedEngine], None] = _unbound
        self._remove: Callable[[OfferedEngine, str], None] = _unbound
        self._serves: Callable[[str], bool] = lambda name: False

    def bind(
        self,
        add: Callable[[OfferedEngine], None],
        remove: Callable[[OfferedEngine, str], None],
        serves: Callable[[str], bool],
        synchronize: Callable[[str], None],
    ) -> None:
        """Set how engines are offered, and withdrawn for a reason.

        ``serves`` says whether an engine offers a model of some name; ``synchronize``
        offers what the engines have now, for a reason if it is less.
        """
        self._servers.synchronize = synchronize
        self._add, self._remove, self._serves = add, remove, serves

    @property
    def offer(self) -> Offer | None:
        """The offer of the library; None: nothing can be loaded now."""
        library = self._library()
        if self._lender is not None:
            held = (each.group for each in self._held.values() if not each.ending)
            groups = tuple(each for each in held if each is not None)
            loan = replace(self._lender.loan, groups=groups)
            library = replace(library, loan=loan)
        lends = library.loan is not None and library.loan.lends
        if not (library.models or library.fetches or lends):
            return None
        return self._describe(library)

    async def watch(self, on_change: Callable[[], None]) -> None:
        """Look for models again and again, until cancelled."""
        if self._lender is not None:
            self._lender.on_change = on_change
        while True:
            before = self._library()
            await asyncio.sleep(CHECK_INTERVAL)
            await self._scan()
            if self._library() != before:
                on_change()

    @property
    def memory(self) -> int:
        """The bytes that the held models need, and those that servers have loaded."""
        held = sum(each.memory for each in self._held.values())
        return held + self._servers.memory

    def hold(self, name: str, engine: LoadableEngine, memory: int) -> None:
        """Count a model that is offered from the start."""
        self._held[name] = _HeldModel(memory, engine=engine)

    def leave(self) -> None:
        """Stop what is being loaded, and accept no more orders."""
        self._leaving = True
        self._servers.leave()
        for each in self._held.values():
            if each.loading is not None:
                each.loading.cancel()

    async def close(self) -> None:
        """Stop what is being loaded, and close all engines."""
        self.leave()
        held = [*self._held.values()]
        loading = [each.loading for each in held if each.loading is not None]
        await self._servers.close()
        await asyncio.gather(*loading, return_exceptions=True)
        for each in held:
            if each.engine is not None:
                await each.engine.offered.monitor.engine.close()
        self._held.clear()
        if self._lender is not None:
            await self._lender.close()

    async def run(
        self, work: Work, continues: str = "", thoughts: str = ""
    ) -> AsyncGenerator[Progress | Finished, None]:
        """Carry out an order, as ``WorkRunner`` runs work.

        Raises Unavailable if the machine stops, and JobError if it cannot do it.
        """
        if not isinstance(work, ModelOrder):
            raise NotFound("this is for orders about models")
        if self._leaving:
            raise Unavailable(LEAVING)
        async with aclosing(self._carried_out(work)) as steps:
            async for step in steps:
                yield step
        yield Finished()

    def _carried_out(self, work: ModelOrder) -> AsyncGenerator[Progress, None]:
        """Load, lend or unload.  Raises JobError if there is no memory for it."""
        loads = work.action is ModelAction.LOAD
        if work.group and not loads:
            return self._lend(work)
        server = self._servers.find(work.name)
        if server is None or work.group or work.name in self._held:
            return (self._load if loads else self._unload)(work)
        if not loads:
            return self._servers.unload(server, work)
        if not self._servers.has(work.name):
            need = server.control.need(work.name)
            self._check_memory(work.name, need, "")
        return self._servers.load(server, work)

    async def _lend(self, order: ModelOrder) -> AsyncGenerator[Progress, None]:
        """Hold a part of a model for another machine, or hold it no longer."""
        if self._lender is None:
            raise JobError(NO_GROUPS)
        if order.action is not ModelAction.LEND:
            await self._lender.free(order)
            return
        part = _HeldModel(order.own_memory)
        lending = asyncio.create_task(self._lender.lend(order, part.on_copied))
        try:
            async for step in self._until(lending, part, order.name):
                yield step
            await lending
        finally:
            lending.cancel()
            await asyncio.wait((lending,))

    async def _load(self, order: ModelOrder) -> AsyncGenerator[Progress, None]:
        name = order.name
        held = await self._settled(name)
        if held is None:
            if self._serves(name):
                return
            held = self._begin(order)
        if held.loading is None:  # it is loaded, or will be from the start
            async for step in self._until_started(held):
                yield step
            return
        loading = held.loading
        held.orders += 1
        try:
            async for step in self._until(loading, held, name):
                yield step
            if loading.cancelled():
                raise Unavailable(LEAVING if self._leaving else UNLOADED)
            error = loading.exception()
            if isinstance(error, ShoalError):
                raise JobError(str(error)) from error
            if error is not None:
                raise error
        except asyncio.CancelledError as cancelled:
            # A coordinator that is away may order it again: the load goes on.
            held.unattended = cancelled.args == (AWAY,)
            raise
        finally:
            held.orders -= 1
            if not (held.orders or held.unattended or loading.done()):
                held.ending = True
                loading.cancel()

    async def _settled(self, name: str) -> _HeldModel | None:
        """Return a held model, if any, once it is neither ending nor just loaded."""
        while (held := self._held.get(name)) is not None:
            if held.ending:
                await held.gone.wait()
            elif held.loading is not None and held.loading.done():
                await asyncio.sleep(0)  # until ``_on_opened``
            else:
                break
        return held

    def _begin(self, order: ModelOrder) -> _HeldModel:
        """Begin to load a model.  Raises JobError if there is none, or no memory."""
        held = _HeldModel(0, group=order if order.group else None)
        open_engine: Callable[[], Awaitable[LoadableEngine]]
        if order.group:
            open_engine = self._grouped(order, held)
        elif (model := self._library().find(order.name)) is not None:
            settings = self._settings(order, model, held)
            open_engine = partial(self._open_engine, model, *settings)
        elif self._fetch is not None:
            open_engine = partial(self._copied, order, held, self._fetch)
        else:
            raise JobError(_no_model(order))
        self._held[order.name] = held
        self._report(order.name, WorkerEvent("loading", "on order"))
        loading = asyncio.create_task(self._open(open_engine, held))
        loading.add_done_callback(partial(self._on_opened, order.name, held))
        held.loading = loading
        return held

    def _grouped(
        self, order: ModelOrder, held: _HeldModel
    ) -> Callable[[], Awaitable[LoadableEngine]]:
        """Take the memory for the own part of a model; return what opens its engine.

        Raises JobError.
        """
        model = self._library().find(order.name)
        if self._open_group is None or model is None:
            raise JobError(NO_GROUPS if model else _no_model(order))
        self._check_memory(f"this part of {order.name}", order.own_memory, "")
        held.memory = order.own_memory
        return partial(self._open_group, model, order)

    def _settings(
        self, order: ModelOrder, model: LoadableModel, held: _HeldModel
    ) -> tuple[int, int]:
        """Take the memory for a model; return its context and slots.

        Raises JobError if there is too little.
        """
        library = self._library()
        context = min(
            order.context if order.context > 0 else library.context, CONTEXT_MAX
        )
        if model.context:
            context = min(context, model.context)
        slots = min(order.slots if order.slots > 0 else library.slots, SLOTS_MAX)
        need = model.memory(context, slots)
        self._check_memory(
            model.name, need, f" (for {slots} slots of {context} tokens)"
        )
        held.memory = need
        return context, slots

    def _check_memory(self, name: str, need: int, what: str) -> None:
        """Raise JobError if a model needs more than is left; ``what`` it is for."""
        limit = self._library().memory
        if limit and self.memory + need > limit:
            lent, taken = shown_size(limit), shown_size(self.memory)
            raise JobError(
                f"{name} needs {shown_size(need)} of memory{what}, and of the {lent} "
                f"that this machine lends to models, {taken} are taken; unload "
                "another, or raise --memory there"
            )
        if self._free is None:
            return
        mapped = coming = 0  # of those that are being loaded, most is still free
        for each in self._held.values():
            done = Activity(0.0, 0, 0) if each.engine is None else each.activity()
            if done is not None:
                mapped += done.mapped
                coming += max(0, each.memory - done.memory) if each.loading else 0
        free = self._free(mapped)
        if free and need + coming > free:
            left = shown_size(max(0, free - coming))
            raise JobError(
                f"{name} needs {shown_size(need)} of memory{what}, and only {left} of "
                "this machine's are free now, less a tenth: end other programs there, "
                "or set --memory"
            )

    async def _copied(
        self, order: ModelOrder, held: _HeldModel, fetch: FetchModel
    ) -> LoadableEngine:
        """Copy a model from elsewhere; return an engine for it."""
        await fetch(order, held.on_copied)
        await self._scan()
        if (model := self._library().find(order.name)) is None:
            raise ConfigError(f"{order.name} was copied, and has no GGUF file")
        settings = self._settings(order, model, held)
        return await self._open_engine(model, *settings)

    async def _open(
        self, open_engine: Callable[[], Awaitable[LoadableEngine]], held: _HeldModel
    ) -> None:
        """Load a model and offer it.  Raises ShoalError."""
        held.engine = await open_engine()
        try:
            await held.engine.offered.monitor.load()
        except BaseException:
            held.ending = True
            await held.engine.offered.monitor.engine.close()
            raise
        if held.engine.lost is not None:
            held.engine.lost.add_done_callback(partial(self._on_lost, held))
        self._add(held.engine.offered)

    def _on_lost(self, held: _HeldModel, lost: "asyncio.Future[str]") -> None:
        """Withdraw a model whose engine has ended for good."""
        if not held.ending and not lost.cancelled():
            held.ending = True
            self._losing.add(
                task := asyncio.create_task(self._lose(held, lost.result()))
            )
            task.add_done_callback(self._losing.discard)

    async def _lose(self, held: _HeldModel, reason: str) -> None:
        assert held.engine is not None, "it was loaded"
        assert held.group is not None, "others start again"
        self._remove(held.engine.offered, reason)
        try:
            await held.engine.offered.monitor.engine.close()
        finally:
            self._forget(held.group.name, held)
            self._report(held.group.name, WorkerEvent("failed", reason))

    def _on_opened(
        self, name: str, held: _HeldModel, loading: "asyncio.Task[None]"
    ) -> None:
        """Forget a model that could not be loaded, or whose load was stopped."""
        held.loading = None
        if loading.cancelled() or loading.exception() is not None:
            reason = "stopped" if loading.cancelled() else str(loading.exception())
            self._forget(name, held)
            self._report(name, WorkerEvent("failed", reason))

    async def _unload(self, order: ModelOrder) -> AsyncGenerator[Progress, None]:
        name = order.name
        held = await self._settled(name)
        if held is None:
            if self._serves(name):
                raise JobError(f"{name} stays loaded: its owner or its server decides")
            return
        if held.loading is not None:
            held.ending = True
            held.loading.cancel()
            await held.gone.wait()
            return
        async for step in self._until_started(held):
            yield step
        assert held.engine is not None, "it is loaded"
        engine = held.engine.offered
        held.ending = True
        self._remove(engine, UNLOADED)
        idle = asyncio.create_task(engine.slots.wait_idle())
        try:
            # Its jobs may take minutes.
            async for step in self._until(idle, held, ""):
                yield step
        except BaseException:
            held.ending = False
            self._add(engine)
            raise
        finally:
            idle.cancel()
        try:
            await engine.monitor.engine.close()
        finally:
            self._forget(name, held)

    def _forget(self, name: str, held: _HeldModel) -> None:
        held.ending = True
        if self._held.get(name) is held:
            del self._held[name]
        held.gone.set()

    async def _until_started(self, held: _HeldModel) -> AsyncGenerator[Progress, None]:
        """Wait for a model that is offered from the start."""
        assert held.engine is not None, "it is loaded, or will be"
        if held.engine.offered.monitor.started.is_set():
            return
        started = asyncio.create_task(held.engine.offered.monitor.started.wait())
        try:
            async for step in self._until(started, held, ""):
                yield step
        finally:
            started.cancel()

    async def _until(
        self, task: "asyncio.Task[object]", held: _HeldModel, shown: str
    ) -> AsyncGenerator[Progress, None]:
        """Report progress until a task has ended, as long as its process does anything.

        Silence says that nothing moves.  ``shown`` is the name of the model whose
        progress the owner sees; empty: none.
        """
        last, reached, printed = held.activity(), 0.0, 0.0
        while not task.done():
            await asyncio.wait((task,), timeout=PROGRESS_INTERVAL)
            now = held.activity()
            if task.done() or now is None:
                continue
            if last is None or now.has_moved_since(last):
                share, remark = held.reached(now)
                reached = max(reached, share)
                yield Progress(reached or None, remark)
                if shown and reached - printed >= SHOWN_STEP:
                    printed = reached
                    self._report(
                        shown, WorkerEvent("loading", f"on order: {reached:.0%}")
                    )
            last = now


def _no_model(order: ModelOrder) -> str:
    return f"this machine has no model {order.name!a:.256} to load"


def _unbound(*args: object) -> None:
    raise AssertionError("orders come once offers are made")
