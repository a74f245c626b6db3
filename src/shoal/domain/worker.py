"""What a worker is willing to do."""

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from shoal.domain.work import ANY_MODEL, CALL_QUEUE, TASK_QUEUE, Feature, JobKind

CHAT_ONLY = frozenset({JobKind.CHAT})


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a worker has, and what can be done with it there.

    ``context`` is how many tokens a question and its answer may have together; 0 where
    nobody knows.
    """

    name: str
    kinds: frozenset[JobKind] = CHAT_ONLY
    features: frozenset[Feature] = frozenset()
    context: int = 0


class DeviceKind(Enum):
    """What sort of machine a worker is."""

    DESKTOP = "desktop"
    PHONE = "phone"


@dataclass(frozen=True, slots=True)
class MachineHealth:
    """How a machine is doing; None where nobody measured."""

    cpu: float | None = None  # percent of all processors
    memory: float | None = None  # percent
    jobs: int | None = None


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a machine is made of, as far as it is known; sizes in GB of 10^9 bytes.

    ``tier`` is 1 (a large server) to 4 (a small device), as some wires have it.
    """

    chip: str = "unknown"
    chip_family: str = "unknown"
    memory_gb: float = 0.0
    gpu_cores: int = 0
    bandwidth_gb: float = 0.0  # per second, of the memory that models are in
    tier: int = 4
    gpu_backend: str = ""  # cuda, metal, cpu and so on
    platform: str = ""  # linux, macOS, windows and so on
    gpu_memory_gb: float | None = None


UNKNOWN_HARDWARE = Hardware()


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How much a worker can take now beside what it was given here, in its own words.

    ``unfit`` says why it should get nothing for now; empty: it may.  ``queued`` counts
    the jobs that others have there, and ``speed`` is the share of its full speed, above
    0 and at most 1.
    """

    unfit: str = ""
    queued: int = 0
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class Offer:
    """What a worker will run, as it declared when it joined.

    ``context`` is as in ``ServedModel``.  ``only_for`` names the keys whose jobs it
    takes; empty: all keys.  ``remark`` says what is odd about the declaration, for
    users who ask why the worker gets no work.

    ``public_key`` is what the worker signs receipts with, in hexadecimal, and empty
    where it has none; ``proven`` says that it has shown to have the other half, and
    ``receipts`` whether its wire carries any.  ``neighbour`` says that it is a pool of
    its own, which may ask others in its turn.
    """

    kinds: frozenset[JobKind]
    models: frozenset[str] = frozenset()
    slots: int = 1  # jobs at a time; 0: none
    features: frozenset[Feature] = frozenset()
    context: int = 0
    only_for: frozenset[str] = frozenset()
    remark: str = ""
    tasks: frozenset[str] = frozenset()  # names of tasks and functions; empty: any
    streams: bool = True  # whether answers come piece by piece
    device: DeviceKind | None = None
    public_key: str = ""
    proven: bool = False
    price: str = ""  # what it would like to be paid, in its own words
    neighbour: bool = False
    receipts: bool = True

    @property
    def queues(self) -> frozenset[str]:
        """The models under which it is looked for, with what stands for others."""
        return _queues_of(self.models, self.kinds)


# One set for all workers that are alike: thousands may be there.
@lru_cache(1024)
def _queues_of(models: frozenset[str], kinds: frozenset[JobKind]) -> frozenset[str]:
    beyond = set()
    if JobKind.TASK in kinds:
        beyond.add(TASK_QUEUE)
    if JobKind.CALL in kinds:
        beyond.add(CALL_QUEUE)
    if models and not CHAT_ONLY.isdisjoint(kinds):
        beyond.add(ANY_MODEL)
    return models | beyond
