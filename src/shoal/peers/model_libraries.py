"""What counts of the library that a machine says it has: it may say anything."""

from collections.abc import Sequence

from msgspec.structs import replace

from shoal.domain.credentials import may_offer
from shoal.domain.work import ModelOrder
from shoal.domain.worker import LentShard, LoadableModel, MemoryLoan, ModelLibrary
from shoal.pool.roster import SPECIAL_QUEUES

MODELS_MAX = 256  # of one library; further ones are ignored
NAME_MAX = 256  # characters of a model's name
TEXT_MAX = 100  # characters of what is said of a model, for users
SIZE_MAX = 1 << 50  # bytes, of models and of memory
CACHE_MAX = 1 << 30  # bytes of a token
CONTEXT_MAX = (1 << 31) - 1  # tokens
SLOTS_MAX = 1024
BANDWIDTH_MAX = 1e6  # GB a second
ROUND_TRIP_MAX = 60.0  # seconds
SHARDS_MAX = 64  # of one machine, and machines of a group
HOSTS_MAX = 16  # addresses of a machine
PORTS = 1 << 16
KEY_LENGTH = 64  # hexadecimal digits of a public key, and of a SHA-256


def usable_library(
    library: ModelLibrary, permitted: Sequence[str], key: str
) -> ModelLibrary:
    """Return a library with the models that can be ordered, each name once.

    ``permitted`` are the patterns of the models that its join token allows; empty: any.
    ``key`` is the public key that the machine has proven, in hexadecimal: it lends and
    runs with no other.  Numbers that cannot be are unknown.
    """
    usable: dict[str, LoadableModel] = {}
    for each in library.models:
        if len(usable) == MODELS_MAX:
            break
        if _is_usable(each) and may_offer(permitted, [each.name]):
            usable.setdefault(each.name, each)
    bandwidth = library.bandwidth
    return replace(
        library,
        models=tuple(usable.values()),
        memory=library.memory if 0 <= library.memory <= SIZE_MAX else 0,
        bandwidth=bandwidth if 0 <= bandwidth <= BANDWIDTH_MAX else 0.0,  # nor NaN
        context=max(0, min(CONTEXT_MAX, library.context)),
        slots=max(1, min(SLOTS_MAX, library.slots)),
        loan=None if library.loan is None else _usable_loan(library.loan, key),
    )


def _usable_loan(loan: MemoryLoan, key: str) -> MemoryLoan | None:
    """Return what a machine lends, without shards that cannot be; None: nothing."""
    if not 0 < len(loan.protocol) <= TEXT_MAX or not key or loan.key != key:
        return None
    return replace(
        loan,
        memory=loan.memory if 0 <= loan.memory <= SIZE_MAX else 0,
        runners=loan.runners[:SHARDS_MAX],
        shards=tuple(filter(_is_shard, loan.shards[:SHARDS_MAX])),
        groups=tuple(filter(_is_group, loan.groups[:SHARDS_MAX])),
        unfit=loan.unfit[:TEXT_MAX],
        round_trip=loan.round_trip if _is_round_trip(loan.round_trip) else 0.0,
        links=tuple(
            each
            for each in loan.links[:SHARDS_MAX]
            if len(each.machine) <= NAME_MAX
            and _is_round_trip(each.round_trip)
            and 0 <= each.rate <= SIZE_MAX
        ),
    )


def _is_round_trip(seconds: float) -> bool:
    return 0 <= seconds <= ROUND_TRIP_MAX  # nor NaN


def _is_shard(shard: LentShard) -> bool:
    return (
        _is_group(shard.order)
        and 0 < shard.port < PORTS
        and len(shard.hosts) <= HOSTS_MAX
        and max(map(len, shard.hosts), default=0) <= NAME_MAX
        and len(shard.fingerprint) == KEY_LENGTH
    )


def _is_group(order: ModelOrder) -> bool:
    return (
        0 < len(order.shards) <= SHARDS_MAX
        and max(len(order.name), len(order.group), len(order.runner)) <= NAME_MAX
        and all(
            0 <= each.memory <= SIZE_MAX and len(each.machine) <= NAME_MAX
            for each in order.shards
        )
    )


def _is_usable(model: LoadableModel) -> bool:
    return (
        0 < len(model.name) <= NAME_MAX
        and model.name.isprintable()
        and model.name not in SPECIAL_QUEUES
        and 0 <= model.size <= SIZE_MAX
        and 0 <= model.cache <= CACHE_MAX
        and 0 <= model.context <= CONTEXT_MAX
        and (model.layers is None or model.layers.is_usable)
        and all(
            len(each) <= TEXT_MAX
            for each in (model.quantization, model.digest, model.engine)
        )
    )
