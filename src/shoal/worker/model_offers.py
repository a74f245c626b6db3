"""Keeps the offered models in step with the engines' models.

On a wire that carries many models, one agent offers all of them (``JointOffers``);
elsewhere each model has an agent of its own (``SeparateOffers``).  An engine is loaded
once the coordinator has admitted the worker: a wrong token costs no minutes.  A monitor
says whether an engine is loaded, or why it is unavailable.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from shoal.domain.errors import Unavailable
from shoal.domain.work import ANY_MODEL, JobKind, ModelOrder, Task, Work
from shoal.domain.worker import Offer, ServedModel
from shoal.engines.engine import Engine
from shoal.engines.text_tasks import TaskRunner
from shoal.worker.agent import ADMISSION_DELAY, STOPPED, Agent, WorkerEvent
from shoal.worker.jobs import EngineSlots, FindModel, ModelBackend
from shoal.worker.listening_worker import ListeningWorker
from shoal.worker.owner_throttle import OwnerThrottle

AGENTS_MAX = 64  # offered models of one engine; each has a connection

NOT_OFFERED = "the engine no longer lists it"
CHANGED = "its description changed"
T = TypeVar("T")
CHECK_INTERVAL = 10.0  # seconds between checks
CHECK_SOON = 1.0  # seconds until a requested check
CHECK_TIMEOUT = 10.0  # seconds for the engine to answer
TIMEOUTS_MAX = 2  # consecutive checks that a busy engine may leave unanswered


@dataclass(slots=True, eq=False)
class EngineMonitor:
    """Checks one engine periodically, and after it refused a job.

    Args:
        engine: started, unless ``load`` is given; the caller closes it.
        report: receives the events unavailable and available.
        load: starts the engine, which takes long; None: it is started.
    """

    engine: Engine
    _report: Callable[[WorkerEvent], None]
    _load: Callable[[], Awaitable[None]] | None = None
    unavailable_reason: str | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)
    _check_requested: asyncio.Event = field(default_factory=asyncio.Event)
    _timeouts: int = 0  # consecutive checks without an answer

    def __post_init__(self) -> None:
        if self._load is None:
            self.started.set()

    @property
    def models(self) -> Sequence[ServedModel]:
        """The engine's models; none until it is loaded, and while it is unavailable."""
        if self._load is not None or self.unavailable_reason is not None:
            return ()
        return self.engine.models

    @property
    def expected_models(self) -> Sequence[ServedModel]:
        """The models that the engine has once it is loaded; none afterwards."""
        return () if self._load is None else self.engine.models

    async def load(self) -> None:
        """Start the engine, unless it is started.  Raises ConfigError if it fails."""
        if self._load is not None:
            await self._load()
            self._load = None
            self.started.set()

    def request_check(self) -> None:
        """Request a check soon."""
        self._check_requested.set()

    async def wait(self, leaving: asyncio.Event) -> None:
        """Wait until the next check, or a requested one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_INTERVAL - CHECK_SOON):
                await self._check_requested.wait()
        # A busy engine may refuse many jobs meanwhile: one check is enough.
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_SOON):
                await leaving.wait()

    async def check(self) -> None:
        """Refresh the engine's models, within ``CHECK_TIMEOUT``."""
        self._check_requested.clear()
        try:
            async with asyncio.timeout(CHECK_TIMEOUT):
                await self.engine.refresh()
        except TimeoutError:
            self._timeouts += 1
            if self._timeouts >= TIMEOUTS_MAX:
                self._mark_unavailable(f"no answer within {CHECK_TIMEOUT:g} s")
        except Unavailable as error:
            self._mark_unavailable(str(error))
        else:
            self._timeouts = 0
            if self.unavailable_reason is not None:
                self.unavailable_reason = None
                self._report(WorkerEvent("available"))

    def _mark_unavailable(self, reason: str) -> None:
        if self.unavailable_reason is None:
            self.unavailable_reason = f"the engine is unavailable: {reason}"
            self._report(WorkerEvent("unavailable", reason))


@dataclass(slots=True)
class ModelMembership:
    """The agent of one model."""

    model: ServedModel
    agent: Agent
    task: asyncio.Task[str]
    slots: int  # that it offers
    leaving: bool = False

    def leave(self, reason: str) -> None:
        self.leaving = True
        self.agent.leave(reason)


@dataclass(slots=True, eq=False)
class SeparateOffers:
    """Offers one engine's models to one coordinator, each by an agent of its own.

    The offers follow the engine's list of models, and are withdrawn while the engine
    does not answer.

    Args:
        choose: selects the models to offer, and their names.
        create_agent: creates the agent for a model, which offers the ``slots``.
        is_admitted: asks whether the coordinator admits a worker with a model, before
            that is loaded.
        throttle: the owner's; while the worker is paused, no model is offered, because
            these wires cannot say more.
    """

    _monitor: EngineMonitor
    _choose: Callable[[Sequence[ServedModel]], Sequence[ServedModel]]
    _create_agent: Callable[[ServedModel], Agent]
    _is_admitted: Callable[[ServedModel], Awaitable[bool]]
    _slots: EngineSlots
    _throttle: OwnerThrottle
    _members: dict[str, ModelMembership] = field(default_factory=dict)
    # Models that the coordinator refused for good.
    _refused: set[str] = field(default_factory=set)
    _leaving: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Offer models until ``leave`` or a final refusal.

        Raises ConfigError if a model cannot be loaded.
        """
        if not await until_stopped(self._leaving, self._load()):
            return
        with self._throttle.observed(self._monitor.request_check):
            async with asyncio.TaskGroup() as tasks:
                while self._synchronize(tasks):
                    await self._monitor.wait(self._leaving)
                    if not self._leaving.is_set():
                        await self._monitor.check()

    def leave(self) -> None:
        """Accept no more jobs, finish the running ones, and end ``run``."""
        self._leaving.set()
        self._monitor.request_check()
        for member in self._members.values():
            member.leave(STOPPED)

    async def _load(self) -> bool:
        """Load the engine; return False if the coordinator refuses its models."""
        for model in self._choose(self._monitor.expected_models):
            if not await self._is_admitted(model):
                return False
        await self._monitor.load()
        return True

    def _synchronize(self, tasks: asyncio.TaskGroup) -> bool:
        """Start and stop agents; return False once all models are refused."""
        self._remove_ended()
        if self._leaving.is_set():
            return False
        self._slots.resize(self._monitor.engine.slots)
        paused = self._throttle.paused
        unavailable = self._throttle.why_paused or self._monitor.unavailable_reason
        models = () if paused else self._choose(self._monitor.models)[:AGENTS_MAX]
        wanted = {each.name: each for each in models}
        slots = self._slots.size
        for name, member in self._members.items():
            if name not in wanted:
                member.leave(unavailable or NOT_OFFERED)
            elif (
                member.model != wanted[name] or member.slots != slots
            ) and member.agent.idle:
                # A profile cannot change: the model leaves and joins again.
                member.leave(CHANGED)
        for name in wanted.keys() - self._members.keys() - self._refused:
            agent = self._create_agent(wanted[name])
            task = tasks.create_task(agent.run())
            task.add_done_callback(lambda _: self._monitor.request_check())
            self._members[name] = ModelMembership(wanted[name], agent, task, slots)
        all_refused = self._refused and not self._members
        return not (all_refused and unavailable is None)

    def _remove_ended(self) -> None:
        for name, member in list(self._members.items()):
            if member.task.done():
                del self._members[name]
                if not member.leaving:
                    self._refused.add(name)


MODELS_MAX = 256  # offered models of all engines


@dataclass(frozen=True, slots=True, eq=False)
class OfferedEngine:
    """An engine, and the selection of its models."""

    monitor: EngineMonitor
    select: Callable[[Sequence[ServedModel]], Sequence[ServedModel]]
    slots: EngineSlots


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """An offered model, with its backends.

    If several engines have it, the offer is what all of them support.
    """

    model: ServedModel
    backends: tuple[ModelBackend, ...]

    @property
    def slots(self) -> int:
        """The number of concurrent jobs at full speed, without those of others."""
        return sum(backend.slots.total for backend in self.backends)

    @property
    def engine(self) -> str:
        """What the slots are of, as in ``Offer``; empty if several engines have it."""
        first, *others = self.backends
        return "" if others else first.slots.engine


class LibraryOrders(Protocol):
    """Loads and unloads the models of a library: see ``ModelOrders``."""

    backend: ModelBackend

    @property
    def offer(self) -> Offer | None:
        """The offer of the library; None: nothing can be loaded now."""

    def bind(
        self,
        add: Callable[[OfferedEngine], None],
        remove: Callable[[OfferedEngine, str], None],
        serves: Callable[[str], bool],
        synchronize: Callable[[str], None],
    ) -> None:
        """Set how engines are offered, withdrawn, and found by a model's name.

        ``synchronize`` offers what they have now, for a reason if it is less.
        """

    async def watch(self, on_change: Callable[[], None]) -> None:
        """Look for models again and again, until cancelled."""

    def leave(self) -> None:
        """Stop what is being loaded, and accept no more orders."""

    async def close(self) -> None:
        """Stop what is being loaded, and close all engines."""


class JointOffers:
    """Offers the models of engines by one agent, or to all coordinators that dial.

    The offers follow the engines' lists of models; those of an engine are withdrawn
    while it does not answer, and those that have to be loaded follow once the agent is
    admitted.

    Args:
        describe: returns the offer of a model with a number of slots.
        create_agent: creates the agent from a finder of models, the first offers, a
            receiver of events, and what it calls when it is admitted.
        on_event: receives the events of a model, or of None if nothing is offered.
        other_offers: are made beside those of models.
        report_others: receives the events of the other offers.
        orders: load and unload further models; None: those of the engines are all.
        slots: those of the engines, which the agent reports: follows what is added.
    """

    def __init__(
        self,
        engines: Sequence[OfferedEngine],
        describe: Callable[[ServedModel, int], Offer],
        create_agent: Callable[
            [
                FindModel,
                tuple[Offer, ...],
                Callable[[WorkerEvent], None],
                Callable[[], None],
            ],
            Agent | ListeningWorker,
        ],
        on_event: Callable[[OfferedModel | None, WorkerEvent], None],
        *,
        other_offers: tuple[Offer, ...] = (),
        report_others: Callable[[WorkerEvent], None] | None = None,
        orders: LibraryOrders | None = None,
        slots: list[EngineSlots] | None = None,
    ) -> None:
        self._engines = [*engines]
        self._orders = orders
        if orders is not None:
            orders.bind(
                self._add,
                self._remove,
                lambda name: name in self._offered,
                self._synchronize,
            )
        self._slots = [each.slots for each in engines] if slots is None else slots
        self._other_offers = other_offers
        self._report_others = report_others
        self._describe = describe
        self._on_event = on_event
        self._backends: dict[tuple[OfferedEngine, ServedModel], ModelBackend] = {}
        self._offered: Mapping[str, OfferedModel] = self._current_models()
        self._joined = False  # whether the agent has joined
        self._admitted = asyncio.Event()  # it was, once
        # Models to load: their joining is reported once they are.
        self._unreported = {name for each in engines for name in _expected(each)}
        self._leaving = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._polls: dict[OfferedEngine, asyncio.Task[None]] = {}
        self._agent = create_agent(
            self._find, self._offers(), self._report, self._admitted.set
        )

    async def run(self) -> None:
        """Offer models until ``leave`` or a final refusal.

        Raises ConfigError if a model cannot be loaded.
        """
        try:
            async with self._tasks as tasks:
                for engine in self._engines:
                    self._polls[engine] = tasks.create_task(self._poll(engine))
                background: list[asyncio.Task[None]] = []
                if self._orders is not None:
                    watch = self._orders.watch(self._send_offers)
                    background.append(tasks.create_task(watch))
                await self._agent.run()
                for each in (*self._polls.values(), *background):
                    each.cancel()
        finally:
            if self._orders is not None:
                await self._orders.close()

    def leave(self) -> None:
        """Accept no more jobs, finish the running ones, and end ``run``."""
        self._leaving.set()
        if self._orders is not None:
            self._orders.leave()
        self._agent.leave(STOPPED)

    def _add(self, engine: OfferedEngine) -> None:
        """Offer the models of another engine, which is started."""
        self._engines.append(engine)
        self._slots.append(engine.slots)
        self._polls[engine] = self._tasks.create_task(self._poll(engine))
        self._synchronize()

    def _remove(self, engine: OfferedEngine, reason: str) -> None:
        """Withdraw the models of an engine; the caller closes it."""
        self._engines.remove(engine)
        self._slots.remove(engine.slots)
        self._polls.pop(engine).cancel()
        self._synchronize(reason)

    async def _poll(self, engine: OfferedEngine) -> None:
        if expected := _expected(engine):
            await self._admitted.wait()
            await until_stopped(self._leaving, engine.monitor.load())
            self._synchronize()
            await self._report_loaded(expected)
        while not self._leaving.is_set():
            await engine.monitor.wait(self._leaving)
            if not self._leaving.is_set():
                await engine.monitor.check()
                self._synchronize()

    async def _report_loaded(self, loaded: frozenset[str]) -> None:
        """Report models that are offered since they were loaded.

        Not at once: the coordinator has to get the offer.  If the agent is disconnected
        by then, they are reported when it has joined again.
        """
        await asyncio.sleep(ADMISSION_DELAY)
        self._unreported -= loaded
        for name in loaded & self._offered.keys() if self._joined else ():
            self._on_event(self._offered[name], WorkerEvent("joined"))

    def _send_offers(self) -> None:
        self._agent.update_offers(self._offers())

    def _synchronize(self, reason: str = "") -> None:
        """Report added and removed models to the coordinator and the user.

        ``reason`` is why some were removed; empty: see their engine.
        """
        before, described = self._offered, _descriptions(self._offered)
        self._offered = self._current_models()
        if described == _descriptions(self._offered):
            return
        self._send_offers()
        if not self._joined:
            return
        for name in before.keys() - self._offered.keys() - self._unreported:
            why = reason or self._removal_reason(before[name])
            self._on_event(before[name], WorkerEvent("left", why))
        for name in self._offered.keys() - before.keys() - self._unreported:
            self._on_event(self._offered[name], WorkerEvent("joined"))

    def _removal_reason(self, offered: OfferedModel) -> str:
        for engine in self._engines:
            if (
                engine.slots is offered.backends[0].slots
                and engine.monitor.unavailable_reason
            ):
                return engine.monitor.unavailable_reason
        return NOT_OFFERED

    def _report(self, event: WorkerEvent) -> None:
        """Report an event of the agent for each offered model."""
        self._joined = event.kind == "joined"
        reported = [
            each for name, each in self._offered.items() if name not in self._unreported
        ]
        if self._report_others is not None:
            self._report_others(event)
            if not reported:
                return
        if not reported and self._unreported and event.kind in ("joined", "left"):
            return  # it has joined once a model is loaded
        for offered in reported or (None,):
            self._on_event(offered, event)

    def _offers(self) -> tuple[Offer, ...]:
        models = (
            replace(self._describe(offered.model, offered.slots), engine=offered.engine)
            for offered in self._offered.values()
        )
        library = None if self._orders is None else self._orders.offer
        others = (
            self._other_offers if library is None else (*self._other_offers, library)
        )
        return (*others, *models)

    def _current_models(self) -> Mapping[str, OfferedModel]:
        """Return the models of all engines by name, in the engines' order.

        Each has as many slots as its engine has now.
        """
        for engine in self._engines:
            engine.slots.resize(engine.monitor.engine.slots)
        served = [
            (engine, model)
            for engine in self._engines
            for model in engine.select(engine.monitor.models)
        ]
        self._backends = {
            each: self._backends.get(each) or _backend(*each) for each in served
        }
        found: dict[str, OfferedModel] = {}
        for (_, model), backend in self._backends.items():
            offered = found.get(model.name, OfferedModel(model, ()))
            # With other kinds of jobs, it is another model of the same name.
            if offered.model.kinds == model.kinds:
                common = _common(offered.model, model)
                found[model.name] = OfferedModel(common, (*offered.backends, backend))
        return dict(list(found.items())[:MODELS_MAX])

    def _find(self, work: Work) -> ModelBackend | None:
        """Return the backend with the most free slots; None if no model fits.

        The first one wins a tie.
        """
        if isinstance(work, ModelOrder):
            return None if self._orders is None else self._orders.backend
        if isinstance(work, Task) or work.model == ANY_MODEL:
            chatting = (each for each in self._offered.values() if _chats(each.model))
            backends = [backend for offered in chatting for backend in offered.backends]
        else:
            offered = self._offered.get(work.model)
            backends = [] if offered is None else list(offered.backends)
        if len(backends) == 1:
            return backends[0]
        return max(backends, key=lambda backend: backend.free_slots, default=None)


def _expected(engine: OfferedEngine) -> frozenset[str]:
    """Return the names of the models that an engine has once it is loaded."""
    models = engine.select(engine.monitor.expected_models)
    return frozenset(model.name for model in models)


def _backend(engine: OfferedEngine, model: ServedModel) -> ModelBackend:
    runner = TaskRunner(engine.monitor.engine, model)
    return ModelBackend(runner, engine.slots, engine.monitor.request_check)


def _common(one: ServedModel, other: ServedModel) -> ServedModel:
    """Return what both of two engines support for a model."""
    contexts = [each.context for each in (one, other) if each.context]
    features = one.features & other.features
    return ServedModel(one.name, one.kinds, features, min(contexts, default=0))


def _chats(model: ServedModel) -> bool:
    return JobKind.CHAT in model.kinds


def _descriptions(
    offered_models: Mapping[str, OfferedModel],
) -> list[tuple[ServedModel, int]]:
    return [(offered.model, offered.slots) for offered in offered_models.values()]


async def until_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Run ``work``, and cancel it once ``stop`` is set.

    Returns its result; None if it was cancelled.  Raises what it raises.
    """
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        working.cancel()
        await asyncio.wait((working, stopping))
    return None if working.cancelled() else working.result()
