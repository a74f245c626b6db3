"""Makes the beginnings of GGUF files, as llama.cpp's own writer would."""

import struct
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Value: TypeAlias = bool | int | float | str | Sequence[int] | Sequence[str]

LLAMA: Mapping[str, Value] = {
    "general.architecture": "llama",
    "general.file_type": 15,
    "llama.block_count": 4,
    "llama.context_length": 8192,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
    "tokenizer.ggml.tokens": ["a", "b", ""],
    "tokenizer.chat_template": "{{ tools }}",
}
"""A small model of llama.cpp's first architecture."""


def gguf(values: Mapping[str, Value] = LLAMA, version: int = 3) -> bytes:
    """Return the beginning of a file, up to its tensors."""
    head = b"GGUF" + struct.pack("<IQQ", version, 0, len(values))
    return head + b"".join(_text(key) + _value(each) for key, each in values.items())


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case [str(), *_]:
            texts = b"".join(_text(str(each)) for each in value)
            return struct.pack("<IIQ", 9, 8, len(value)) + texts
        case _:
            return struct.pack(f"<IIQ{len(value)}I", 9, 4, len(value), *value)
