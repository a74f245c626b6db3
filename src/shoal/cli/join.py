"""Offer this machine's models and functions to a coordinator."""

import argparse
import asyncio
import os
import re
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from shoal.app.worker_ports import WorkerPorts, listening_wires
from shoal.cli.arguments import add_config, add_config_file, given_flags
from shoal.cli.command_loop import add_log_arguments, log_to_stderr, run_loop
from shoal.cli.worker.join_functions import (
    RAY,
    CreateMember,
    check_task_options,
    function_membership,
    listening_membership,
    ray_engines,
    ray_membership,
    resolve_call_target,
    start_functions,
    supports_calls,
    task_membership,
)
from shoal.cli.worker.join_models import WorkerContext, base_profile, model_memberships
from shoal.cli.worker.join_target import (
    JoinTarget,
    ListeningTarget,
    check_encryption,
    listening_target,
    resolve_target,
)
from shoal.cli.worker.pairing import check_pairing, pair_worker
from shoal.cli.worker.worker_report import report_omitted_models, worker_reporter
from shoal.config import USER_DATA, JoinConfig
from shoal.config.loader import check_file, load
from shoal.config.throttle_file import ThrottleFile, check_throttle
from shoal.domain.errors import ConfigError
from shoal.domain.job import PRIVACY_CLASSES
from shoal.domain.job_kinds import INFERENCE_KINDS
from shoal.domain.money import dollars, parse_dollars
from shoal.domain.worker import THROTTLE_MAX, DeviceKind
from shoal.engines import gguf_files, local_servers
from shoal.engines.selection import (
    EngineOptions,
    EngineSource,
    SearchLocations,
    limit_models,
    open_engines,
    parse_model_option,
)
from shoal.ledger.keys import Signer
from shoal.models.library import shareable_library
from shoal.models.library_server import LibraryServer
from shoal.protocols import discover
from shoal.worker.agent import MachineProbe, WorkerEvent
from shoal.worker.function_offers import FunctionMembership
from shoal.worker.hardware import this_machine
from shoal.worker.health import HealthMeter
from shoal.worker.identity import (
    chosen_name,
    created_at,
    identity_file,
    load_identity,
    unique_name,
)
from shoal.worker.model_offers import JointOffers, SeparateOffers
from shoal.worker.owner_throttle import OwnerThrottle

Membership: TypeAlias = SeparateOffers | JointOffers | FunctionMembership

DRAIN_TIMEOUT = 60.0  # seconds for running jobs to end after a stop signal
IDENTITIES = "identities"  # the folder of workers' keys
# Distinguishes a listening worker from a coordinator of this machine in their fleet.
LISTENING_SUFFIX = "-worker"
_PORT = re.compile(r":[0-9]+$")
ANY = "any"
DEVICES = {"DESKTOP": DeviceKind.DESKTOP, "SEEKER": DeviceKind.PHONE}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url",
        nargs="?",
        default=os.environ.get("SHOAL_URL", ""),
        help="URL of the coordinator: http://HOST:PORT, ws://…, or tcp://HOST:PORT of "
        "a peer (default: the one on this machine, else on the local network) "
        "[SHOAL_URL]",
    )
    add_config(parser, JoinConfig, "join")
    for wire, protocol in listening_wires().items():
        add_config(parser, protocol.config, wire)
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME[=PATH]",
        help="model to offer, with its GGUF file for the embedded engine, or a pattern "
        "such as 'qwen*'; repeatable (default: all models of the servers, else the "
        "largest local file that fits into memory)",
    )
    add_config_file(parser)
    add_log_arguments(parser, "warning")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per line"
    )


def run(args: argparse.Namespace) -> int:
    log_to_stderr(args)
    check_file(args.config, {"serve", "join", "x402", *discover()})
    config = load(
        JoinConfig, "join", given_flags(args, JoinConfig, "join"), args.config
    )
    data = Path(os.environ.get("SHOAL_DATA_DIR") or USER_DATA)
    with_tasks = bool(config.tasks or config.trust_code)
    listening = listening_target(args, config, data)
    # Report invalid arguments before loading a model.
    for each in args.model:
        parse_model_option(each)
    device = _device(config.provider_type)
    config = replace(config, privacy=parse_privacy(config.privacy))
    throttle_file = ThrottleFile(data)
    if config.throttle is not None:
        check_throttle(config.throttle)
    config = replace(config, price=_price(config.price))
    options = EngineOptions(
        config.engine,
        tuple(args.model),
        config.slots,
        config.engine_key,
        config.context,
        config.threads,
    )
    locations = SearchLocations(
        local_servers.server_locations(), gguf_files.model_folders(data)
    )

    async def join(stop: asyncio.Event) -> int:
        engines = config.engine
        if RAY in engines:
            engines = await ray_engines(engines, tasks=with_tasks)
        with_models = bool(engines or args.model) or not with_tasks
        url = normalize_url(args.url, config.wire)
        arguments = (url, config.wire, config.token, data)
        if listening is not None:
            call_target = listening.target if with_tasks else None
            model_target = listening.target if with_models else None
        else:
            call_target = await resolve_call_target(*arguments) if with_tasks else None
            model_target = await resolve_target(*arguments) if with_models else None
        if model_target is not None and model_target.protocol.kinds.isdisjoint(
            INFERENCE_KINDS
        ):
            raise ConfigError(
                f"the wire {model_target.protocol.name} carries no models; offer "
                "functions with --tasks MODULE"
            )
        if call_target is not None:
            call_target = replace(call_target, plain=config.plain)
            check_encryption(call_target)
        if model_target is not None:
            model_target = replace(model_target, plain=config.plain)
            check_encryption(model_target)
        target = model_target or call_target
        assert target is not None, "models or functions are offered"
        if config.pairing_code:
            check_pairing(target)
        for engine in config.engine:
            _reject_coordinator_as_engine(engine, target.url)
        joined_url = target.display_url or "its fleet"
        description = f"{joined_url} with {'functions' if call_target else 'models'}"
        named = (
            chosen_name(data, config.name, description)
            if config.name
            else unique_name(data)
        )
        async with AsyncExitStack() as stack:
            name = stack.enter_context(named)
            if listening is not None and not config.name:
                name += LISTENING_SUFFIX
            joined, meter = asyncio.Event(), HealthMeter()
            throttle = OwnerThrottle(_throttle(config, throttle_file))
            caches = [each.folder for each in gguf_files.model_folders(data)]
            library = shareable_library(_files(args.model), caches)
            sharing = LibraryServer(library)
            worker = WorkerContext(
                name,
                target,
                config,
                device,
                await asyncio.to_thread(this_machine),
                _signer(target, config, name, data),
                MachineProbe(meter.measure, lambda: meter.load(throttle.percent)),
                throttle,
                partial(sharing.on_message, target.display_url),
                worker_reporter(target, as_json=args.json),
                joined.set,
                created_at(_key_file(target, config, name, data)),
            )
            offered: list[Membership] = []
            only_tasks = call_target is not None and not supports_calls(
                call_target.protocol
            )
            if only_tasks:
                check_task_options(config, target, models=model_target is not None)
            if only_tasks and model_target is not None:  # over one connection
                assert call_target is not None, "it has tasks"
                functions = await start_functions(config, call_target, stack)
                worker = replace(worker, functions=functions)
            elif call_target is not None:
                signer = _signer(call_target, config, name, data)
                caller = replace(
                    worker,
                    target=call_target,
                    signer=signer,
                    on_event=worker_reporter(call_target, as_json=args.json),
                )
                create: CreateMember
                if listening is not None:
                    ports = _ports(caller, listening)
                    create = partial(listening_membership, caller, ports.open)
                else:
                    profile = base_profile(caller, name)
                    call_target.protocol.dial(call_target.url, profile)
                    offer = task_membership if only_tasks else function_membership
                    create = partial(offer, caller)
                offered.append(await _functions(caller, create, stack))
            if model_target is not None:
                wished = replace(options, engines=engines)
                offered += await _models(worker, wished, locations, stack)
            await stack.enter_async_context(sharing)
            watches = [
                meter.watch(),
                throttle.watch(throttle_file, partial(_report_throttle, worker)),
            ]
            if throttle.percent < THROTTLE_MAX:
                _report_throttle(worker)
            return await _serve(worker, offered, joined, watches, stop)

    return run_loop(join)


def _ports(worker: WorkerContext, listening: ListeningTarget) -> WorkerPorts:
    assert worker.signer is not None, "the wires on which workers listen sign"
    return WorkerPorts(
        worker.target.protocol,
        listening.settings,
        worker.config.listen_host,
        worker.target.token,
        worker.target.url,
        worker.name,
        worker.hardware,
        worker.signer,
    )


async def _functions(
    worker: WorkerContext,
    create_member: CreateMember,
    stack: AsyncExitStack,
) -> FunctionMembership:
    """Start what runs the functions, and return their offer."""
    if RAY in worker.config.engine:
        on_event = partial(worker.on_event, worker.name, {"engine": RAY})
        return await ray_membership(worker.config, stack, create_member, on_event)
    functions = await start_functions(worker.config, worker.target, stack)
    return create_member(functions)


async def _models(
    worker: WorkerContext,
    options: EngineOptions,
    locations: SearchLocations,
    stack: AsyncExitStack,
) -> Sequence[SeparateOffers | JointOffers]:
    """Open the engines, and return the offers of their models."""
    target = worker.target
    target.protocol.dial(target.url, base_profile(worker, worker.name))
    sources = await open_engines(options, locations, stack)
    offered, omitted = limit_models(sources, target.protocol.models_max)
    if omitted:
        report_omitted_models(
            [name for each in offered for name in each.names], omitted
        )
        await _close_others(sources, offered)
    return model_memberships(worker, offered)


def normalize_url(url: str, wire: str) -> str:
    """Return the URL, with http:// before HOST:PORT if no wire is given."""
    bare = wire == "auto" and "://" not in url and _PORT.search(url) is not None
    return f"http://{url}" if bare else url


def _files(models: Sequence[str]) -> list[tuple[str, Path]]:
    """Return the models whose files are given."""
    named = map(parse_model_option, models)
    return [(name, path) for name, path in named if path is not None]


def _device(provider_type: str) -> DeviceKind:
    """Return the kind of this machine; raises ConfigError for an unknown one."""
    if provider_type not in DEVICES:
        known = " or ".join(DEVICES)
        raise ConfigError(f"--provider-type {provider_type}: expected {known}")
    return DEVICES[provider_type]


def _throttle(config: JoinConfig, file: ThrottleFile) -> int:
    """Return the throttle at the start: that of the settings, else the last one."""
    if config.throttle is not None:
        return config.throttle
    last = file.read()
    return THROTTLE_MAX if last is None else last


def _report_throttle(worker: WorkerContext) -> None:
    percent = worker.throttle.percent
    kind = {0: "paused", THROTTLE_MAX: "resumed"}.get(percent, "throttled")
    worker.on_event(worker.name, {"throttle": percent}, WorkerEvent(kind))


def parse_privacy(given: str) -> str:
    """Return a privacy class in lower case; raises ConfigError for an unknown one."""
    known = [ANY, *PRIVACY_CLASSES]
    if given.lower() not in known:
        *others, last = known
        raise ConfigError(f"--privacy {given}: expected {', '.join(others)} or {last}")
    return given.lower()


def _price(given: str) -> str:
    """Return the price to ask for as it is shown; raises ConfigError if invalid."""
    try:
        return dollars(parse_dollars(given)) if given else ""
    except ConfigError as error:
        raise ConfigError(f"--price: {error}") from error


def _signer(
    target: JoinTarget, config: JoinConfig, name: str, data: Path
) -> Signer | None:
    """Return the worker's key, on a wire that signs or by --identity; else None."""
    file = _key_file(target, config, name, data)
    return None if file is None else load_identity(file)


def _key_file(
    target: JoinTarget, config: JoinConfig, name: str, data: Path
) -> Path | None:
    if config.identity is not None:
        return config.identity
    return identity_file(name, data / IDENTITIES) if target.protocol.signs else None


async def _close_others(
    sources: Sequence[EngineSource], offered: Sequence[EngineSource]
) -> None:
    """Free the memory of models that are not offered."""
    for source in sources:
        if all(each.engine is not source.engine for each in offered):
            await source.engine.close()


async def _serve(
    worker: WorkerContext,
    offered: Sequence[Membership],
    joined: asyncio.Event,
    watches: Sequence[Coroutine[None, None, None]],
    stop: asyncio.Event,
) -> int:
    """Serve until all offers end; return 0 if ``stop`` was set, else 1.

    ``watches`` run meanwhile.
    """

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
        await joined.wait()
        paired = await pair_worker(worker.target, code, signer.public_key)
        worker.on_event(worker.name, {"public_key": signer.public_key.hex()}, paired)

    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(each) for each in (leave(), pair(), *watches)]
        await asyncio.gather(*(each.run() for each in offered))
        for each in background:
            each.cancel()
    return 0 if stop.is_set() else 1


def _reject_coordinator_as_engine(engine: str, coordinator: str) -> None:
    """Raise ConfigError if the engine's URL is the coordinator's own."""
    place = urlsplit(coordinator).netloc.rpartition("@")[2]
    if place and urlsplit(engine).netloc.rpartition("@")[2] == place:
        raise ConfigError(
            f"--engine: {place} is the coordinator itself; give the URL of an engine"
        )
