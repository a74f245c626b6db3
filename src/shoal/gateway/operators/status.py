"""The operators' API of workers, open jobs, and the nodes of fleets."""

from typing import Any

import msgspec

import shoal
from shoal.domain.credentials import Scope
from shoal.domain.ids import WorkerId, peer_of
from shoal.domain.worker import Hardware, MachineHealth
from shoal.gateway.context import OperatorsGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.responses import without_keys
from shoal.gateway.operators.workers import (
    SuspensionInfo,
    order_infos,
    stored_orders,
    suspension_state,
)
from shoal.peers.peer_directory import PeerDirectory
from shoal.pool.models.groups import describe_loan
from shoal.pool.state import PoolState
from shoal.pool.worker import Worker
from shoal.protocols.seam.endpoints import ListedNode
from shoal.protocols.seam.relay import RelayMachine, RelayStanding
from shoal.transports.clock import Clock

api = Operations()


class NodeHardware(msgspec.Struct, frozen=True):
    """A node's hardware, as it reports it; sizes in GB, per second for bandwidth."""

    chip: str
    memory_gb: float
    gpu_cores: int
    bandwidth_gb: float


class NodeStatus(msgspec.Struct, frozen=True):
    """A node; ``since`` is in Unix seconds.

    ``rank`` is null for a node that does not count for now; ``weight`` is its share of
    the work.
    """

    wire: str
    name: str  # empty if unknown
    address: str  # empty for this coordinator itself
    state: str  # in the protocol's terms
    since: float | None
    score: float
    rank: int | None
    weight: float
    coordinator: bool
    remark: str
    hardware: NodeHardware | None  # null if the node has not reported it


class NodeList(msgspec.Struct, frozen=True):
    data: list[NodeStatus]


def clock_offset(clock: Clock) -> float:
    """Return the seconds from monotonic to Unix time."""
    return clock.wall() - clock.now()


def node_statuses(gateway: OperatorsGateway, offset: float) -> list[NodeStatus]:
    """Return the nodes of each protocol that has others than this coordinator.

    ``offset`` is that of the clock: with the same one, the same state gives equal
    values.
    """
    return [
        _node_status(offset, wire, each)
        for wire, prober in gateway.probers
        if len(listed := prober.nodes()) > 1
        for each in listed
    ]


def _node_status(offset: float, wire: str, node: ListedNode) -> NodeStatus:
    return NodeStatus(
        wire,
        node.name,
        node.address,
        node.state,
        _wall_time(offset, node.since),
        node.score,
        node.rank,
        round(node.weight, 4),
        node.coordinator,
        node.note,
        None
        if node.hardware is None
        else msgspec.convert(node.hardware, NodeHardware, from_attributes=True),
    )


def _wall_time(offset: float, at: float | None) -> float | None:
    """Return a monotonic time in Unix seconds."""
    return None if at is None else offset + at


UNKNOWN_HEALTH = MachineHealth()


class WorkerStatus(msgspec.Struct, frozen=True):
    id: WorkerId
    models: list[str]
    slots: int
    busy: int
    draining: str  # why, or empty
    suspension: str | None  # pending, paused, draining, drained or removed
    remark: str
    kinds: list[str]
    features: list[str]
    context: int  # tokens; 0: unknown
    only_for: list[str]  # names of keys; empty: all
    privacy: str | None  # the only privacy class of jobs that it accepts; null: any
    tokens_per_second: float | None  # of one answer, recently
    cancels: bool
    tasks: list[str]  # names; empty: any, if it runs tasks
    device: str | None
    public_key: str | None  # hexadecimal; null if its protocol has none
    proven: bool  # whether it has proven possession of the private key
    price: str  # the price it asks for, in its own format
    points: int  # penalty points; 3 exclude it for a day
    cpu: float | None  # percent of all processors, as reported
    memory: float | None  # percent, as reported
    unfit: str  # why it gets no jobs for now, or empty
    queued: int  # jobs of others there
    speed: float  # share of its full speed, at most 1
    temperature: float | None  # °C, of its hottest processor or GPU, as reported
    thermal: str  # nominal, fair, serious or critical; nominal if it is not reported
    throttle: int  # percent of its speed that its owner lends; 0: paused
    neighbour: bool  # whether it is another pool
    peer: str | None  # its peer, where one peer is several workers
    peer_name: str  # what that calls itself, or empty
    protection: str | None  # of its connection: plain, noise, teale or tls
    connected_at: float | None  # Unix seconds
    engine: str  # workers of its peer with the same one share its slots; empty: none


class PeerDetails(msgspec.Struct, frozen=True):
    """What a peer says about itself, unverified; empty or null: it does not say."""

    id: str  # its wire and name
    name: str  # what it calls itself
    hardware: Hardware | None
    owner: str  # the user that it belongs to
    organization: str
    protocol_version: int | None
    registered_at: float | None  # Unix seconds
    remark: str  # if its protocol is newer
    release: str  # of its program, if that is Shoal's


class PeerStatus(PeerDetails, frozen=True):
    """A connected peer."""

    protection: str
    submits_jobs: bool
    pending: bool  # whether an operator has to approve it
    shared: str  # the memory that it lends, and the models that it runs with others
    public_key: str | None  # hexadecimal; null if it has proven none


class RefusedPeerStatus(PeerDetails, frozen=True):
    """A connected peer that is not admitted."""

    reason: str


class JobCounts(msgspec.Struct, frozen=True):
    queued: int
    running: int


class RelayStatus(msgspec.Struct, frozen=True):
    """This coordinator's relay and the connections to it."""

    wire: str
    open: bool  # whether any node may use it
    guests: int  # registered nodes, without the coordinator itself
    strangers: int  # connections that have not registered


class CoordinatorStatus(msgspec.Struct, frozen=True):
    """The status; without the scope ``admin``, ``nodes`` to ``relays`` are empty."""

    version: str
    started_at: float  # Unix seconds
    ready: bool
    why_not: str  # empty if it is ready
    degraded: str  # why it is slow; empty if it is not
    models: list[str]
    workers: list[WorkerStatus]
    jobs: JobCounts
    nodes: list[NodeStatus]  # of protocols with fleets
    peers: list[PeerStatus]  # admitted peers, whether or not they have models
    refused: list[RefusedPeerStatus]  # connected peers that are not admitted
    orders: list[SuspensionInfo]  # of operators, about workers
    relays: list[RelayStatus]
    unencrypted: dict[str, str]  # by wire: the peers on other machines


@api.get("/admin/status", "Show workers and jobs", Scope.READ)
async def show_status(
    gateway: OperatorsGateway, caller: ApiCaller
) -> CoordinatorStatus:
    pool, why_not = gateway.hub.pool, gateway.hub.unavailable_reason
    failure = gateway.hub.store_health.failure
    if failure is not None and caller.has_scope(Scope.MONITOR):
        why_not = failure.located
    offset = clock_offset(gateway.clock)
    status = CoordinatorStatus(
        shoal.__version__,
        gateway.started_at,
        why_not is None,
        why_not or "",
        gateway.hub.degraded_reason or "",
        sorted(pool.roster.models),
        [worker_status(gateway, worker, offset) for worker in pool.serving.values()],
        job_counts(pool),
        node_statuses(gateway, offset),
        [
            peer_status(peer, gateway.directory, pool)
            for peer in gateway.directory.connected
        ],
        refused_peer_statuses(gateway.directory),
        order_infos(gateway, await stored_orders(gateway)),
        relay_statuses(gateway),
        dict(gateway.unencrypted),
    )
    if not caller.has_scope(Scope.MONITOR):
        status = _as_seen_by(caller, status)
    return status


@api.get("/admin/nodes", "List the nodes of fleets", Scope.MONITOR)
async def list_nodes(gateway: OperatorsGateway) -> NodeList:
    nodes = node_statuses(gateway, clock_offset(gateway.clock))
    return NodeList(nodes)


def _as_seen_by(caller: ApiCaller, status: CoordinatorStatus) -> CoordinatorStatus:
    """Return a status without machines' identities and other keys' names."""
    return msgspec.structs.replace(
        status,
        workers=[
            msgspec.structs.replace(
                worker,
                id=WorkerId(without_keys(worker.id)),
                remark=without_keys(worker.remark),
                only_for=[caller.name] if worker.only_for else [],
                public_key=None,
                peer=None if worker.peer is None else without_keys(worker.peer),
                peer_name="",
            )
            for worker in status.workers
            if not worker.only_for or caller.name in worker.only_for
        ],
        nodes=[],
        peers=[],
        refused=[],
        orders=[],
        relays=[],
    )


def job_counts(pool: PoolState) -> JobCounts:
    """Count the open jobs."""
    return JobCounts(pool.queued, len(pool.jobs) - pool.queued)


def relay_statuses(gateway: OperatorsGateway) -> list[RelayStatus]:
    """Return the status of the coordinator's relays."""
    return [_relay_status(wire, relay) for wire, relay in gateway.relays]


def _relay_status(wire: str, relay: RelayMachine) -> RelayStatus:
    peers = relay.count_peers()
    return RelayStatus(
        wire, relay.is_open, peers[RelayStanding.GUEST], peers[RelayStanding.STRANGER]
    )


def peer_status(peer: str, directory: PeerDirectory, pool: PoolState) -> PeerStatus:
    """Return the status of a connected peer."""
    joined = directory.connected[peer]
    return PeerStatus(
        **_details(peer, directory),
        protection=joined.protection.value,
        submits_jobs=joined.submits_jobs,
        pending=pool.approvals.is_pending(peer, joined.public_key),
        shared=_shared_models(peer, directory, pool),
        public_key=joined.public_key,
    )


def _shared_models(peer: str, directory: PeerDirectory, pool: PoolState) -> str:
    """Return what a peer lends to models of others, and runs with others, or empty."""
    if (loan := pool.loan_of(peer)) is None:
        return ""

    def name_of(machine: str) -> str:
        other = peer_of(WorkerId(machine))
        return directory.profile_of(other).name or other

    return describe_loan(loan, name_of)


def refused_peer_statuses(directory: PeerDirectory) -> list[RefusedPeerStatus]:
    """Return the connected peers that are not admitted."""
    return [
        RefusedPeerStatus(**_details(peer, directory), reason=reason)
        for peer, reason in directory.refusals.items()
    ]


def _details(peer: str, directory: PeerDirectory) -> dict[str, Any]:
    """Return the fields of ``PeerDetails``."""
    profile = directory.profile_of(peer)
    return {
        "id": peer,
        "name": profile.name,
        "hardware": profile.hardware,
        "owner": profile.owner,
        "organization": profile.organization,
        "protocol_version": profile.protocol_version,
        "registered_at": profile.registered_at,
        "remark": profile.remark,
        "release": profile.release,
    }


def worker_status(
    gateway: OperatorsGateway, worker: Worker, offset: float
) -> WorkerStatus:
    """Return the status of a connected worker; ``offset`` is that of the clock."""
    hub, directory = gateway.hub, gateway.directory
    health = hub.health.get(worker.id, UNKNOWN_HEALTH)
    via = hub.peer_route_of(worker.id)
    offer, condition = worker.offer, worker.load
    return WorkerStatus(
        worker.id,
        sorted(offer.models),
        offer.slots,
        worker.used_slots,
        worker.draining,
        suspension_state(hub.pool, worker),
        f"last resort: {offer.last_resort}" if offer.last_resort else offer.remark,
        sorted(kind.value for kind in offer.kinds),
        sorted(feature.value for feature in offer.features),
        offer.context,
        sorted(offer.only_for),
        None if offer.privacy is None else offer.privacy.value,
        None if worker.pace is None else round(worker.pace, 1),
        worker.cancels,
        sorted(offer.tasks),
        None if offer.device is None else offer.device.value,
        offer.public_key or None,
        offer.proven,
        offer.price,
        worker.points,
        health.cpu,
        health.memory,
        worker.unfit,
        condition.queued,
        condition.speed,
        health.temperature,
        condition.thermal.value,
        condition.throttle,
        offer.neighbour,
        None if via is None else via.name,
        "" if via is None else directory.profile_of(peer_of(worker.id)).name,
        None if via is None else via.protection.value,
        _wall_time(offset, hub.connected_at(worker.id)),
        offer.engine,
    )
