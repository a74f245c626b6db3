"""Composes the agents that offer engines' models to a coordinator."""

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from shoal.cli.worker.join_library import WorkerLibrary
from shoal.cli.worker.join_target import JoinTarget, resolve_direct
from shoal.cli.worker.worker_report import ModelLoader
from shoal.config import JoinConfig
from shoal.domain.errors import ConfigError, ShoalError, Unavailable
from shoal.domain.job import PRIVACY_CLASSES, Privacy
from shoal.domain.money import parse_dollars
from shoal.domain.work import JobKind, ModelOrder, Work
from shoal.domain.worker import (
    DeviceKind,
    Hardware,
    LoadableModel,
    ModelLibrary,
    Offer,
    ServedModel,
    TokenPrices,
)
from shoal.engines.llama_engine import LlamaEngine
from shoal.engines.loadable_files import EMBEDDED
from shoal.engines.selection import EngineSource
from shoal.engines.shards.split_engine import SplitEngine
from shoal.engines.text_tasks import TASK_NAMES, TaskRunner
from shoal.ledger.keys import Signer, verify
from shoal.pool.models.machine import shown_size
from shoal.protocols.seam.context import Dialer, WorkerProfile
from shoal.transports import dialer
from shoal.transports.clock import LoopClock
from shoal.transports.dialer import Scheme
from shoal.transports.http_client import CertificateNotTrusted
from shoal.transports.link import Link, LinkClosed, OpenLink
from shoal.worker import model_offers
from shoal.worker.agent import Agent, MachineProbe, OnModelMessage, WorkerEvent
from shoal.worker.calls import FunctionBackend
from shoal.worker.jobs import EngineSlots, FindModel, only_model
from shoal.worker.listening_worker import ListeningWorker, OpenPorts
from shoal.worker.magic_packets import call_machine, hardware_addresses
from shoal.worker.model_offers import EngineMonitor
from shoal.worker.model_orders import ORDERS, LoadableEngine, ModelOrders
from shoal.worker.owner_throttle import OwnerThrottle
from shoal.worker.server_orders import ControlledServer
from shoal.worker.traces import JobTracer

ENGINE_SIZE = 8  # bytes of an engine's random name
NO_TASKS = frozenset[str]()
DIRECT_TIMEOUT = 3.0  # seconds to connect where there is another way
LOADING = "the worker is loading its model"
ABRUPT = 1006  # close code for an abnormal closure (RFC 6455, section 7.4.1)
AWAY = 1012  # close code for a service restart (IANA registry, RFC 6455, section 7.4)


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What all agents of a worker share.

    ``signer`` is None on wires that identify workers by name.  ``on_event`` receives
    the worker's name, details of the offer, and the event; ``joined`` is called when a
    coordinator has admitted the worker.  ``loader`` loads models.  ``registered_at`` is
    the Unix time at which the signer was made.  ``functions`` run tasks on the
    connection of each model; None: the wire has better ways for them, or there are
    none.  ``traces`` makes spans of traced jobs.  ``remember`` is called with the key
    of a coordinator that has admitted the worker by its token.  ``open_ports``: it
    listens, and does not dial.  ``library`` is what it loads on order; None: nothing.
    """

    name: str
    target: JoinTarget
    config: JoinConfig
    device: DeviceKind
    hardware: Hardware
    signer: Signer | None
    machine: MachineProbe
    throttle: OwnerThrottle
    share: OnModelMessage
    on_event: Callable[[str, Mapping[str, object], WorkerEvent], None]
    joined: Callable[[], None]
    loader: ModelLoader
    registered_at: float | None = None
    functions: FunctionBackend | None = None
    open_ports: OpenPorts | None = None
    traces: JobTracer | None = None
    remember: Callable[[str], None] = lambda key: None
    library: WorkerLibrary | None = None

    @property
    def privacy(self) -> Privacy | None:
        """The only privacy class of jobs that it accepts; None: any."""
        return PRIVACY_CLASSES.get(self.config.privacy)

    def report(
        self, name: str, about: Mapping[str, object], event: WorkerEvent
    ) -> None:
        """Report an event to the user, and signal that the worker has joined."""
        self.on_event(name, about, event)
        if event.kind == "joined":
            self.joined()


@dataclass(frozen=True, slots=True)
class FunctionsBeside:
    """Functions that are offered on the connection of the models.

    ``report`` receives the events of the worker, for the user.
    """

    backend: FunctionBackend
    offer: Offer
    report: Callable[[WorkerEvent], None]


def model_memberships(
    worker: WorkerContext,
    sources: Sequence[EngineSource],
    beside: FunctionsBeside | None = None,
) -> Sequence[model_offers.SeparateOffers | model_offers.JointOffers]:
    """Return the offers of the engines' models; the caller runs each.

    Functions may be ``beside`` on a wire with one connection for all models.
    """
    protocol = worker.target.protocol
    if worker.config.last_resort and not (protocol.joint and protocol.preferred):
        raise ConfigError(  # or it would be used like a machine of the pool
            f"--last-resort: the protocol {protocol.name} has no workers of last "
            "resort: join a coordinator of Shoal's without --wire"
        )
    if worker.target.protocol.joint:
        return [_joint_offers(worker, sources, beside)]
    # Several engines may have models of the same name.
    several = len({source.label for source in sources}) > 1
    return [
        _separate_offers(worker, source, f"{worker.name}-{source.label}")
        if several
        else _separate_offers(worker, source, worker.name)
        for source in sources
    ]


def _joint_offers(
    worker: WorkerContext,
    sources: Sequence[EngineSource],
    beside: FunctionsBeside | None,
) -> model_offers.JointOffers:
    """Return the offer of all models over one connection."""
    public_key = worker.signer.public_key.hex() if worker.signer else ""

    def describe(model: ServedModel, slots: int) -> Offer:
        last_resort = token_prices(worker.config)
        chats = JobKind.CHAT in model.kinds and last_resort is None
        return Offer(
            kinds=model.kinds | {JobKind.TASK} if chats else model.kinds,
            models=frozenset({model.name}),
            slots=slots,
            features=model.features,
            context=model.context,
            only_for=frozenset(worker.config.only_for),
            privacy=worker.privacy,
            price=worker.config.price,
            tasks=TASK_NAMES if chats else NO_TASKS,
            device=worker.device,
            public_key=public_key,
            last_resort=last_resort,
        )

    def create_agent(
        find: FindModel,
        offers: tuple[Offer, ...],
        report: Callable[[WorkerEvent], None],
        on_admitted: Callable[[], None],
    ) -> Agent | ListeningWorker:
        functions = None if beside is None else beside.backend
        if worker.open_ports is not None:

            def report_listening(
                details: Mapping[str, object], event: WorkerEvent
            ) -> None:
                if event.kind == "listening":
                    wire = worker.target.protocol.name
                    worker.report(worker.name, {"wire": wire, **details}, event)
                else:
                    report(event)

            member = listening_worker(
                *(worker, worker.open_ports, find, report_listening),
                offers=offers,
                functions=functions,
                slots=slots,
                on_admitted=on_admitted,
            )
            if beside is not None:
                beside.backend.caller.on_lent = member.update_lent_slots
            return member
        profile = replace(
            base_profile(worker, worker.name),
            offers=worker.throttle.limit(offers),
            expected_models=tuple(
                model.name
                for each in sources
                if each.is_unloaded
                for model in each.offered_models(each.engine.models)
            ),
        )
        agent = make_agent(
            *(worker, profile, find, report, offers),
            functions=functions,
            slots=slots,
            on_admitted=on_admitted,
        )
        if beside is not None:
            beside.backend.caller.on_lent = agent.update_lent_slots
        return agent

    def on_event(offered: model_offers.OfferedModel | None, event: WorkerEvent) -> None:
        about: dict[str, object] = {"wire": worker.target.protocol.name}
        if offered is not None:
            about = _about(worker, offered.model, offered.slots)
        elif worker.library is not None and (loadable := worker.library.current.models):
            about = {"models to load": [each.name for each in loadable]}
        elif worker.library is not None and (lent := worker.library.lent):
            about = {"memory to lend:": shown_size(lent)}
        worker.report(worker.name, about, event)

    engines = [
        model_offers.OfferedEngine(
            _monitor(worker, each, worker.name),
            each.offered_models,
            _slots(worker, each),
        )
        for each in sources
    ]
    slots = [engine.slots for engine in engines]
    return model_offers.JointOffers(
        *(engines, describe, create_agent, on_event),
        other_offers=() if beside is None else (beside.offer,),
        report_others=None if beside is None else beside.report,
        orders=_orders(worker, worker.library, sources, engines),
        slots=slots,
    )


def _orders(
    worker: WorkerContext,
    library: WorkerLibrary | None,
    sources: Sequence[EngineSource],
    engines: Sequence[model_offers.OfferedEngine],
) -> ModelOrders | None:
    """Return what loads the models of a library, and unloads those of the engines."""
    if library is None:
        return None

    def describe(models: ModelLibrary) -> Offer:
        return Offer(
            kinds=frozenset({JobKind.MODEL}),
            slots=ORDERS,
            only_for=frozenset(worker.config.only_for),
            privacy=worker.privacy,
            device=worker.device,
            public_key=worker.signer.public_key.hex() if worker.signer else "",
            library=models,
        )

    async def open_engine(
        model: LoadableModel, context: int, slots: int
    ) -> LoadableEngine:
        engine = await library.open(model, context, slots)
        return LoadableEngine(offer_engine(engine), engine.activity)

    async def open_group(model: LoadableModel, order: ModelOrder) -> LoadableEngine:
        assert library.shared is not None, "only then"
        file = library.file(model.name)
        engine = await library.shared.open_engine(file, library.threads, order)
        return LoadableEngine(offer_engine(engine), engine.activity, engine.lost)

    def offer_engine(engine: LlamaEngine | SplitEngine) -> model_offers.OfferedEngine:
        report = partial(worker.on_event, worker.name, {"engine": EMBEDDED})
        name = secrets.token_hex(ENGINE_SIZE)
        return model_offers.OfferedEngine(
            EngineMonitor(engine, report, engine.start),
            lambda models: models,
            EngineSlots(engine.slots, worker.throttle, engine=name),
        )

    def report(name: str, event: WorkerEvent) -> None:
        worker.report(worker.name, {"model": name}, event)

    def report_lent(model: str, what: str) -> None:
        report(model, WorkerEvent("lending", what))

    shared = library.shared
    orders = ModelOrders(
        lambda: library.current,
        library.scan,
        describe,
        open_engine,
        report,
        EngineSlots(ORDERS, worker.throttle),
        library.fetch if library.peers else None,
        [
            ControlledServer(offered, source.control)
            for source, offered in zip(sources, engines, strict=True)
            if source in library.servers and source.control is not None
        ],
        None
        if shared is None
        else shared.lender(worker.throttle, report_lent, library.shared_paths),
        open_group if shared is not None and shared.runs else None,
        library.free,
    )
    for source, offered in zip(sources, engines, strict=True):
        if source.file is not None and isinstance(source.engine, LlamaEngine):
            held = LoadableEngine(offered, source.engine.activity)
            name = source.engine.model
            if name in library.files.files:  # else its owner keeps it
                orders.hold(name, held, library.need(source.file))
    return orders


def _separate_offers(
    worker: WorkerContext, source: EngineSource, name: str
) -> model_offers.SeparateOffers:
    """Return the offer of an engine's models, each over its own connection."""
    slots = _slots(worker, source)
    monitor = _monitor(worker, source, name)

    def create_agent(model: ServedModel) -> Agent:
        tasks = TASK_NAMES if JobKind.CHAT in model.kinds else NO_TASKS
        if worker.functions is not None:
            tasks |= worker.functions.caller.names
        profile = replace(
            base_profile(worker, name),
            model=model,
            slots=slots.size,
            tasks=tasks,
            engine=slots.engine,
        )
        find = only_model(
            TaskRunner(source.engine, model), slots, monitor.request_check
        )
        about = _about(worker, model, slots.size)
        report = partial(worker.report, name, about)
        functions = worker.functions
        return make_agent(worker, profile, find, report, functions=functions)

    return model_offers.SeparateOffers(
        monitor,
        source.offered_models,
        create_agent,
        partial(_is_admitted, worker, name),
        slots,
        worker.throttle,
    )


async def _is_admitted(worker: WorkerContext, name: str, model: ServedModel) -> bool:
    """Return whether a Shoal coordinator admits a worker with a model; wait for it.

    The worker joins without slots, so that it gets no jobs, and leaves at once.
    """
    admitted = False

    def report(event: WorkerEvent) -> None:
        nonlocal admitted
        if event.kind == "joined":
            admitted = True
            agent.leave(LOADING)
        elif event.kind != "left":
            worker.report(name, {"model": model.name}, event)

    profile = replace(base_profile(worker, name), model=model, slots=0)
    agent = make_agent(worker, profile, _decline, report)
    await agent.run()
    return admitted


def token_prices(config: JoinConfig) -> TokenPrices | None:
    """Return what a hosted provider takes.  Raises ConfigError if it is no price."""
    if not config.price_per_million:
        return None
    try:
        prompt, completion = map(parse_dollars, config.price_per_million.split(","))
        return TokenPrices(prompt, completion)
    except (ValueError, ShoalError) as error:
        raise ConfigError(
            f"--price-per-million {config.price_per_million}: expected two amounts of "
            f"dollars, such as 0.15,0.60 ({error})"
        ) from error


def _decline(work: Work) -> None:
    """Decline work: the model is not loaded."""


def base_profile(worker: WorkerContext, name: str) -> WorkerProfile:
    """Return a worker's profile without its offers."""
    clock = LoopClock()
    return WorkerProfile(
        name,
        ServedModel(""),
        1,
        worker.target.token,
        only_for=frozenset(worker.config.only_for),
        privacy=worker.privacy,
        price=worker.config.price,
        device=worker.device,
        identity=worker.signer,
        epoch=clock.wall() - clock.now(),
        direct_url=worker.target.direct,
        plain=worker.target.plain,
        hardware=worker.hardware,
        random_bytes=secrets.token_bytes,
        passcode=worker.config.passcode,
        owner=worker.config.owner,
        registered_at=worker.registered_at,
        verify=verify,
        coordinator_key=worker.target.coordinator_key,
        on_coordinator=worker.remember,
        addresses=worker.target.others,
        wake=hardware_addresses() if worker.config.wake else (),
    )


def make_agent(
    worker: WorkerContext,
    profile: WorkerProfile,
    find: FindModel,
    report: Callable[[WorkerEvent], None],
    offers: tuple[Offer, ...] | None = None,
    functions: FunctionBackend | None = None,
    slots: Sequence[EngineSlots] = (),
    on_admitted: Callable[[], None] = lambda: None,
) -> Agent:
    """Return the agent for a member; the caller runs it."""
    target = worker.target
    return Agent(
        target.protocol.dial(target.url, profile),
        partial(_dial, target),
        find,
        LoopClock(),
        random.Random(),
        report,
        machine=worker.machine,
        throttle=worker.throttle,
        share=worker.share,
        offers=offers,
        functions=functions,
        slots=slots,
        on_admitted=on_admitted,
        call_machine=call_machine,
        traces=worker.traces,
    )


def listening_worker(
    worker: WorkerContext,
    open_ports: OpenPorts,
    find: FindModel,
    report: Callable[[Mapping[str, object], WorkerEvent], None],
    offers: tuple[Offer, ...],
    functions: FunctionBackend | None = None,
    slots: Sequence[EngineSlots] = (),
    on_admitted: Callable[[], None] = lambda: None,
) -> ListeningWorker:
    """Return a member that coordinators dial; the caller runs it."""

    def create_agent(
        dialer: Dialer, open_link: OpenLink, report: Callable[[WorkerEvent], None]
    ) -> Agent:
        return Agent(
            dialer,
            open_link,
            find,
            LoopClock(),
            random.Random(),
            report,
            machine=worker.machine,
            throttle=worker.throttle,
            share=worker.share,
            offers=offers,
            functions=functions,
            slots=slots,
            on_admitted=on_admitted,
            redials=False,
            traces=worker.traces,
        )

    restriction = base_profile(worker, worker.name).restriction
    return ListeningWorker(open_ports, create_agent, LoopClock(), report, restriction)


@asynccontextmanager
async def _dial(
    target: JoinTarget, url: str, headers: Mapping[str, str], message_max: int
) -> AsyncIterator[tuple[Link, Mapping[str, str]]]:
    """Open a connection to a coordinator, after looking up its current port."""
    async with AsyncExitStack() as stack:
        if url != target.direct:
            yield await stack.enter_async_context(
                _open_link(target, url, headers, message_max)
            )
            return
        try:
            url = await resolve_direct(target)
        except Unavailable as error:
            # The next URL reports an untrusted certificate as final.
            code = ABRUPT if isinstance(error, CertificateNotTrusted) else AWAY
            raise LinkClosed(str(error), code) from error
        if not url:
            raise LinkClosed(f"{target.display_url} has only its HTTP port")
        try:
            async with asyncio.timeout(DIRECT_TIMEOUT):
                link = await stack.enter_async_context(
                    _open_link(target, url, headers, message_max)
                )
        except TimeoutError as error:
            reason = f"cannot connect to {url}: no answer within {DIRECT_TIMEOUT:g} s"
            raise LinkClosed(reason) from error
        yield link


def _open_link(
    target: JoinTarget, url: str, headers: Mapping[str, str], message_max: int
) -> AbstractAsyncContextManager[tuple[Link, Mapping[str, str]]]:
    # The fingerprint is that of the HTTP certificate.  A port whose session
    # authenticates the peer has a certificate of its own.
    own_certificate = url.startswith(f"{Scheme.ANY.value}://")
    fingerprint = None if own_certificate else target.fingerprint
    return dialer.dial(url, headers, message_max, fingerprint=fingerprint)


def _slots(worker: WorkerContext, source: EngineSource) -> EngineSlots:
    # Random: another process of this name may have an engine with the same label.
    return EngineSlots(
        source.engine.slots,
        worker.throttle,
        worker.config.slots,
        engine=secrets.token_hex(ENGINE_SIZE),
    )


def _monitor(worker: WorkerContext, source: EngineSource, name: str) -> EngineMonitor:
    about = {"engine": source.label}
    load = partial(worker.loader.load, source) if source.is_unloaded else None
    return EngineMonitor(source.engine, partial(worker.on_event, name, about), load)


def _about(worker: WorkerContext, model: ServedModel, slots: int) -> dict[str, object]:
    about: dict[str, object] = {"model": model.name, "slots": slots}
    if worker.signer is not None:
        about["public_key"] = worker.signer.public_key.hex()
    return about
