"""The state of the random numbers of this process: PyTorch's, NumPy's and Python's."""

import base64
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


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
