"""Runs a worker: starts its engines, and offers what they run to a coordinator."""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from shoal.app.worker_ports import WorkerPorts
from shoal.cli.worker import worker_report
from shoal.cli.worker.join_functions import (
    CreateMember,
    check_task_options,
    cluster_engines,
    cluster_in,
    cluster_membership,
    function_membership,
    functions_beside_models,
    listening_membership,
    resolve_call_target,
    start_functions,
    supports_calls,
    task_membership,
)
from shoal.cli.worker.join_library import loads_on_order, open_worker_library
from shoal.cli.worker.join_models import (
    FunctionsBeside,
    WorkerContext,
    base_profile,
    model_memberships,
)
from shoal.cli.worker.join_target import (
    JoinTarget,
    ListeningTarget,
    check_encryption,
    reason_unreachable,
    resolve_target,
)
from shoal.cli.worker.owner_control import OwnerControl, Watch, throttle_event
from shoal.config import JoinConfig
from shoal.domain.errors import ConfigError, NotAdmitted, Unavailable
from shoal.domain.job_kinds import INFERENCE_KINDS
from shoal.domain.worker import THROTTLE_MAX, DeviceKind
from shoal.engines import gguf_files, local_servers, selection
from shoal.engines.resources import use_gpus
from shoal.ledger.keys import Signer
from shoal.models.file_hashes import FileHashes
from shoal.models.library import shareable_library
from shoal.models.library_server import LibraryServer
from shoal.models.seed_server import OpenPort
from shoal.protocols import discover
from shoal.protocols.seam.protocol import Pairing
from shoal.transports.clock import LoopClock
from shoal.transports.http_client import request_json
from shoal.transports.spans import open_spans
from shoal.worker.agent import MachineProbe, WorkerEvent
from shoal.worker.function_offers import FunctionMembership
from shoal.worker.hardware import this_machine
from shoal.worker.health import HealthMeter
from shoal.worker.identity import (
    IDENTITIES,
    KnownCoordinator,
    chosen_name,
    created_at,
    identity_file,
    load_identity,
    remember_coordinator,
    unique_name,
)
from shoal.worker.model_offers import JointOffers, SeparateOffers, until_stopped
from shoal.worker.traces import JobTracer

Membership: TypeAlias = SeparateOffers | JointOffers | FunctionMembership

DRAIN_TIMEOUT = 60.0  # seconds for running jobs to end after a stop signal
GIVE_UP_AFTER = 60.0  # seconds without an answer, at a terminal
# Distinguishes a listening worker from a coordinator of this machine in their fleet.
LISTENING_SUFFIX = "-worker"
DEVICES = {"DESKTOP": DeviceKind.DESKTOP, "SEEKER": DeviceKind.PHONE}


log = logging.getLogger("shoal.cli")
PAIR_TIMEOUT = 10.0  # seconds for the coordinator to answer


@dataclass(frozen=True, slots=True)
class JoinArguments:
    """What the command line asks for.

    ``models`` are names, patterns or ``NAME=PATH``; ``data`` is Shoal's data folder.
    ``listening`` is the fleet in which to listen, if any.
    """

    url: str
    models: tuple[str, ...]
    config: JoinConfig
    data: Path
    listening: ListeningTarget | None
    as_json: bool

    @property
    def with_functions(self) -> bool:
        """Whether functions are offered."""
        return bool(self.config.tasks or self.config.trust_code)


@dataclass(frozen=True, slots=True)
class JoinTargets:
    """Where functions and models are offered; None: not offered."""

    functions: JoinTarget | None
    models: JoinTarget | None

    @property
    def main(self) -> JoinTarget:
        """The target that names the worker."""
        target = self.models or self.functions
        assert target is not None, "models or functions are offered"
        return target


async def run_worker(arguments: JoinArguments, stop: asyncio.Event) -> int:
    """Serve until ``stop`` is set, or no coordinator wants the worker.

    Returns the exit status.  Raises ConfigError if an option cannot be met.
    """
    async with AsyncExitStack() as stack:
        running = await until_stopped(stop, _start(arguments, stack))
        return 0 if running is None else await _serve(running, stop)


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A worker with its offers, which are not made yet.

    ``joined`` is set when a coordinator has admitted it; ``watches`` run beside the
    offers.  ``waits_forever``: also for a coordinator that never answered, as a service
    has to: machines start in any order.
    """

    context: WorkerContext
    offered: Sequence[Membership]
    joined: asyncio.Event
    watches: Sequence[Watch]
    waits_forever: bool


async def _start(arguments: JoinArguments, stack: AsyncExitStack) -> RunningWorker:
    """Find the coordinator and the engines; leaving ``stack`` releases them."""
    config = arguments.config
    gpus = tuple(map(int, config.gpus))
    use_gpus(gpus)
    hardware = await asyncio.to_thread(this_machine, gpus)
    if gpus and hardware.gpu_memory_gb is None:
        named = ",".join(config.gpus)
        raise ConfigError(f"--gpus {named}: this machine has no such GPU")
    engines = config.engine
    if cluster_in(engines):
        engines = await cluster_engines(engines, tasks=arguments.with_functions)
    with_models = (
        bool(engines or arguments.models or loads_on_order(config))
        or not arguments.with_functions
    )
    targets = await _targets(arguments, with_models=with_models)
    if config.pairing_code:
        pairing_at(targets.main)  # raises, if there is no way
    for engine in config.engine:
        _reject_coordinator_as_engine(engine, targets.main.url)
    name = stack.enter_context(_name(arguments, targets))
    if arguments.listening is not None and not config.name:
        name += LISTENING_SUFFIX
    sources: Sequence[selection.EngineSource] = ()
    if targets.models is not None:
        sources = await _sources(arguments, targets.models, engines, stack)
    signer = _signer(targets.main, config, name, arguments.data)
    library = _library_server(arguments, targets.main)
    models_here = None
    if targets.models is not None:
        models_here = await open_worker_library(
            *(config, targets.models, arguments.data, sources),
            *(hardware, library),
            keeps=bool(arguments.models),
            signer=signer,
        )
    if models_here is not None:
        fitting = [
            each
            for each in sources
            if each.file is None
            or each.engine.models[0].name not in models_here.too_large
        ]
        await _close_others(sources, fitting)
        sources = fitting
        if models_here.shared is not None and models_here.shared.warning:
            log.warning("%s", models_here.shared.warning)
    meter, joined = HealthMeter(), asyncio.Event()
    owner = OwnerControl(config, arguments.data, meter)
    await owner.start()
    throttle = owner.throttle
    spans = await stack.enter_async_context(
        open_spans(config.otlp_endpoint, os.environ, "shoal-worker", name)
    )
    worker = WorkerContext(
        name,
        targets.main,
        config,
        DEVICES[config.provider_type],
        hardware,
        signer,
        MachineProbe(
            meter.measure, lambda: meter.load(throttle.percent, throttle.why_paused)
        ),
        throttle,
        partial(library.on_message, targets.main.display_url),
        worker_report.worker_reporter(targets.main, as_json=arguments.as_json),
        joined.set,
        worker_report.ModelLoader(as_json=arguments.as_json),
        created_at(_key_file(targets.main, config, name, arguments.data)),
        traces=None if spans is None else JobTracer(spans, LoopClock(), name),
        remember=partial(_remember, arguments.data, targets.main),
        library=models_here,
    )
    if arguments.listening is not None:
        ports = _ports(worker, arguments.listening)
        worker = replace(worker, open_ports=ports.open)
    offered = await _memberships(worker, arguments, targets, sources, stack)
    await stack.enter_async_context(library)
    if targets.main.unreachable and not arguments.as_json:
        # The attempts that follow may take seconds until they report it.
        waiting = WorkerEvent("waiting", targets.main.unreachable)
        worker.on_event(name, {}, waiting)
    if throttle.paused or throttle.percent < THROTTLE_MAX:
        _report_throttle(worker)
    watches = owner.watches(partial(_report_throttle, worker))
    # At a terminal, a person may have mistyped the address, and is watching.
    looked_at = sys.stdin.isatty() and sys.stderr.isatty() and not arguments.as_json
    return RunningWorker(
        worker, offered, joined, (meter.watch, *watches), waits_forever=not looked_at
    )


def _remember(data: Path, target: JoinTarget, key: str) -> None:
    """Write down a coordinator that has admitted this machine, for the next time."""
    if target.token_file is not None:
        return  # its token is on this machine
    fingerprint = "" if target.fingerprint is None else target.fingerprint.hex()
    known = KnownCoordinator(key, fingerprint)
    try:
        for url in target.http_urls:
            remember_coordinator(data, url, known)
    except (OSError, ConfigError) as error:
        log.warning("the next join needs the token again: %s", error)


def _gave_up(target: JoinTarget, why: str) -> str:
    """Return what was tried, and what to do."""
    url = target.display_url
    advice = f"; {target.advice}" if target.advice else ""
    return (
        f"nothing answers at {url} after {GIVE_UP_AFTER:g} s: "
        f"{worker_report.without_url(why, url)}{advice}; `shoal service install join` "
        "keeps trying"
    )


async def _targets(arguments: JoinArguments, *, with_models: bool) -> JoinTargets:
    """Resolve where to offer what.

    Raises ConfigError if a wire cannot carry it, or is not encrypted.
    """
    config, listening = arguments.config, arguments.listening
    functions = models = None
    if listening is not None:
        functions = listening.target if arguments.with_functions else None
        models = listening.target if with_models else None
    else:
        place = (arguments.url, config.wire, config.token, arguments.data)
        if arguments.with_functions:
            functions = await resolve_call_target(*place)
        if with_models:
            models = await resolve_target(*place)
    if models is not None and models.protocol.kinds.isdisjoint(INFERENCE_KINDS):
        raise ConfigError(
            f"the protocol {models.protocol.name} carries no models; offer functions "
            "with --tasks MODULE"
        )
    return JoinTargets(_checked(functions, config), _checked(models, config))


def _checked(target: JoinTarget | None, config: JoinConfig) -> JoinTarget | None:
    if target is None:
        return None
    target = replace(target, plain=config.plain)
    if target.others and not target.protocol.preferred:
        raise ConfigError(
            f"{target.display_url}: several addresses are for coordinators of `shoal "
            f"serve`, by their own protocol; give one for --wire {target.protocol.name}"
        )
    check_encryption(target)
    return target


def _reject_coordinator_as_engine(engine: str, coordinator: str) -> None:
    """Raise ConfigError if the engine's URL is the coordinator's own."""
    place = urlsplit(coordinator).netloc.rpartition("@")[2]
    if place and urlsplit(engine).netloc.rpartition("@")[2] == place:
        raise ConfigError(
            f"--engine: {place} is the coordinator itself; give the URL of an engine"
        )


def _name(
    arguments: JoinArguments, targets: JoinTargets
) -> AbstractContextManager[str]:
    """Return the worker's name, which no other worker here has meanwhile."""
    if not arguments.config.name:
        return unique_name(arguments.data)
    url = targets.main.display_url or "its fleet"
    what = "functions" if targets.functions else "models"
    return chosen_name(arguments.data, arguments.config.name, f"{url} with {what}")


def _report_throttle(worker: WorkerContext) -> None:
    percent, event = throttle_event(worker.throttle)
    worker.on_event(worker.name, {"throttle": percent}, event)


async def _sources(
    arguments: JoinArguments,
    target: JoinTarget,
    engines: tuple[str, ...],
    stack: AsyncExitStack,
) -> Sequence[selection.EngineSource]:
    """Find the engines, with as many of their models as the wire carries."""
    config = arguments.config
    options = selection.EngineOptions(
        engines,
        arguments.models,
        config.slots,
        config.engine_key,
        config.context,
        config.threads,
        any_field=selection.FIELDS[config.fields],
        on_order=loads_on_order(config) or bool(config.lend_memory),
        memory=config.memory,
    )
    locations = selection.SearchLocations(
        local_servers.server_locations(), gguf_files.model_folders(arguments.data)
    )
    sources = await selection.find_engines(options, locations, stack)
    offered, omitted = selection.limit_models(sources, target.protocol.models_max)
    if omitted:
        worker_report.report_omitted_models(
            [name for each in offered for name in each.names], omitted
        )
        await _close_others(sources, offered)
    return offered


async def _close_others(
    sources: Sequence[selection.EngineSource], offered: Sequence[selection.EngineSource]
) -> None:
    """Free the memory of models that are not offered."""
    for source in sources:
        if all(each.engine is not source.engine for each in offered):
            await source.engine.close()


def _library_server(arguments: JoinArguments, target: JoinTarget) -> LibraryServer:
    """Return what sends local models to peers that copy them."""

    def find_port() -> OpenPort | None:
        # Few workers ever open one: its modules take memory.
        from shoal.app.model_port import port_towards

        return port_towards(target.http_urls[0]) if target.http_urls else None

    named = map(selection.parse_model_option, arguments.models)
    files = [(name, path) for name, path in named if path is not None]
    caches = [each.folder for each in gguf_files.model_folders(arguments.data)]
    return LibraryServer(
        *(shareable_library(files, caches), FileHashes(arguments.data)),
        round(arguments.config.share_rate * 1e6),
        find_port,
    )


def _signer(
    target: JoinTarget, config: JoinConfig, name: str, data: Path
) -> Signer | None:
    """Return the worker's key, if its wire has keys or by --identity; else None."""
    file = _key_file(target, config, name, data)
    return None if file is None else load_identity(file)


def _key_file(
    target: JoinTarget, config: JoinConfig, name: str, data: Path
) -> Path | None:
    if config.identity is not None:
        return config.identity
    return identity_file(name, data / IDENTITIES) if target.protocol.has_keys else None


async def _memberships(
    worker: WorkerContext,
    arguments: JoinArguments,
    targets: JoinTargets,
    sources: Sequence[selection.EngineSource],
    stack: AsyncExitStack,
) -> Sequence[Membership]:
    """Start the functions, and return the offers of functions and engines."""
    config, functions = arguments.config, targets.functions
    offered: list[Membership] = []
    only_tasks = functions is not None and not supports_calls(functions.protocol)
    cluster = cluster_in(config.engine)
    beside: FunctionsBeside | None = None
    if only_tasks:
        check_task_options(config, targets.main, models=targets.models is not None)
    if functions is not None and only_tasks and targets.models is not None:
        # Over one connection.
        backend = await start_functions(config, functions, stack)
        worker = replace(worker, functions=backend)
    elif functions is not None and _on_one_connection(targets) and not cluster:
        backend = await start_functions(config, functions, stack)
        beside = functions_beside_models(worker, backend)
    elif functions is not None:
        caller = replace(
            worker,
            # Beside models, a cluster is another worker, which leaves by itself.
            name=f"{worker.name}-{cluster}"
            if _on_one_connection(targets)
            else worker.name,
            target=functions,
            signer=_signer(functions, config, worker.name, arguments.data),
        )
        create = _create_member(caller, only_tasks=only_tasks)
        offered.append(await _functions(caller, create, stack))
    if targets.models is not None:
        protocol = targets.models.protocol
        if worker.open_ports is None:  # else nothing is dialled
            profile = base_profile(worker, worker.name)
            protocol.dial(targets.models.url, profile)  # checks
        if not targets.models.tells_admission:
            sources = [await _loaded(worker.loader, each) for each in sources]
        offered += model_memberships(worker, sources, beside)
    return offered


def _on_one_connection(targets: JoinTargets) -> bool:
    """Return whether models and functions are offered on a wire that carries both."""
    functions, models = targets.functions, targets.models
    return (
        functions is not None
        and models is not None
        and functions.protocol is models.protocol
        and functions.protocol.joint
    )


async def _loaded(
    loader: worker_report.ModelLoader, source: selection.EngineSource
) -> selection.EngineSource:
    """Return a source with its model loaded."""
    if source.is_unloaded:
        await loader.load(source)
    return replace(source, is_unloaded=False)


def _create_member(caller: WorkerContext, *, only_tasks: bool) -> CreateMember:
    if caller.open_ports is not None:
        return partial(listening_membership, caller, caller.open_ports)
    profile = base_profile(caller, caller.name)
    caller.target.protocol.dial(caller.target.url, profile)  # checks the URL
    return partial(task_membership if only_tasks else function_membership, caller)


def _ports(worker: WorkerContext, listening: ListeningTarget) -> WorkerPorts:
    assert worker.signer is not None, "workers that listen have a key"
    return WorkerPorts(
        worker.target.protocol,
        listening.settings,
        worker.config.listen_host,
        worker.target.token,
        worker.target.url,
        worker.name,
        worker.hardware,
        worker.signer,
        worker.config.listen_port,
        worker.config.plain,
    )


async def _functions(
    worker: WorkerContext, create_member: CreateMember, stack: AsyncExitStack
) -> FunctionMembership:
    """Start what runs the functions, and return their offer."""
    if cluster := cluster_in(worker.config.engine):
        on_event = partial(worker.on_event, worker.name, {"engine": cluster})
        return await cluster_membership(
            worker.config, worker.target, stack, create_member, on_event
        )
    functions = await start_functions(worker.config, worker.target, stack)
    return create_member(functions)


async def _serve(running: RunningWorker, stop: asyncio.Event) -> int:
    """Serve until all offers end; return 0 if ``stop`` was set, else 1."""
    worker, offered = running.context, running.offered

    async def leave() -> None:
        await stop.wait()
        for each in offered:
            each.leave()
        await asyncio.sleep(DRAIN_TIMEOUT)
        raise ConfigError(f"jobs were still running after {DRAIN_TIMEOUT:g} s: aborted")

    async def pair() -> None:
        code, signer = worker.config.pairing_code, worker.signer
        if not code or signer is None:
            return
        await running.joined.wait()
        paired = await pair_worker(worker.target, code, signer.public_key)
        worker.on_event(worker.name, {"public_key": signer.public_key.hex()}, paired)

    async def give_up() -> None:
        if running.waits_forever or not worker.target.unreachable:
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(running.joined.wait(), GIVE_UP_AFTER)
            return
        # It may be about to admit this worker, or an operator to approve it.
        if why := await reason_unreachable(worker.target):
            raise ConfigError(_gave_up(worker.target, why))

    async with asyncio.TaskGroup() as tasks:
        beside = (leave, pair, give_up, *running.watches)
        background = [tasks.create_task(each()) for each in beside]
        await asyncio.gather(*(each.run() for each in offered))
        for each in background:
            each.cancel()
    return 0 if stop.is_set() else 1


def pairing_at(target: JoinTarget) -> Pairing:
    """Return how to present pairing codes to a coordinator.

    Shoal's answer as those of the wire that has them, whatever wire is joined by.

    Raises ConfigError if the wire does not support them.
    """
    wire = target.protocol
    having = [each for each in discover().values() if each.pairing is not None]
    pairing = having[0].pairing if wire.preferred else wire.pairing
    if pairing is None:
        names = " or ".join(each.name for each in having)
        raise ConfigError(
            f"--pairing-code: the protocol {wire.name} has no pairing codes; use "
            f"--wire {names}, or leave --wire out for a coordinator of `shoal serve`"
        )
    return pairing


async def pair_worker(target: JoinTarget, code: str, public_key: bytes) -> WorkerEvent:
    """Present a pairing code; return whether the worker is paired, or why not.

    Without pairing, the worker serves only jobs that are not private.
    """
    pairing = pairing_at(target)
    try:
        async with asyncio.timeout(PAIR_TIMEOUT):
            answer = await request_json(
                target.http_url + pairing.path,
                pairing.claim(code, public_key),
                fingerprint=target.fingerprint,
            )
        return WorkerEvent("paired", f"trusted by {pairing.user(answer)}")
    except NotAdmitted as error:
        return WorkerEvent("unpaired", f"--pairing-code: {error}")
    except TimeoutError:
        return WorkerEvent(
            "unpaired", f"no answer within {PAIR_TIMEOUT:g} s; join again"
        )
    except Unavailable as error:
        return WorkerEvent("unpaired", f"{error}; join again")
