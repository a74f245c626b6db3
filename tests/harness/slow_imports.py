"""Modules that take long to import, imported when a test first uses one of them.

Each process of the suite imports all test modules, and few tests need these.
Annotations that name their types are strings, so that they are not evaluated.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = [
    "anthropic",
    "checkpoint_folder",
    "group_checkpoints",
    "nn",
    "ollama",
    "openai",
    "state_tree",
    "torch",
    "torch_diloco",
]


class LazyModule:
    """A module of this name, imported when one of its attributes is read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # pytest looks for these in all that a test module has.
        if attribute.startswith("__") or attribute == "_mock_name":
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)


if TYPE_CHECKING:
    import anthropic
    import ollama
    import openai
    import torch
    from torch import nn

    from shoal.training import torch_diloco
    from shoal.training.checkpoints import folder as checkpoint_folder
    from shoal.training.checkpoints import group_checkpoints, state_tree
else:
    anthropic = LazyModule("anthropic")
    ollama = LazyModule("ollama")
    openai = LazyModule("openai")
    torch = LazyModule("torch")
    nn = LazyModule("torch.nn")
    # Of Shoal, what imports PyTorch.
    checkpoint_folder = LazyModule("shoal.training.checkpoints.folder")
    group_checkpoints = LazyModule("shoal.training.checkpoints.group_checkpoints")
    state_tree = LazyModule("shoal.training.checkpoints.state_tree")
    torch_diloco = LazyModule("shoal.training.torch_diloco")
