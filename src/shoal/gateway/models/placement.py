"""Models for operators: where each is, where it would fit, and which peers share it."""

import asyncio
from collections.abc import Collection, Iterable
from itertools import islice

import msgspec

from shoal.domain.credentials import Scope
from shoal.domain.errors import InvalidRequest
from shoal.domain.ids import WorkerId, peer_of
from shoal.domain.worker import MEMORY_FACTOR, Hardware
from shoal.gateway.context import ModelsGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.operation import ANYTHING, Operations
from shoal.gateway.http.responses import without_keys
from shoal.gateway.models import listing
from shoal.gateway.models.deployments import Replica, present_machines, replicas
from shoal.models.names import NAME_MAX, estimated_size
from shoal.pool.models.machine import Machine
from shoal.pool.worker import Worker

api = Operations()
copies = Operations()

GB = 1e9
FITS_MAX = 200  # machines that are examined for a model
TURN = 100  # models that are described in one turn of the loop
SIZED_MAX = 200  # models with a size: workers choose names, and may have many


class ModelPlace(msgspec.Struct, frozen=True):
    """A worker with the model; ``name`` is what its machine calls itself, or empty."""

    id: WorkerId
    name: str
    busy: int
    slots: int


class ModelFit(msgspec.Struct, frozen=True):
    """Whether a machine without the model has the memory for it."""

    node: str
    fits: bool
    why: str


class StoredCopy(msgspec.Struct, frozen=True):
    """A machine that could load the model from its disk, or with its engine.

    ``memory`` is in bytes, with the machine's own settings; null: unknown.
    """

    node: str
    name: str
    size: int | None
    memory: int | None
    quantization: str
    engine: str


class PlacedModel(msgspec.Struct, frozen=True):
    """A model, its workers, and the machines that could load it, or would fit it.

    ``size`` is in bytes; null if it is unknown.  It is ``estimated`` from the name if
    neither the coordinator nor a machine that could load it has said it.  ``context``
    is in tokens; 0: unknown.  ``replicas`` are the machines that have it loaded and
    take orders about it, or are loading or unloading it.
    """

    id: str
    kinds: list[str]
    features: list[str]
    context: int
    size: int | None
    estimated: bool
    workers: list[ModelPlace]
    fits: list[ModelFit]
    stored: list[StoredCopy]
    replicas: list[Replica]
    deployed: bool


class CopyingMachine(msgspec.Struct, frozen=True):
    """A machine that also loads models that others have, or the hub."""

    node: str
    name: str


class PlacedModelList(msgspec.Struct, frozen=True):
    """Models, by name, and the machines that copy models.

    Without the scope ``monitor`` they have no names of machines, and no ``fits``,
    ``stored``, ``replicas`` and ``copying``.
    """

    data: list[PlacedModel]
    copying: list[CopyingMachine]


@api.get(
    "/admin/models",
    "List the models, and where each is or would fit",
    Scope.READ,
    lists=True,
)
async def list_models(gateway: ModelsGateway, caller: ApiCaller) -> PlacedModelList:
    pool, viewer = gateway.hub.pool, listing.seen_by(caller)
    sees_machines = caller.has_scope(Scope.MONITOR)
    machines = _machines(gateway) if sees_machines else []
    hosts = present_machines(gateway) if sees_machines else []
    models: list[PlacedModel] = []
    for summary in sorted(
        listing.model_summaries(pool, viewer), key=lambda each: each.name
    ):
        name = summary.name
        workers = listing.usable_workers(pool, name, viewer.owner)
        if len(models) % TURN == TURN - 1:
            await asyncio.sleep(0)
        stored = [
            copy for host in hosts if (copy := _stored_copy(host, name)) is not None
        ]
        size = known = summary.size or None
        if known is None and len(models) < SIZED_MAX:
            known = await gateway.sharing.own_size(name)
            size = estimated_size(name) if known is None else known
        estimated = size is not None and known is None
        fits = []
        if size is not None:
            having = {peer_of(worker.id) for worker in workers}
            having |= {each.node for each in stored}
            fits = _fits(size, machines, having, estimated=estimated)
        models.append(
            PlacedModel(
                name,
                sorted(kind.value for kind in summary.kinds),
                sorted(feature.value for feature in summary.features),
                summary.context,
                size,
                estimated,
                [_place(gateway, each, named=sees_machines) for each in workers],
                fits,
                stored,
                [*replicas(gateway, hosts, name)],
                name in pool.deployments,
            )
        )
    copying = [
        CopyingMachine(peer_of(WorkerId(each.id)), each.name)
        for each in hosts
        if each.library.fetches
    ]
    return PlacedModelList(models, copying)


def _machines(gateway: ModelsGateway) -> list[tuple[str, Hardware]]:
    """Return the hardware of the connected peers that report it, by their names."""
    directory = gateway.directory
    return [
        (peer, hardware)
        for peer in sorted(directory.connected)
        if (hardware := directory.profile_of(peer).hardware) is not None
    ]


def _fits(
    size: int,
    machines: Iterable[tuple[str, Hardware]],
    having: Collection[str],
    *,
    estimated: bool,
) -> list[ModelFit]:
    """Return on which machines a model would fit, but for those that have it."""
    needed = size * MEMORY_FACTOR
    shown = f"{needed / GB:.1f} GB for the model and its contexts"
    if estimated:
        shown += " (estimated from its name)"
    fits = []
    lacking = (each for each in machines if each[0] not in having)
    for machine, hardware in islice(lacking, FITS_MAX):
        memory, kind = _memory_of(hardware)
        if memory <= 0:
            continue  # not reported
        why = f"{shown}, of {memory:.1f} GB {kind}"
        fits.append(ModelFit(machine, needed <= memory * GB, why))
    return fits


def _memory_of(hardware: Hardware) -> tuple[float, str]:
    """Return the memory that a model would be in, in GB, and what it is called."""
    gpu = hardware.gpu_memory_gb
    if gpu is not None and gpu > 0:
        return gpu, "GPU memory"
    return hardware.memory_gb, "memory"


def _place(gateway: ModelsGateway, worker: Worker, *, named: bool) -> ModelPlace:
    busy, slots = worker.used_slots, worker.offer.slots
    if not named:
        return ModelPlace(WorkerId(without_keys(worker.id)), "", busy, slots)
    name = gateway.directory.profile_of(peer_of(worker.id)).name
    return ModelPlace(worker.id, name, busy, slots)


def _stored_copy(host: Machine, name: str) -> StoredCopy | None:
    """Return how a machine could load a model; None if it could not."""
    library = host.library
    if (known := library.find(name)) is None:
        return None
    return StoredCopy(
        peer_of(WorkerId(host.id)),
        host.name,
        known.size or None,
        known.memory(library.context, library.slots) or None,
        known.quantization,
        known.engine,
    )


class ModelCopy(msgspec.Struct, frozen=True):
    """A copy of a model's files at a peer, or at this coordinator."""

    peer: str  # its wire and name; empty: this coordinator
    name: str  # what it calls itself, or empty
    size: int | None  # bytes, approximate; null if unknown
    address: str  # at which it was dialled; empty if it dialled
    passed_on: bool  # whether the coordinator passes it on to others


class ModelCopies(msgspec.Struct, frozen=True):
    """The peers that share a model, of the number that were asked."""

    model: str
    asked: int
    data: list[ModelCopy]


@copies.get(
    "/admin/models/{model}",
    "Find the peers that share a model",
    Scope.MONITOR,
    pattern=ANYTHING,
)
async def find_model(gateway: ModelsGateway, model: str) -> ModelCopies:
    if not 0 < len(model) <= NAME_MAX or not model.isprintable():
        raise InvalidRequest(f"a model's name has at most {NAME_MAX} characters")
    sharing, directory = gateway.sharing, gateway.directory
    copies = []
    if (size := await sharing.own_size(model)) is not None:
        copies.append(ModelCopy("", "", size, "", passed_on=True))
    sources = [*sharing.sources.all]
    for found in await sharing.sources.find(model, sources):
        peer = found.source.name
        name, address = directory.profile_of(peer).name, directory.address_of(peer)
        passed_on = found.source.passed_on
        copies.append(ModelCopy(peer, name, found.size, address, passed_on))
    return ModelCopies(model, len(sources), copies)
