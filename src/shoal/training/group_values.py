"""Values and states that ranks exchange by the collectives of their group."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from shoal.domain.errors import InvalidRequest
from shoal.training.all_reduces import ReducingGroup
from shoal.training.collectives import Array

VALUE_MAX = 64 << 20  # bytes of a value as JSON
SIZE_SIZE = 8  # bytes of the size of a value
BROADCAST_MAX = 64 << 20  # bytes of a state in one operation: within its time limit


class Collectives(ReducingGroup, Protocol):
    """What training needs of a group of ranks; ``RankGroup`` is one."""

    @property
    def generation(self) -> int: ...

    def set_step(self, step: int) -> None: ...

    def all_gather(self, array: Array) -> Array: ...


def gather_values(group: Collectives, value: Any) -> Sequence[Any]:
    """Return the values of all ranks, in the order of ranks; each is any JSON.

    Raises InvalidRequest if a value is too large.
    """
    own = json.dumps(value).encode()
    if len(own) > VALUE_MAX:
        raise InvalidRequest(f"a value of {len(own)} bytes exceeds {VALUE_MAX}")
    sizes = group.all_gather(np.array([len(own)], np.int64))
    # A rank may be lost before the values themselves: each names its own size.
    row = np.zeros(SIZE_SIZE + int(sizes.max()), np.uint8)
    row[:SIZE_SIZE] = np.frombuffer(len(own).to_bytes(SIZE_SIZE, "little"), np.uint8)
    row[SIZE_SIZE : SIZE_SIZE + len(own)] = np.frombuffer(own, np.uint8)
    return [_value_of(each.tobytes()) for each in group.all_gather(row)]


def _value_of(row: bytes) -> Any:
    size = int.from_bytes(row[:SIZE_SIZE], "little")
    return json.loads(row[SIZE_SIZE : SIZE_SIZE + size])


def broadcast_value(group: Collectives, value: Any, root: int) -> Any:
    """Return the root's value, which is any JSON; those of others do not count.

    Raises InvalidRequest if it is too large.
    """
    own = json.dumps(value).encode() if group.place.rank == root else b""
    if len(own) > VALUE_MAX:
        raise InvalidRequest(f"a value of {len(own)} bytes exceeds {VALUE_MAX}")
    size = group.broadcast(np.array([len(own)], np.int64), root)
    memory = np.frombuffer(bytearray(own or int(size[0])), np.uint8)
    return json.loads(group.broadcast(memory, root).tobytes())


def broadcast_state(
    group: Collectives, state: Mapping[str, Any], root: int
) -> dict[str, Any]:
    """Return the root's state, bit by bit; those of others do not count.

    A state is what ``checkpoints.state_tree`` takes.  Raises InvalidRequest.
    """
    import torch

    from shoal.training.checkpoints.state_tree import flatten, memory_of, restore

    own = flatten(dict(state)) if group.place.rank == root else (None, {})
    outline = [
        [name, str(each.dtype).removeprefix("torch."), list(each.shape)]
        for name, each in own[1].items()
    ]
    skeleton, outline = broadcast_value(group, [own[0], outline], root)
    tensors = {}
    for name, dtype, shape in outline:
        if group.place.rank == root:
            tensor = own[1][name]
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        numbers = memory_of(tensor).numpy()
        for at in range(0, len(numbers), BROADCAST_MAX):
            group.broadcast(numbers[at : at + BROADCAST_MAX], root)
        tensors[name] = tensor
    restored: dict[str, Any] = restore(skeleton, tensors)
    return restored


def name_odd_ranks(found: Mapping[int, bytes]) -> str:
    """Return which ranks' hashes differ from that of most; empty: none does."""
    hashes = [*found.values()]
    if len({*hashes}) <= 1:
        return ""
    most = max(hashes, key=hashes.count)
    if 2 * hashes.count(most) <= len(hashes):
        return "the ranks do not have the same parameters, and no majority has"
    odd = ", ".join(str(rank) for rank, each in found.items() if each != most)
    return f"rank {odd} does not have the parameters of the others"
