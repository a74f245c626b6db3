"""The operators' API of deployments: which models are kept loaded, and where."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Literal

import msgspec

from shoal.config.schedule import parse_window
from shoal.coordinator.loads import load_states
from shoal.coordinator.placer import deployments_at, is_due, local_time
from shoal.domain.credentials import Scope
from shoal.domain.errors import ConfigError, InvalidRequest, NotFound
from shoal.domain.facts import DeploymentSet
from shoal.domain.ids import WorkerId, peer_of
from shoal.domain.work import HubModel, ModelAction, Shard
from shoal.gateway.context import ModelsGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.operation import ANYTHING, Operations
from shoal.models.model_hub import ModelHub, parse_hub_name
from shoal.peers.peer_directory import PeerDirectory
from shoal.pool.inputs import DeploymentOrder
from shoal.pool.models.aliases import name_rejection
from shoal.pool.models.demand import present_placement
from shoal.pool.models.groups import fits_alone, plan_group
from shoal.pool.models.machine import Described, Machine, kind_of
from shoal.pool.models.placement import Placement
from shoal.pool.roster import SPECIAL_QUEUES, suggest_names

api = Operations()

REPLICAS_MAX = 1000
DEPLOYMENTS_MAX = 1000
CONTEXT_MAX = 1 << 24  # tokens
SLOTS_MAX = 1024
IDLE_MAX = 30 * 86_400.0  # seconds
WINDOWS_MAX = 32  # times of a timetable
NAME_MAX = 256  # characters of a group's
MACHINES_MAX = 1000  # that a deployment names


class ReplicaPart(msgspec.Struct, frozen=True):
    """A machine's part of a model that several run; ``bytes`` are of memory."""

    node: str
    name: str
    layers: int
    bytes: int


class Replica(msgspec.Struct, frozen=True):
    """A machine that has the model loaded, or is loading or unloading it.

    ``step``, ``bytes``, ``size`` and ``seconds`` are as in the ``loading`` of an error.
    ``job`` is the order that it carries out; null: none.  ``parts`` are those of all
    machines that run it together, this one's last; empty: it runs there alone.
    """

    node: str
    name: str
    state: Literal["loaded", "loading", "unloading"]
    busy: bool = False
    job: str | None = None
    step: str = ""
    bytes: int | None = None
    size: int | None = None
    seconds: float | None = None
    parts: list[ReplicaPart] = []


class DeploymentInfo(msgspec.Struct, frozen=True):
    """A deployment, as it was set, and what there is of it.

    ``auto``: between ``replicas`` and ``most`` machines have the model, by demand.
    ``why`` says why there are fewer replicas than it asks for; null: there are enough.
    """

    name: str
    replicas: int
    auto: bool
    most: int | None
    on: tuple[str, ...]
    pinned: bool
    idle: float | None
    context: int | None
    slots: int | None
    exclusive_group: str
    schedule: tuple[str, ...]
    hub: HubModel | None
    by: str
    present: list[Replica]
    why: str | None


class DeploymentList(msgspec.Struct, frozen=True):
    data: list[DeploymentInfo]


class SetDeployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """On how many machines a model is kept loaded, and on which.

    ``most``: at most so many, by demand, and at least ``replicas``; null: just so many.
    ``on`` names machines, as `shoal status` shows them; empty: any.  ``pinned``: no
    other model evicts it.  ``idle``: seconds without a request after which a replica
    beyond the least is unloaded; null: never.  ``context`` is in tokens, for each of
    the ``slots``; null: as the machine chooses.  A machine has at most one model of an
    ``exclusive_group``; empty: of none.  ``schedule``: only at these times, such as
    ``mon-fri 8:00-18:00`` by the coordinator's clock; empty: always.  ``hub``: where
    machines that copy models get this one if none of the pool has it: the repository,
    the GGUF file (the first of its parts), the hash of the commit, and the bytes of all
    files; or ``ORGANIZATION/NAME[:QUANTIZATION]``, of which the coordinator asks the
    hub; null: nowhere.
    """

    replicas: int = 1
    most: int | None = None
    on: list[str] = []
    pinned: bool = False
    idle: float | None = None
    context: int | None = None
    slots: int | None = None
    exclusive_group: str = ""
    schedule: list[str] = []
    hub: HubModel | str | None = None


class RemovedDeployment(msgspec.Struct, frozen=True):
    name: str
    removed: bool = True


@api.get(
    "/admin/deployments", "List the deployments of models", Scope.MONITOR, lists=True
)
async def list_deployments(gateway: ModelsGateway) -> DeploymentList:
    deployments = gateway.hub.pool.deployments
    if not deployments:
        return DeploymentList([])
    machines, placement = _present(gateway)
    why = {**placement.pending, **placement.unplaced}
    return DeploymentList(
        [
            _info(gateway, deployments[name], machines, why.get(name))
            for name in sorted(deployments)
        ]
    )


@api.put(
    "/admin/deployments/{name}",
    "Keep a model loaded",
    Scope.ADMIN,
    pattern=ANYTHING,
)
async def set_deployment(
    gateway: ModelsGateway, caller: ApiCaller, name: str, body: SetDeployment
) -> DeploymentInfo:
    pool = gateway.hub.pool
    if (reason := name_rejection(name)) is not None:
        raise InvalidRequest(reason)
    if name not in pool.deployments and len(pool.deployments) >= DEPLOYMENTS_MAX:
        raise InvalidRequest(
            f"there are {DEPLOYMENTS_MAX} deployments already: remove some first"
        )
    _check(body)
    hub = await _locate(body.hub) if isinstance(body.hub, str) else body.hub
    deployment = DeploymentSet(
        name,
        body.replicas,
        caller.name,
        body.most or 0,
        tuple(body.on),
        body.pinned,
        body.idle,
        body.context or 0,
        body.slots or 0,
        body.exclusive_group,
        tuple(body.schedule),
        hub,
    )
    machines, _ = _present(gateway)
    for wanted in body.on:
        if not any(machine.is_one_of([wanted]) for machine in machines):
            raise InvalidRequest(_unknown_machine(wanted, machines), "on")
    known = name in pool.roster and name not in SPECIAL_QUEUES
    if not known and not any(m.library.fetches for m in machines):
        hint = suggest_names(name, pool.roster.loadable, "`shoal models ls` lists all")
        none = "no machine has a model that it could load"
        raise NotFound(f"no machine can load {name}: {hint or none}")
    await gateway.hub.process(DeploymentOrder(name, deployment, caller.name))
    machines, placement = _present(gateway)
    why = {**placement.pending, **placement.unplaced}.get(name)
    set_now = _info(gateway, deployment, machines, why)
    # The orders follow in a moment.
    names = {machine.id: machine.name for machine in machines}
    set_now.present.extend(
        Replica(peer_of(WorkerId(work.machine)), names[work.machine], "loading")
        for work, _ in placement.orders
        if work.name == name and work.action is ModelAction.LOAD
    )
    return set_now


@api.delete(
    "/admin/deployments/{name}",
    "Keep a model loaded no longer",
    Scope.ADMIN,
    pattern=ANYTHING,
)
async def remove_deployment(
    gateway: ModelsGateway, caller: ApiCaller, name: str
) -> RemovedDeployment:
    deployments = gateway.hub.pool.deployments
    if name not in deployments:
        hint = suggest_names(name, deployments, "`shoal models deployments` lists all")
        raise NotFound(f"there is no deployment {name[:80]!r}: {hint or 'none is set'}")
    await gateway.hub.process(DeploymentOrder(name, None, caller.name))
    return RemovedDeployment(name)


class SplitQuery(msgspec.Struct, frozen=True):
    """``on`` names the machines that may have a part, between commas; empty: any."""

    on: str = ""


class SplitPlan(msgspec.Struct, frozen=True):
    """How a model is split over machines, or would be; ``why`` it would not, or empty.

    ``needed``: no machine with its file has the memory to run it alone.  The last of
    the ``parts`` is that of the machine which runs it.  ``tokens_per_second`` is what
    the memory of the machines allows, for one answer; null: it is split already.
    ``load_seconds`` is how long the layers are sent, if none is cached; null: the lines
    between the machines have not been measured, or it is split already.
    """

    model: str
    needed: bool
    parts: list[ReplicaPart]
    tokens_per_second: float | None
    load_seconds: float | None
    why: str


@api.get(
    "/admin/splits/{name}",
    "Show how a model would be split over machines",
    Scope.MONITOR,
    pattern=ANYTHING,
)
async def show_split(gateway: ModelsGateway, name: str, query: SplitQuery) -> SplitPlan:
    machines = present_machines(gateway)
    on = [each.strip() for each in query.on.split(",") if each.strip()]
    if not any(each.library.find(name) for each in machines):
        hint = suggest_names(name, gateway.hub.pool.roster.loadable, "")
        raise NotFound(f"no machine has the file of {name}{hint and f'; {hint}'}")
    now, names = gateway.clock.now(), {each.id: each.name for each in machines}
    for machine in machines:
        loan = machine.library.loan
        if loan is not None and (group := loan.group(name)) is not None:
            return SplitPlan(name, True, _parts(group.shards, names), None, None, "")
    found, needed = plan_group(machines, name, on, now), True
    if not on:
        needed = not fits_alone(machines, name, now)
    if isinstance(found, str):
        return SplitPlan(name, needed, [], None, None, found)
    parts = _parts(found.shards, names)
    speed, load = round(1 / found.seconds, 2), found.load_seconds
    load = None if load is None else round(load, 1)
    return SplitPlan(name, needed, parts, speed, load, "")


def _unknown_machine(name: str, machines: list[Machine]) -> str:
    known = [machine.shown_name for machine in machines]
    hint = suggest_names(name, known, "`shoal models ls` lists them")
    none = "no machine loads models for the pool: `shoal join --load local` does"
    return f"on: no machine {name[:80]!r} loads models: {hint or none}"


def _check(body: SetDeployment) -> None:
    """Raise InvalidRequest that names a number out of its range."""
    for field, value, least, most in (
        ("replicas", body.replicas, 0, REPLICAS_MAX),
        ("most", body.most, max(1, body.replicas), REPLICAS_MAX),
        ("context", body.context, 1, CONTEXT_MAX),
        ("slots", body.slots, 1, SLOTS_MAX),
        ("idle", body.idle, 0, IDLE_MAX),
    ):
        if value is not None and not least <= value <= most:
            raise InvalidRequest(f"{field}: expected {least} to {most:.0f}", field)
    if not body.replicas and not body.most:
        raise InvalidRequest(
            "replicas: expected 1 or more, or 0 with `most`; to keep a model loaded no "
            "longer, delete its deployment",
            "replicas",
        )
    if len(body.schedule) > WINDOWS_MAX:
        raise InvalidRequest(
            f"schedule: expected at most {WINDOWS_MAX} times", "schedule"
        )
    for window in body.schedule:
        try:
            parse_window(window)
        except ConfigError as error:
            raise InvalidRequest(str(error).removeprefix("--"), "schedule") from error
    group = body.exclusive_group
    if len(group) > NAME_MAX or not group.isprintable():
        raise InvalidRequest(
            f"exclusive_group: expected up to {NAME_MAX} printable characters",
            "exclusive_group",
        )
    if isinstance(body.hub, HubModel) and not (body.hub.is_usable and body.hub.size):
        raise InvalidRequest(
            "hub: expected the repository, a GGUF file in it, the hash of a commit (40 "
            "digits), and the size in bytes",
            "hub",
        )
    if len(body.on) > MACHINES_MAX:
        raise InvalidRequest(f"on: expected at most {MACHINES_MAX} machines", "on")


async def _locate(text: str) -> HubModel:
    """Ask the hub where a model is.  Raises InvalidRequest, Unavailable."""
    if (name := parse_hub_name(text)) is None:
        raise InvalidRequest(
            f"hub: expected ORGANIZATION/NAME[:QUANTIZATION], not {text[:80]!r}", "hub"
        )
    try:
        return await asyncio.to_thread(lambda: ModelHub().locate(name))
    except ConfigError as error:
        raise InvalidRequest(f"hub: {error}", "hub") from error


def _present(gateway: ModelsGateway) -> tuple[list[Machine], Placement]:
    pool, rules = gateway.hub.pool, gateway.placement
    return present_placement(
        pool,
        gateway.clock.now(),
        partial(describe_machine, gateway.directory),
        rules,
        deployments_at(pool.deployments, local_time(gateway.clock), rules),
    )


def describe_machine(directory: PeerDirectory, peer: str) -> Described:
    """Return what a machine says about itself, by its peer's name."""
    profile = directory.profile_of(peer)
    return Described(profile.name, kind_of(profile.hardware))


def present_machines(gateway: ModelsGateway) -> list[Machine]:
    """Return the machines that load models for the pool."""
    return _present(gateway)[0]


def replicas(
    gateway: ModelsGateway, machines: list[Machine], model: str
) -> Iterator[Replica]:
    """Yield the machines that have a model loaded, load it or unload it."""
    hub, now = gateway.hub, gateway.clock.now()
    states = {
        each.machine: each for each in load_states(hub.pool, model, hub.answers, now)
    }
    names = {each.id: each.name for each in machines}
    for machine in machines:
        peer = peer_of(WorkerId(machine.id))
        order = hub.pool.model_orders.find(machine.id, model)
        loaded = machine.loaded.get(model)
        job = None if order is None else order.job_id
        loan = machine.library.loan
        group = None if loan is None else loan.group(model)
        if order is not None and group is None:
            group = order.order
        parts = _parts(() if group is None else group.shards, names)
        if loaded is not None and job is None:
            yield Replica(peer, machine.name, "loaded", loaded.busy, parts=parts)
        elif loaded is not None:
            yield Replica(peer, machine.name, "unloading", loaded.busy, job)
        elif (load := states.get(peer)) is not None:
            progress = (load.step, load.bytes, load.size, load.seconds)
            yield Replica(peer, machine.name, "loading", False, job, *progress, parts)


def _parts(shards: Iterable[Shard], names: Mapping[str, str]) -> list[ReplicaPart]:
    """Return the parts of a model that machines run together."""
    return [
        ReplicaPart(
            *(peer_of(WorkerId(each.machine)), names.get(each.machine, "")),
            *(each.layers, each.memory),
        )
        for each in shards
    ]


def _info(
    gateway: ModelsGateway,
    deployment: DeploymentSet,
    machines: list[Machine],
    why: str | None,
) -> DeploymentInfo:
    if not is_due(deployment, local_time(gateway.clock)):
        why = f"it is kept loaded only at {', '.join(deployment.schedule)}"
    return DeploymentInfo(
        deployment.name,
        deployment.replicas,
        bool(deployment.most),
        deployment.most or None,
        deployment.on,
        deployment.pinned,
        deployment.idle,
        deployment.context or None,
        deployment.slots or None,
        deployment.exclusive_group,
        deployment.schedule,
        deployment.hub,
        deployment.by,
        [*replicas(gateway, machines, deployment.name)],
        why,
    )
