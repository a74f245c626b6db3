"""Offers function calls: their coordinator, and the processes that run them.

Functions run in processes of this machine or in a cluster of Ray or Dask; the models of
Ray Serve are offered as well.
"""

import asyncio
import secrets
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from msgspec import structs

from shoal.app.fleet_files import load_fleet
from shoal.cli.worker import join_target
from shoal.cli.worker.join_models import (
    ENGINE_SIZE,
    FunctionsBeside,
    WorkerContext,
    base_profile,
    listening_worker,
    make_agent,
)
from shoal.config import JoinConfig
from shoal.config.installation import install_extra
from shoal.domain.credentials import without_fingerprint
from shoal.domain.errors import ConfigError, Unavailable
from shoal.domain.work import Feature, JobKind, Work
from shoal.domain.worker import Offer, ServedModel
from shoal.engines import local_servers
from shoal.engines.resources import processors
from shoal.protocols import discover
from shoal.protocols.seam.protocol import AnyWireProtocol
from shoal.tasks.function_caller import FunctionCaller
from shoal.tasks.limits import PROCESSES_MAX, SHARERS_MAX
from shoal.tasks.on_ray.caller import RayCaller
from shoal.tasks.process_pool import ProcessPool
from shoal.tasks.registry import PYTHON
from shoal.tasks.running_call import COORDINATOR_FINGERPRINT, COORDINATOR_URL
from shoal.worker.agent import Agent, WorkerEvent
from shoal.worker.blob_cache import BlobCache
from shoal.worker.calls import FunctionBackend
from shoal.worker.function_offers import (
    FunctionMembership,
    FunctionOffers,
    RemoteFunctionCaller,
    SeparateFunctionOffer,
)
from shoal.worker.jobs import EngineSlots
from shoal.worker.listening_worker import ListeningWorker, OpenPorts

if TYPE_CHECKING:
    from shoal.tasks.on_dask.caller import DaskCaller

CODE_WITHOUT_TOKEN = (
    "--trust-code has no effect without --token: in an open fleet, anyone could send "
    "code"
)

CreateMember: TypeAlias = Callable[[FunctionBackend], FunctionMembership]
"""Creates what offers functions, to one coordinator or to all that dial."""


async def start_functions(
    config: JoinConfig, target: join_target.JoinTarget, stack: AsyncExitStack
) -> FunctionBackend:
    """Start the processes that run functions; leaving ``stack`` ends them.

    They learn the address of the ``target``, for training runs.

    Raises ConfigError if a module cannot be imported, or no module has a task.
    """
    cores, _ = processors()
    slots = config.slots or cores
    if slots > PROCESSES_MAX:
        raise ConfigError(f"--slots {slots}: at most {PROCESSES_MAX} processes")
    blobs = await asyncio.to_thread(BlobCache)
    stack.push_async_callback(blobs.close)
    threads = max(1, cores // slots)
    caller = ProcessPool(
        config.tasks,
        slots,
        trust_code=config.trust_code,
        threads=threads,
        sharers=SHARERS_MAX if config.listen else 1,
        variables=_coordinator_variables(target),
    )
    stack.push_async_callback(caller.close)
    await caller.start()
    check_tasks(config, caller.names)
    return FunctionBackend(caller, blobs)


def _coordinator_variables(target: join_target.JoinTarget) -> Mapping[str, str]:
    """Return the address of a coordinator with HTTP, for its functions' processes."""
    places = [urlsplit(each) for each in (target.url, *target.others)]
    if any(each.scheme not in join_target.HTTP for each in places):
        return {}
    urls = [f"{join_target.HTTP[each.scheme]}://{each.netloc}" for each in places]
    fingerprint = b"" if target.fingerprint is None else target.fingerprint
    return {
        COORDINATOR_URL: ",".join(urls),
        COORDINATOR_FINGERPRINT: fingerprint.hex(),
    }


def check_tasks(config: JoinConfig, names: Collection[str]) -> None:
    """Raise ConfigError if modules are given, but none has a task."""
    if config.tasks and not names:
        raise ConfigError(
            f"--tasks {' '.join(config.tasks)}: no task found; decorate functions with "
            "@shoal.task"
        )


def functions_beside_models(
    worker: WorkerContext, functions: FunctionBackend
) -> FunctionsBeside:
    """Return functions that are offered on the connection of the models."""
    offer, about = _offer(worker, functions.caller), _about(worker, functions.caller)
    # So named, models and functions do not share their slots.
    offer = structs.replace(offer, engine=secrets.token_hex(ENGINE_SIZE))
    report = partial(_report, worker, about)
    return FunctionsBeside(_with_slots(worker, functions), offer, report)


def function_membership(worker: WorkerContext, functions: FunctionBackend) -> Agent:
    """Return the agent that offers the functions; the caller runs it."""
    caller, functions = functions.caller, _with_slots(worker, functions)
    offer, about = _offer(worker, caller), _about(worker, caller)
    lent = worker.throttle.limit((offer,))
    profile = replace(base_profile(worker, worker.name), offers=lent)
    report = partial(_report, worker, about)
    agent = make_agent(worker, profile, _decline_models, report, (offer,), functions)
    caller.on_lent = agent.update_lent_slots
    return agent


def task_membership(
    worker: WorkerContext, functions: FunctionBackend
) -> SeparateFunctionOffer:
    """Return what offers the tasks on a wire that carries them as JSON only."""
    caller = functions.caller
    about = {**_about(worker, caller), "trust_code": False}

    def create_agent(slots: int) -> Agent:
        profile = replace(
            base_profile(worker, worker.name),
            model=ServedModel("", frozenset({JobKind.TASK})),
            slots=slots,
            tasks=caller.names,
        )
        report = partial(_report, worker, about)
        return make_agent(worker, profile, _decline_models, report, functions=functions)

    return SeparateFunctionOffer(create_agent, caller.slots, worker.throttle)


def listening_membership(
    worker: WorkerContext, open_ports: OpenPorts, functions: FunctionBackend
) -> ListeningWorker:
    """Return what offers the functions to all that dial; the caller runs it."""
    caller, functions = functions.caller, _with_slots(worker, functions)
    offer, about = _offer(worker, caller), _about(worker, caller)

    def report(details: Mapping[str, object], event: WorkerEvent) -> None:
        _report(worker, {**about, **details}, event)

    member = listening_worker(
        *(worker, open_ports, _decline_models, report, (offer,), functions)
    )
    caller.on_lent = member.update_lent_slots
    return member


def _with_slots(worker: WorkerContext, functions: FunctionBackend) -> FunctionBackend:
    """Limit the calls to the slots that the owner lends.

    Coordinators of other programs learn of no limit, and send any number of calls.
    """
    slots = EngineSlots(functions.caller.slots, worker.throttle)
    return replace(functions, slots=slots)


def _offer(worker: WorkerContext, caller: FunctionCaller) -> Offer:
    features = (
        {Feature.VALUES, Feature.CODE} if caller.trusts_code else {Feature.VALUES}
    )
    return Offer(
        kinds=frozenset({JobKind.TASK, JobKind.CALL, JobKind.CALL_STREAM}),
        slots=caller.slots,
        features=frozenset(features),
        only_for=frozenset(worker.config.only_for),
        privacy=worker.privacy,
        price=worker.config.price,
        tasks=caller.names,
        device=worker.device,
        public_key=worker.signer.public_key.hex() if worker.signer else "",
        pythons=frozenset({PYTHON}),
    )


def _about(worker: WorkerContext, caller: FunctionCaller) -> Mapping[str, object]:
    """Return the details of the offer, for the user."""
    return {
        "tasks": sorted(caller.names),
        "slots": caller.slots,
        "trust_code": caller.trusts_code,
        "wire": worker.target.protocol.name,
    }


def _report(
    worker: WorkerContext, about: Mapping[str, object], event: WorkerEvent
) -> None:
    """Report an event, and on joining that --trust-code has no effect."""
    if event.kind == "joined" and about["trust_code"] and not worker.target.token:
        event = replace(event, reason=CODE_WITHOUT_TOKEN)
    worker.report(worker.name, about, event)


def _decline_models(work: Work) -> None:
    """Decline work for models."""


async def resolve_call_target(
    url: str, wire: str, token: str, data: Path
) -> join_target.JoinTarget:
    """Return the target for functions; the arguments are as for ``resolve_target``.

    With a ``wire`` for functions, the URL may be that of a peer on it; else it is that
    of a Shoal coordinator, which reports its port for functions, or of another
    program's that gives out tasks: the wire then carries tasks only.

    Raises ConfigError if no wire carries functions, or the coordinator gives out
    neither calls nor tasks.
    """
    wires = {each.name: each for each in discover().values() if supports_calls(each)}
    if not wires:
        raise ConfigError("--tasks: no installed protocol supports functions")
    if url and urlsplit(url).scheme not in join_target.HTTP:
        if wire not in wires:
            peers = [each.name for each in wires.values() if each.address is not None]
            raise ConfigError(
                f"{url.partition('?')[0]}: --tasks needs a coordinator at "
                f"http://HOST:PORT, or a peer with --wire {' or '.join(peers)}"
            )
        plain, fingerprint = without_fingerprint(token)
        if not plain:
            url, plain = _in_stored_fleet(url, wires[wire], data)
        return join_target.JoinTarget(url, wires[wire], plain, fingerprint)
    named = discover().get(wire)
    task_wire = named if named is not None and _runs_only_tasks(named) else None
    try:
        coordinator = await join_target.resolve_target(url, "auto", token, data)
    except ConfigError:  # an unknown program, whose wire the user knows
        if task_wire is None:
            raise
        return await join_target.resolve_target(url, wire, token, data)
    by_default = next((each for each in wires.values() if each.preferred), None)
    target = replace(
        coordinator,
        protocol=wires.get(wire) or by_default or next(iter(wires.values())),
    )
    if _runs_only_tasks(coordinator.protocol):
        return coordinator
    if not coordinator.protocol.encrypts:
        raise ConfigError(
            f"{coordinator.display_url} does not call functions; leave out --tasks, or "
            "join a coordinator of `shoal serve`"
        )
    if target.protocol.address is None:  # it has no port of its own
        if coordinator.unreachable and task_wire is not None:
            return replace(coordinator, protocol=task_wire)
        return target
    try:
        direct = await join_target.resolve_direct(target)
    except Unavailable:  # machines start in any order
        if task_wire is not None:
            return replace(coordinator, protocol=task_wire, direct="")
        return replace(target, direct=join_target.placeholder_direct(target.url))
    if not direct:
        raise ConfigError(
            f"{coordinator.display_url} has no port for functions: its --join-token is "
            "too short (see its log at start), or a proxy hides the port"
        )
    return replace(target, direct=direct)


def _in_stored_fleet(
    url: str, protocol: AnyWireProtocol, data: Path
) -> tuple[str, str]:
    """Return a peer's URL, and the token of the fleet that this machine is paired with.

    The token is empty if it is paired with none, or the peer belongs to another one.

    Raises ConfigError if the file with the token is damaged.
    """
    fleets = protocol.fleets
    stored = None if fleets is None else load_fleet(data, fleets)
    if fleets is None or stored is None:
        return url, ""
    token, name = stored
    within = fleets.within(url, name)
    return (url, "") if within is None else (within, token)


def _runs_only_tasks(protocol: AnyWireProtocol) -> bool:
    """Return whether workers get tasks on a wire, but no calls and no code.

    Shoal's coordinators have a better way for both.
    """
    carries_tasks = JobKind.TASK in protocol.kinds and not protocol.encrypts
    return carries_tasks and not supports_calls(protocol)


def check_task_options(
    config: JoinConfig, target: join_target.JoinTarget, *, models: bool
) -> None:
    """Raise ConfigError for options that a wire for tasks cannot serve.

    ``models``: the same connection offers models too.
    """
    if not config.tasks:
        raise ConfigError(
            f"--trust-code: {target.display_url} sends no code; offer tasks with "
            "--tasks MODULE"
        )
    if models and (cluster := cluster_in(config.engine)):
        raise ConfigError(
            f"--engine {cluster}: the protocol {target.protocol.name} has one "
            "connection for both tasks and models; offer only one of them"
        )


def supports_calls(protocol: AnyWireProtocol) -> bool:
    """Return whether a wire carries function calls."""
    return JobKind.CALL in protocol.kinds


RAY, DASK = CLUSTERS = "ray", "dask"  # their names among the engines
SERVE = local_servers.ServerLocation(8000, "Ray Serve")


def cluster_in(engines: Collection[str]) -> str:
    """Return the cluster among the engines, or nothing.

    Raises ConfigError if there are two.
    """
    named = [each for each in CLUSTERS if each in engines]
    if len(named) > 1:
        raise ConfigError("--engine: join each cluster with a worker of its own")
    return named[0] if named else ""


async def cluster_engines(
    engines: Sequence[str], *, tasks: bool, serve: local_servers.ServerLocation = SERVE
) -> tuple[str, ...]:
    """Return the engines to open in place of a cluster: Ray Serve, if it has models.

    An engine given by its URL stands for Ray Serve.

    Raises ConfigError if there is neither Ray Serve nor a task.
    """
    cluster = cluster_in(engines)
    others = tuple(each for each in engines if each != cluster)
    if cluster == DASK:
        if not tasks:
            raise ConfigError("--engine dask runs functions: add --tasks MODULE")
        return others
    if any(each.startswith(("http://", "https://")) for each in others):
        return others
    found = await local_servers.find_servers([serve])
    if not found and not tasks:
        raise ConfigError(
            f"--engine ray: Ray Serve has no models at http://{local_servers.LOOPBACK}:"
            f"{serve.port}{serve.path}; name its URL with another --engine, or offer "
            "functions with --tasks MODULE"
        )
    if not found:
        print(
            f"Ray Serve has no models at port {serve.port}: offering tasks only",
            file=sys.stderr,
        )
    return *others, *found


def cluster_caller(
    config: JoinConfig,
) -> "tuple[type[RayCaller] | type[DaskCaller], str]":
    """Return what calls functions in the cluster, and its address.

    Raises ConfigError if Dask is not installed; for Ray, ``start`` does.
    """
    if cluster_in(config.engine) == RAY:
        return RayCaller, config.ray_address
    if find_spec("distributed") is None:
        raise ConfigError(
            f"--engine dask: Dask is not installed: {install_extra('dask')}"
        )
    from shoal.tasks.on_dask.caller import DaskCaller  # late: with Dask

    return DaskCaller, config.dask_address


async def cluster_membership(
    config: JoinConfig,
    target: join_target.JoinTarget,
    stack: AsyncExitStack,
    create_member: CreateMember,
    on_event: Callable[[WorkerEvent], None],
) -> FunctionOffers:
    """Connect to the cluster; leaving ``stack`` disconnects.

    Raises ConfigError if the cluster or a module with tasks is unusable.
    """
    blobs = await asyncio.to_thread(BlobCache)
    stack.push_async_callback(blobs.close)

    async def connect() -> RemoteFunctionCaller:
        kind, address = cluster_caller(config)
        caller = kind(
            config.tasks,
            address,
            config.slots,
            trust_code=config.trust_code,
            variables=_coordinator_variables(target),
        )
        try:
            await caller.start()
            check_tasks(config, caller.names)
        except BaseException:
            await caller.close()
            raise
        return caller

    offers = FunctionOffers(
        await connect(),
        connect,
        lambda caller: create_member(FunctionBackend(caller, blobs)),
        on_event,
    )
    stack.push_async_callback(offers.close)
    return offers
