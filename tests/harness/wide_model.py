"""A model whose tensors are large enough for rpc-server's cache."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shoal.engines.gguf_export import LlamaShape, write_gguf
from shoal.engines.gguf_vocabulary import byte_vocabulary

LAYERS = 4
LARGE_TENSORS = 3  # of each layer
CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 12_288,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "vocab_size": 259,
}
TENSOR_SIZE = CONFIG["hidden_size"] * CONFIG["intermediate_size"] * 2  # 12.6 MB


def write_wide_model(path: Path) -> Path:
    """Write a model of 160 MB, with weights that nobody trained; return its path."""
    numbers = np.random.default_rng(0)
    tensors = {
        there: numbers.normal(0, 0.05, size).astype(np.float32)
        if len(size) == 2
        else np.ones(size, np.float32)
        for there, _, size in LlamaShape.of(CONFIG).names()
    }
    return write_gguf(path, tensors, CONFIG, byte_vocabulary())
