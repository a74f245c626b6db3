"""What counts of the library that a machine says it has: it may say anything."""

from collections.abc import Sequence

from msgspec.structs import replace

from shoal.domain.credentials import may_offer
from shoal.domain.worker import LoadableModel, ModelLibrary
from shoal.pool.roster import SPECIAL_QUEUES

MODELS_MAX = 256  # of one library; further ones are ignored
NAME_MAX = 256  # characters of a model's name
TEXT_MAX = 100  # characters of what is said of a model, for users
SIZE_MAX = 1 << 50  # bytes, of models and of memory
CACHE_MAX = 1 << 30  # bytes of a token
CONTEXT_MAX = (1 << 31) - 1  # tokens
SLOTS_MAX = 1024
BANDWIDTH_MAX = 1e6  # GB a second


def usable_library(library: ModelLibrary, permitted: Sequence[str]) -> ModelLibrary:
    """Return a library with the models that can be ordered, each name once.

    ``permitted`` are the patterns of the models that its join token allows; empty: any.
    Numbers that cannot be are unknown.
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
    )


def _is_usable(model: LoadableModel) -> bool:
    return (
        0 < len(model.name) <= NAME_MAX
        and model.name.isprintable()
        and model.name not in SPECIAL_QUEUES
        and 0 <= model.size <= SIZE_MAX
        and 0 <= model.cache <= CACHE_MAX
        and 0 <= model.context <= CONTEXT_MAX
        and all(
            len(each) <= TEXT_MAX
            for each in (model.quantization, model.digest, model.engine)
        )
    )
