"""The offer and load of a worker, and what its machine could offer."""

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import lru_cache
from itertools import islice

import msgspec

from shoal.domain.errors import ConfigError, InvalidRequest
from shoal.domain.job import Privacy
from shoal.domain.money import MICROS, Micros, dollars, parse_dollars
from shoal.domain.work import (
    ANY_MODEL,
    CALL_QUEUE,
    MODEL_QUEUE,
    TASK_QUEUE,
    Feature,
    HubModel,
    JobKind,
    ModelOrder,
)

CHAT_ONLY = frozenset({JobKind.CHAT})


class ServedModel(msgspec.Struct, frozen=True):
    """A model that a worker serves, and the features it supports.

    ``context`` is the limit of prompt and completion tokens together; 0: unknown.
    """

    name: str
    kinds: frozenset[JobKind] = CHAT_ONLY
    features: frozenset[Feature] = frozenset()
    context: int = 0


class DeviceKind(Enum):
    """The device kind of a worker."""

    DESKTOP = "desktop"
    PHONE = "phone"

    __hash__ = object.__hash__  # members are singletons, hashed very often


class Suspension(Enum):
    """Why an operator's word keeps a worker from new jobs; the strictest is last.

    All but PENDING are orders, which hold until a resume.
    """

    PENDING = "pending"  # no operator has approved it yet; gets no jobs
    PAUSED = "paused"  # gets no new jobs
    DRAINING = "draining"  # and its jobs may have a limit, after which others have them
    REMOVED = "removed"  # its jobs are handed over, and it is disconnected

    __hash__ = object.__hash__  # members are singletons, hashed very often


class MachineHealth(msgspec.Struct, frozen=True):
    """The health of a machine; None: not measured."""

    cpu: float | None = None  # percent of all processors
    memory: float | None = None  # percent
    jobs: int | None = None
    temperature: float | None = None  # °C, of the hottest processor or GPU


class Hardware(msgspec.Struct, frozen=True):
    """The hardware of a machine, as far as known; sizes in GB of 10^9 bytes.

    ``tier`` is 1 (a large server) to 4 (a small device), as some wires define it; 0:
    not stated.
    """

    chip: str = "unknown"
    chip_family: str = "unknown"
    memory_gb: float = 0.0
    gpu_cores: int = 0
    bandwidth_gb: float = 0.0  # per second, of the memory that holds models
    tier: int = 4
    gpu_backend: str = ""  # cuda, metal, cpu and so on
    platform: str = ""  # linux, macOS, windows and so on
    gpu_memory_gb: float | None = None


UNKNOWN_HARDWARE = Hardware()


class ThermalLevel(Enum):
    """How hot a machine is, from cool to hot."""

    NOMINAL = "nominal"
    FAIR = "fair"
    SERIOUS = "serious"
    CRITICAL = "critical"

    __hash__ = object.__hash__  # with each heartbeat


SPEED_BY_THERMAL_LEVEL: Mapping[ThermalLevel, float] = {
    ThermalLevel.NOMINAL: 1.0,
    ThermalLevel.FAIR: 0.8,
}
"""The relative speed of a machine; hotter ones get no jobs."""

THROTTLE_MAX = 100  # percent: full speed
PAUSED = "paused by its owner"
HANDED_OVER = "handed over: "
"""Begins the reason of a worker whose owner needs the machine back.

It is no worker's fault.  No wire has a field for that.
"""


class WorkerLoad(msgspec.Struct, frozen=True):
    """A worker's load besides this pool's jobs, as it reports it.

    ``unfit`` is the reason why it gets no jobs for now; empty: it may get jobs.
    ``queued`` counts the jobs of other pools, and ``speed`` is the share of its full
    speed, above 0 and at most 1.

    A pool or a worker that describes itself to peers also says how many jobs are
    ``waiting`` for a slot, regardless of their sender, and whether it is ``full``: it
    has slots, and none is free.  ``lent`` counts slots beyond those of the offer: their
    tasks wait for calls of their own, so that other calls may run.

    ``thermal`` and ``throttle``, the percentage of its speed that the owner lends, are
    as reported; ``unfit`` and ``speed`` follow from them.
    """

    unfit: str = ""
    queued: int = 0
    speed: float = 1.0
    waiting: int = 0
    full: bool = False
    lent: int = 0
    thermal: ThermalLevel = ThermalLevel.NOMINAL
    throttle: int = THROTTLE_MAX


def machine_load(
    thermal: ThermalLevel,
    throttle: int = THROTTLE_MAX,
    *,
    sensor: str = "",
    paused: str = "",
) -> WorkerLoad:
    """Return the load of a machine by its heat, and its owner's throttle in percent.

    ``sensor`` describes the sensor that shows the heat, and ``paused`` is why the
    worker pauses, whatever the throttle; empty: it does not.
    """
    throttle = 0 if paused else min(max(throttle, 0), THROTTLE_MAX)
    speed = SPEED_BY_THERMAL_LEVEL.get(thermal)
    if not throttle:
        return WorkerLoad(paused or PAUSED, thermal=thermal, throttle=throttle)
    if speed is None:
        hot = f"too hot: {sensor or thermal.value}"
        return WorkerLoad(hot, thermal=thermal, throttle=throttle)
    speed *= throttle / THROTTLE_MAX
    return WorkerLoad(speed=speed, thermal=thermal, throttle=throttle)


MEMORY_FACTOR = 1.5  # times its size: a model, the contexts of its slots, and a reserve
RESERVE_SHARE = 10  # a tenth of a model's size is for what an engine computes with


LAYERS_MAX = 4096  # of a model


class ModelLayers(msgspec.Struct, frozen=True):
    """The parts of a model that several machines can hold, in bytes.

    ``runs`` are its layers in their order: how many follow one another, and the size of
    each.  ``last`` is what comes after them.  A machine that holds layers computes with
    ``states`` for each token that is read at a time, and the last one with ``scores``
    besides.  What comes before the layers is mapped from the file and takes no memory.
    """

    runs: tuple[tuple[int, int], ...]
    last: int = 0
    states: int = 0
    scores: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each layer."""
        return tuple(size for count, size in self.runs for _ in range(count))

    @property
    def is_usable(self) -> bool:
        """Whether it may be true."""
        numbers = [number for run in self.runs for number in run]
        layers = sum(count for count, _ in self.runs)
        least = min((*numbers, self.last, self.states, self.scores))
        return least >= 0 and 0 < layers <= LAYERS_MAX


class LoadableModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model on a machine's disk, or one that an engine there can load.

    ``size`` is in bytes; 0: unknown.  ``context`` is the longest that it was trained
    for, in tokens; 0: unknown.  ``cache`` is how many bytes of memory each token of a
    slot's context takes; 0: unknown.  ``digest`` is the address of its contents
    (``sha256:`` and hexadecimal); empty: unknown.  ``engine`` is what would load it,
    for users.  ``stays``: it was loaded from the start, and is unloaded only for others
    that need its memory.  ``layers`` says how it may be split over machines; None: it
    may not.  ``hub`` is where its files came from; None: unknown.
    """

    name: str
    size: int = 0
    kinds: frozenset[JobKind] = frozenset({JobKind.CHAT})
    features: frozenset[Feature] = frozenset()
    context: int = 0
    cache: int = 0
    quantization: str = ""
    digest: str = ""
    engine: str = ""
    stays: bool = False
    layers: ModelLayers | None = None
    hub: HubModel | None = None

    def memory(self, context: int, slots: int) -> int:
        """Return the bytes that it needs once it is loaded; 0: unknown."""
        if not self.cache or not context:
            return int(self.size * MEMORY_FACTOR)
        reserve = self.size // RESERVE_SHARE
        return self.size + reserve + self.cache * context * max(1, slots)


class LentShard(msgspec.Struct, frozen=True):
    """The part of a model that a machine holds for others, and where it listens.

    ``order`` is what it was told, with the whole group; ``hosts``, ``port`` and
    ``fingerprint`` are as in ``Shard``.  ``used``: the machine that runs the model is
    connected to it.
    """

    order: ModelOrder
    hosts: tuple[str, ...]
    port: int
    fingerprint: str
    used: bool = False


class MeasuredLink(msgspec.Struct, frozen=True):
    """The way to a machine with which another one has run models.

    ``machine`` is the id of the worker that has its library, and ``round_trip`` the
    seconds there and back.  ``rate`` is how many bytes a second it has taken of its
    layers; 0: unknown, as if the engine was slower than the line.
    """

    machine: str
    round_trip: float
    rate: float = 0.0


class MemoryLoan(msgspec.Struct, frozen=True):
    """What a machine lends to models that other machines run, and runs with others.

    ``memory`` is in bytes, for all shards together; 0: none.  ``runners`` are the keys
    of the machines that it is lent to, in hexadecimal; empty: any machine of the pool.
    ``protocol`` is that of the engine between machines, which must be the same on all,
    and ``key`` the machine's own, with which it runs models.  ``groups`` are the orders
    to load what it runs together with others now.  ``unfit`` is why it lends nothing
    for now; empty: it lends.

    ``holds_last``: the engine gives this machine the last layers of a model that it
    runs with others, as on a GPU; else the first, as on a processor.

    ``round_trip`` is the seconds to the coordinator and back, 0: unknown, and ``links``
    are the ways to machines with which it has run models.
    """

    protocol: str
    key: str
    memory: int = 0
    runners: tuple[str, ...] = ()
    shards: tuple[LentShard, ...] = ()
    groups: tuple[ModelOrder, ...] = ()
    unfit: str = ""
    round_trip: float = 0.0
    links: tuple[MeasuredLink, ...] = ()
    holds_last: bool = False

    @property
    def lends(self) -> bool:
        """Whether its owner lends memory, if not now."""
        return bool(self.memory or self.unfit)

    @property
    def free(self) -> int:
        """The bytes that no shard has."""
        return self.memory - sum(each.order.own_memory for each in self.shards)

    def group(self, model: str) -> ModelOrder | None:
        """Return the order to load a model that it runs with others, if it does."""
        return next((each for each in self.groups if each.name == model), None)


class ModelLibrary(msgspec.Struct, frozen=True, cache_hash=True):
    """The models that a machine can load, and how much of its memory they may take.

    ``memory`` is in bytes, for all models of the library that are loaded at a time; 0:
    unknown.  ``bandwidth`` is that of the memory that holds them, in GB of 10^9 bytes a
    second; 0: unknown.  ``context`` and ``slots`` are what a model gets that is loaded
    without a choice of these.  ``fetches``: it also loads models that other machines of
    the pool have, or the hub, after copying them.  ``loan`` is None if it runs no model
    together with other machines.
    """

    models: tuple[LoadableModel, ...] = ()
    memory: int = 0
    bandwidth: float = 0.0
    context: int = 4096
    slots: int = 1
    fetches: bool = False
    loan: MemoryLoan | None = None

    def find(self, name: str) -> LoadableModel | None:
        """Return the model of a name; None if it has none."""
        return _by_name(self).get(name)


# Machines keep their libraries, and each is asked for many models at a time.
@lru_cache(4096)
def _by_name(library: ModelLibrary) -> Mapping[str, LoadableModel]:
    return {each.name: each for each in reversed(library.models)}


MILLION = 1_000_000  # tokens that a provider's prices are for
TOKEN_PRICE_MAX = Micros(10_000 * MICROS)


class TokenPrices(msgspec.Struct, frozen=True):
    """What a hosted provider takes for a million tokens, read and written.

    Raises InvalidRequest.
    """

    prompt: Micros
    completion: Micros

    def __post_init__(self) -> None:
        if not all(
            0 <= each <= TOKEN_PRICE_MAX for each in (self.prompt, self.completion)
        ):
            most = dollars(TOKEN_PRICE_MAX)
            raise InvalidRequest(
                f"the price of a million tokens: expected up to {most}"
            )

    def cost(self, prompt_tokens: int, completion_tokens: int) -> Micros:
        """Return what an answer costs, rounded up."""
        in_all = prompt_tokens * self.prompt + completion_tokens * self.completion
        return Micros(-(-in_all // MILLION))

    def __str__(self) -> str:
        return (
            f"{dollars(self.prompt)} and {dollars(self.completion)} for a million "
            "tokens read and written"
        )


HARDWARE_ADDRESS = re.compile(r"(?:[0-9a-f]{2}:){5}[0-9a-f]{2}")
HARDWARE_ADDRESSES_MAX = 4  # of one machine


def valid_hardware_addresses(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return the first valid ones, as ``02:00:00:00:00:01``."""
    valid = filter(HARDWARE_ADDRESS.fullmatch, addresses)
    return tuple(islice(valid, HARDWARE_ADDRESSES_MAX))


class Offer(msgspec.Struct, frozen=True):
    """What a worker will run, as it declared when it joined.

    ``context`` is as in ``ServedModel``.  ``only_for`` names the keys whose jobs it
    accepts; empty: all keys.  ``privacy`` is the only privacy class of jobs that it
    accepts; None: any.  ``remark`` describes oddities of the declaration, for
    users who ask why the worker gets no jobs.

    ``public_key`` verifies the worker's receipts, in hexadecimal; empty if it has
    none.  ``proven`` means that the worker proved possession of the private key, and
    ``receipts`` that its wire carries receipts.  ``neighbour`` means that it is a pool
    of its own, which may forward jobs to other peers.  ``needs_question``: it gives no
    answer to a conversation that has only instructions.  ``pythons`` are the versions
    of Python (``3.12``) that run code which clients send; empty: not stated.
    ``engine`` names what the slots are of: all workers of a machine that name the same
    share them, one for each of its models.  Empty: they are the worker's own.
    ``library`` is what the machine can load, for a worker of kind ``MODEL``.
    ``last_resort`` are the prices of a hosted provider behind the worker, which gets
    jobs only when no machine of the pool takes them; None: there is none.
    ``wake`` are hardware addresses of the machine, which its owner lets others wake,
    and which wakes others; empty: neither.
    """

    kinds: frozenset[JobKind]
    models: frozenset[str] = frozenset()
    slots: int = 1  # jobs at a time; 0: none
    features: frozenset[Feature] = frozenset()
    context: int = 0
    only_for: frozenset[str] = frozenset()
    remark: str = ""
    tasks: frozenset[str] = frozenset()  # names of tasks and functions; empty: any
    streams: bool = True  # whether it streams answers
    device: DeviceKind | None = None
    public_key: str = ""
    proven: bool = False
    price: str = ""  # the price that it asks for, as text
    neighbour: bool = False
    receipts: bool = True
    needs_question: bool = False
    pythons: frozenset[str] = frozenset()
    privacy: Privacy | None = None
    engine: str = ""
    library: ModelLibrary | None = None
    last_resort: TokenPrices | None = None
    wake: tuple[str, ...] = ()

    @property
    def ask(self) -> Micros | None:
        """The price that it asks for; None: none, or the text is no amount."""
        return _ask_of(self.price)

    @property
    def proven_key(self) -> str:
        """The public key that the worker proved, in hexadecimal; empty if none."""
        return self.public_key if self.proven else ""

    @property
    def is_restricted(self) -> bool:
        """Whether it accepts the jobs of some clients only."""
        return bool(self.only_for) or self.privacy is not None

    @property
    def queues(self) -> frozenset[str]:
        """The models that it is indexed under, and the names that stand for others."""
        return _queues_of(self.models, self.kinds)


@lru_cache(1024)
def _ask_of(price: str) -> Micros | None:
    try:
        return parse_dollars(price)
    except ConfigError:
        return None


# Shared by all workers with the same offer: there may be thousands.
@lru_cache(1024)
def _queues_of(models: frozenset[str], kinds: frozenset[JobKind]) -> frozenset[str]:
    beyond = set()
    if JobKind.TASK in kinds:
        beyond.add(TASK_QUEUE)
    if JobKind.CALL in kinds:
        beyond.add(CALL_QUEUE)
    if JobKind.MODEL in kinds:
        beyond.add(MODEL_QUEUE)
    if models and not CHAT_ONLY.isdisjoint(kinds):
        beyond.add(ANY_MODEL)
    return models | beyond
