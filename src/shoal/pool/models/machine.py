"""What a machine has loaded and could load, and how much room it has for more."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from math import inf, log2
from typing import NamedTuple, TypeAlias

from shoal.domain.ids import WorkerId, peer_of
from shoal.domain.work import ModelAction, ModelOrder
from shoal.domain.worker import Hardware, LoadableModel, ModelLibrary

GB = 1e9  # bytes, in messages
NAMES_MAX = 5  # models or machines that a message names
DOUBT = 1.25  # times the memory that a model was estimated to need, for a failed load
DOUBTS_MAX = 8  # failed loads that count


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that a machine has loaded.

    ``memory`` is in bytes; 0: unknown.  ``since`` is when it was loaded, and ``used``
    the end of its last request.  ``busy``: it has a request now.  ``context`` and
    ``slots`` are those of the order that loaded it, where it named any, and else what
    the machine reports; 0: unknown.
    """

    memory: int
    since: float
    used: float
    busy: bool = False
    context: int = 0
    slots: int = 0

    @property
    def last_used(self) -> float:
        """When it was used, or loaded."""
        return max(self.since, self.used)


class MachineKind(Enum):
    """What of a machine runs models."""

    GPU = "gpu"
    MAC = "mac"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Described:
    """What a machine says about itself; ``kind`` is None if it does not say it."""

    name: str = ""
    kind: MachineKind | None = None


DescribeMachine: TypeAlias = Callable[[str], Described]
"""Returns what a machine says about itself, by its peer's name."""


def kind_of(hardware: Hardware | None) -> MachineKind | None:
    """Return the kind of a machine, as far as known."""
    match hardware.gpu_backend if hardware is not None else "":
        case "":
            return None
        case "cpu":
            return MachineKind.CPU
        case "metal":
            return MachineKind.MAC
        case _:
            return MachineKind.GPU


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine with a library of models.

    ``id`` is that of the library's worker, and ``name`` what the machine calls itself.
    ``loaded`` has every model that takes some of the library's memory; one that is not
    of the library, and whose memory is unknown, takes none.  ``ordered`` has
    the orders that the machine has not carried out yet, and ``failed`` the models that
    it could not load: until when it is not asked again, and why (empty: it said that it
    loaded it); both by model.  ``kind`` is None if it is unknown.
    ``takes_orders``: it also takes jobs, so it is not paused or draining.  ``doubts``
    say how often it could not load a model, since it last could.
    """

    id: str
    name: str
    library: ModelLibrary
    loaded: Mapping[str, LoadedModel] = field(default_factory=dict)
    ordered: Mapping[str, ModelOrder] = field(default_factory=dict)
    takes_orders: bool = True
    failed: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    kind: MachineKind | None = None
    doubts: Mapping[str, int] = field(default_factory=dict)

    @property
    def shown_name(self) -> str:
        """Its name, for users."""
        return self.name or peer_of(WorkerId(self.id))

    def runs_with_others(self, model: str) -> bool:
        """Return whether it runs a model together with other machines."""
        loan = self.library.loan
        return loan is not None and loan.group(model) is not None

    def is_one_of(self, names: Collection[str]) -> bool:
        """Return whether one of the names, or ids of workers or peers, is its own."""
        if self.name in names or self.id in names:
            return True
        return peer_of(WorkerId(self.id)) in names


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """When models are loaded and unloaded; in seconds, and requests for each slot.

    A model without a deployment is unloaded after ``idle`` without a request (inf:
    never).  A model ``stays`` at least so long once it is loaded.  A model without
    waiting requests evicts only what was not used for ``quiet``.  A deployment grows if
    a request waits ``growth_wait``, or there are ``growth_busy`` (one alone is no
    reason, even if there is one slot), and its newest replica was loaded ``settles``
    ago.  It shrinks only if there would then be at most ``shrink_busy``.  Of machines
    where equally much happens, those come first that come first in ``preference``, and
    last those that are not in it.
    """

    idle: float = 1800.0
    stays: float = 30.0
    quiet: float = 300.0
    growth_wait: float = 10.0
    growth_busy: float = 1.5
    shrink_busy: float = 0.6
    settles: float = 60.0
    preference: tuple[MachineKind, ...] = ()


class Claim(IntEnum):
    """Why a model is to be loaded: the first goes before the others."""

    PINNED = 0  # an operator said that it is always loaded
    WAITED = 1  # requests wait, and it is loaded nowhere
    DEPLOYED = 2  # fewer replicas than an operator asked for
    GROWTH = 3  # its replicas have much to do

    @property
    def is_urgent(self) -> bool:
        """Whether it may evict models that were used lately."""
        return self <= Claim.WAITED


class Effort(IntEnum):
    """What has to happen on a machine before a model is loaded there."""

    NONE = 0
    WAIT = 1  # until the models that are being unloaded are gone
    EVICT = 2
    EVICT_DEPLOYED = 3


class Bid(NamedTuple):
    """What it takes to load a model on a machine; the least is the best.

    Equal efforts compare by the ``rank`` of the machine in the operator's preference,
    then by ``recent``, which is less for victims that were not used
    for longer (by half or more), then by the ``slowness`` of the machine, whose memory
    its ``active`` models share: those that it loads, and those in use.
    """

    effort: Effort
    rank: int
    recent: int
    slowness: float
    active: int
    machine: str
    victims: tuple[str, ...] = ()


class _Victim(NamedTuple):
    """A model that may be evicted; the least is evicted first."""

    deployed: bool
    last_used: float
    name: str
    memory: int


@dataclass(slots=True)
class Room:
    """The memory of a machine, as orders leave it.

    ``waited`` are the models that requests wait for, which are not evicted, nor are the
    ``pinned`` ones; those that are ``deployed`` are evicted last.  The caller sets
    these before it asks for a ``bid``.  ``find`` describes a model that a machine of
    the pool has.  A machine of unknown memory has room for one model.
    """

    machine: Machine
    waited: Collection[str]
    find: Callable[[str], LoadableModel | None]
    now: float
    rules: PlacementRules
    pinned: set[str] = field(default_factory=set)
    deployed: set[str] = field(default_factory=set)
    capacity: int = 0
    free: int = 0
    coming: int = 0  # the memory of models that are being unloaded
    reserved: int = 0  # of both together, for models that are to be loaded
    busy: int = 0  # models with a request
    loading: set[str] = field(default_factory=set)
    unloading: set[str] = field(default_factory=set)
    _victims: list[_Victim] | None = None

    def __post_init__(self) -> None:
        machine = self.machine
        self.free = self.capacity = machine.library.memory or 1
        for name, order in machine.ordered.items():
            if order.action is ModelAction.UNLOAD and not order.group:
                self.unloading.add(name)
                if name not in machine.loaded:
                    # No longer offered; its memory is free once the order has ended.
                    taken = self.need(name, 0, 0)
                    self.free -= taken
                    self.coming += taken
            elif order.action is ModelAction.LOAD and name not in machine.loaded:
                self.load(name, self.order_need(order))
        for name, loaded in machine.loaded.items():
            taken = self.taken(name, loaded)
            self.free -= taken
            self.busy += loaded.busy
            if name in self.unloading:
                self.coming += taken

    def need(self, name: str, context: int, slots: int) -> int:
        """Return the bytes that a model would take: all of them if it is unknown.

        After a failed load, more than estimated: it may have been for lack of memory.
        But what fits an empty machine always does.
        """
        library = self.machine.library
        model = library.find(name) or self.find(name)
        if not library.memory or model is None:
            return self.capacity
        context, slots = context or library.context, slots or library.slots
        if not (memory := model.memory(context, slots)):
            return self.capacity
        failures = self.machine.doubts.get(name, 0)
        if not failures or memory > self.capacity:
            return memory
        return min(self.capacity, int(memory * DOUBT ** min(failures, DOUBTS_MAX)))

    def order_need(self, order: ModelOrder) -> int:
        """Return the bytes that an order to load a model takes."""
        return order.own_memory or self.need(order.name, order.context, order.slots)

    def taken(self, name: str, loaded: LoadedModel) -> int:
        """Return the bytes that a loaded model takes of the library's memory."""
        library = self.machine.library
        if loaded.memory and library.memory:
            return loaded.memory
        if not loaded.memory and library.find(name) is None:
            return 0  # of a server, or kept by its owner: the library has the rest
        return self.need(name, loaded.context, loaded.slots)

    def keeps(self, name: str) -> bool:
        """Return whether it has a model loaded, or loads it, and does not unload it."""
        if name in self.loading:
            return True
        return name in self.machine.loaded and name not in self.unloading

    def may_unload(self, name: str, loaded: LoadedModel) -> bool:
        """Return whether a model may be unloaded if its memory is needed."""
        return not (
            loaded.busy
            or self.now - loaded.since < self.rules.stays
            or name in self.pinned
            or name in self.waited
            or name in self.unloading
            or name in self.machine.ordered
            or self.machine.library.find(name) is None
        )

    def load(self, name: str, need: int) -> None:
        """Take the memory of a model that is to be loaded."""
        self.free -= need
        self.loading.add(name)

    def unload(self, name: str) -> None:
        """Expect the memory of a loaded model."""
        self.coming += self.taken(name, self.machine.loaded[name])
        self.unloading.add(name)
        self._victims = None

    def bid(
        self, name: str, need: int, claim: Claim, rivals: Collection[str] = ()
    ) -> Bid | None:
        """Return what it takes to load a model; None if there can be no room now.

        None of the ``rivals`` may be loaded beside it.
        """
        if not self.loading.isdisjoint(rivals):
            return None
        shortage = need - (self.free + self.coming - self.reserved)
        loaded = name in self.machine.loaded  # with other settings, or being unloaded
        required = {
            each
            for each in (name, *rivals)
            if each in self.machine.loaded and each not in self.unloading
        }
        victims: Sequence[_Victim] = ()
        effort, recent = Effort.NONE, 0
        if shortage > 0 or required:
            victims = self._choose(shortage, claim, required, name)
            if not victims:
                return None
            deployed = any(each.deployed for each in victims)
            effort = Effort.EVICT_DEPLOYED if deployed else Effort.EVICT
            unused = self.now - max(each.last_used for each in victims)
            recent = -int(log2(max(1.0, unused)))
        elif loaded or need > self.free or self.has_any(rivals):
            effort = Effort.WAIT
        active = len(self.loading) + self.busy
        slowness = -self.machine.library.bandwidth / (1 + active)
        names = tuple(each.name for each in victims)
        preference, kind = self.rules.preference, self.machine.kind
        rank = preference.index(kind) if kind in preference else len(preference)
        return Bid(effort, rank, recent, slowness, active, self.machine.id, names)

    def has_any(self, names: Collection[str]) -> bool:
        """Return whether one of these models is loaded, or not unloaded yet."""
        return any(
            each in self.machine.loaded
            or each in self.unloading
            or each in self.loading
            for each in names
        )

    def _choose(
        self, shortage: int, claim: Claim, required: Collection[str], own: str
    ) -> Sequence[_Victim]:
        """Return models with enough memory, of the least value; none: there are none.

        All that are ``required`` are among them, such as the ``own`` one, which is to
        be loaded otherwise.
        """
        chosen: list[_Victim] = []
        others: list[_Victim] = []
        for each in self._evictable():
            gives_way = claim.is_urgent or self._is_quiet(each)
            if each.name in required and (each.name == own or gives_way):
                chosen.append(each)
                shortage -= each.memory
            elif gives_way:
                others.append(each)
        if len(chosen) < len(required):
            return ()
        needless = len(chosen)
        for each in others:
            if shortage <= 0:
                break
            chosen.append(each)
            shortage -= each.memory
        if shortage > 0:
            return ()
        for each in reversed(chosen[needless:]):
            if shortage + each.memory <= 0:  # a larger one was added after it
                chosen.remove(each)
                shortage += each.memory
        return chosen

    def _is_quiet(self, victim: _Victim) -> bool:
        return not victim.deployed and self.now - victim.last_used >= self.rules.quiet

    def _evictable(self) -> list[_Victim]:
        if self._victims is None:
            self._victims = sorted(
                _Victim(name in self.deployed, each.last_used, name, memory)
                for name, each in self.machine.loaded.items()
                if self.may_unload(name, each)
                and (memory := self.taken(name, each)) >= 0
            )
        return self._victims

    def rejection(
        self, name: str, need: int, rivals: Collection[str] = ()
    ) -> tuple[bool, str]:
        """Return whether what keeps a model from here passes by itself, and what."""
        machine, shown = self.machine, self.machine.shown_name
        if need > self.capacity:  # nothing that passes changes that
            return False, f"{shown} has {shown_size(self.capacity)}"
        until, why = machine.failed.get(name, (-inf, ""))
        if until > self.now and not why:
            return True, f"{shown} said that it loaded it, and does not offer it"
        if until > self.now:
            return False, f"{shown} failed to load it ({why})"
        if not machine.takes_orders:
            return True, f"{shown} takes no jobs now"
        if beside := [each for each in rivals if self.keeps(each)]:
            return True, f"{shown} has {some_of(beside)} of the same group"
        others = {
            other: self.taken(other, loaded)
            for other, loaded in machine.loaded.items()
            if other != name
        }
        kept = [
            other
            for other in others
            if other in self.pinned or machine.library.find(other) is None
        ]
        taken = sum(others[other] for other in kept)
        passes = need <= self.capacity - taken
        if passes:
            kept = [*others, *(self.loading - others.keys())]
            taken = self.capacity - self.free - self.coming + self.reserved
        names = some_of(kept) if kept else name
        how = "in use by" if passes else "kept for"
        if not machine.library.memory:
            return passes, f"{shown} has room for one model, and it is {how} {names}"
        size, part = shown_size(self.capacity), shown_size(taken)
        return passes, f"{shown} has {size}, of which {part} are {how} {names}"


def shown_size(size: int) -> str:
    """Return a number of bytes for users: in GB, or MB if it is less than one."""
    return f"{size / GB:.1f} GB" if size >= GB else f"{size / 1e6:.0f} MB"


def some_of(names: Sequence[str], between: str = ", ") -> str:
    """List the first names, and the number of the others."""
    more = len(names) - NAMES_MAX
    listed = between.join(names[:NAMES_MAX])
    return f"{listed} and {more} more" if more > 0 else listed
