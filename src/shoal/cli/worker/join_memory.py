"""How much memory the models of a worker may take: what its owner says, or is free."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.config import JoinConfig
from shoal.engines.resources import free_memory, free_memory_of_gpus
from shoal.engines.selection import EngineSource

GB = 1_000_000_000
FREE_SHARE = 0.9  # of what is free, or of a GPU


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The bytes that all models may take together; 0: unknown.

    ``free`` returns how many more they may take now, besides the owner's programs: of
    the free memory, so much is mapped from the files of models that are loaded.  It
    returns 0 if that is unknown.  None: only the limit counts.
    """

    limit: int
    free: Callable[[int], int] | None = None


async def model_memory(
    config: JoinConfig,
    servers: Sequence[EngineSource],
    gpu_memory: int,
    *,
    embedded: bool,
) -> ModelMemory:
    """Return how much memory models may take.

    Args:
        servers: those that load models on order.
        gpu_memory: bytes of the machine's GPUs; 0: it has none.
        embedded: whether the embedded engine is installed.
    """
    if config.memory:
        return ModelMemory(int(config.memory * GB))
    here = [each for each in servers if each.is_here]
    if servers and not here:
        return ModelMemory(0)  # of another machine
    if gpu_memory and here:
        return ModelMemory(int(gpu_memory * FREE_SHARE))
    if gpu_memory and embedded and (found := await free_memory_of_gpus()):
        return ModelMemory(int(found * FREE_SHARE))
    taken = sum(each.control.memory for each in here if each.control is not None)
    limit = _free_now(0)
    return ModelMemory(limit + taken, _free_now) if limit else ModelMemory(0)


def _free_now(mapped: int) -> int:
    free = free_memory()
    return max(1, int((free - mapped) * FREE_SHARE)) if free else 0
