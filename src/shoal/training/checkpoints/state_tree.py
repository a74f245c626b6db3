"""A state of training as JSON and tensors, so that nothing has to be unpickled.

A state is what ``state_dict`` returns: maps, lists and tuples of tensors, numbers and
texts.  JSON has all but the tensors, in whose place it has their names.  The state of
the random numbers of this process, PyTorch's, NumPy's and Python's, is JSON alone.
"""

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.domain.errors import InvalidRequest

DEPTH_MAX = 32  # of maps and lists in each other

# The only keys of objects that stand for something else.
TENSOR, TUPLE, MAP, BYTES = "$tensor", "$tuple", "$map", "$bytes"


def flatten(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a state's JSON, and its tensors by name.

    A name is the path to the tensor.  The tensors are those of the state, not copies.

    Raises InvalidRequest, with the path, for any other value.
    """
    tensors: dict[str, Tensor] = {}
    return _flattened(state, "", tensors, 0), tensors


def restore(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state of which ``flatten`` made this.

    Subclasses of maps come back as plain ones.

    Raises InvalidRequest if a tensor is missing, or the JSON is of no state.
    """
    match skeleton:
        case {"$tensor": str(name)}:
            if name not in tensors:
                raise InvalidRequest(f"the state has no tensor {name}")
            return tensors[name]
        case {"$tuple": list(values)}:
            return tuple(restore(each, tensors) for each in values)
        case {"$map": list(pairs)}:
            return {
                restore(key, tensors): restore(value, tensors) for key, value in pairs
            }
        case {"$bytes": str(text)}:
            return base64.b64decode(text)
        case dict():
            return {key: restore(each, tensors) for key, each in skeleton.items()}
        case list():
            return [restore(each, tensors) for each in skeleton]
        case None | bool() | int() | float() | str():
            return skeleton
        case _:
            raise InvalidRequest(f"{type(skeleton).__name__} is no part of a state")


def memory_of(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers as one row of bytes on the CPU; a copy if need be."""
    row = tensor.detach().cpu().contiguous().reshape(-1)
    return row.view(torch.uint8) if row.numel() else torch.empty(0, dtype=torch.uint8)


def _flattened(value: Any, path: str, tensors: dict[str, Tensor], depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise InvalidRequest(f"{path}: more than {DEPTH_MAX} maps in each other")

    def inner(key: object, each: Any) -> Any:
        below = f"{path}.{key}" if path else str(key)
        return _flattened(each, below, tensors, depth + 1)

    match value:
        case Tensor():
            name = path
            while name in tensors:  # keys may have dots
                name += "+"
            tensors[name] = value
            return {TENSOR: name}
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return {BYTES: base64.b64encode(value).decode()}
        case Mapping():
            plain = all(isinstance(key, str) and key[:1] != "$" for key in value)
            if plain:
                return {key: inner(key, each) for key, each in value.items()}
            return {
                MAP: [
                    [_flattened(key, path, tensors, depth + 1), inner(key, each)]
                    for key, each in value.items()
                ]
            }
        case tuple():
            return {TUPLE: [inner(at, each) for at, each in enumerate(value)]}
        case list():
            return [inner(at, each) for at, each in enumerate(value)]
        case _:
            raise InvalidRequest(
                f"{path or 'the state'} is a {type(value).__name__}: a state has "
                "tensors, numbers, texts, lists and maps only"
            )


def random_state() -> dict[str, Any]:
    """Return the state as JSON; that of GPUs too, if this process uses some."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": _encoded(torch.get_rng_state()),
        "gpus": [_encoded(each) for each in gpus],
        "numpy": [str(kind), [int(key) for key in keys], position, has_gauss, cached],
        "python": [version, list(numbers), gauss],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Continue with the random numbers after those of a state."""
    kind, keys, position, has_gauss, cached = state["numpy"]
    version, numbers, gauss = state["python"]
    torch.set_rng_state(_decoded(state["torch"]))
    if state["gpus"] and torch.cuda.device_count() == len(state["gpus"]):
        torch.cuda.set_rng_state_all([_decoded(each) for each in state["gpus"]])
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
    random.setstate((version, tuple(numbers), gauss))


def draw_anew(*numbers: int) -> None:
    """Begin with random numbers that follow from some numbers, of 0 or more."""
    seeds = [int(each) for each in np.random.SeedSequence(numbers).generate_state(3)]
    torch.manual_seed(seeds[0])
    np.random.seed(seeds[1])
    random.seed(seeds[2])


def _encoded(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decoded(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
