"""Reads the metadata and the sizes of tensors at the beginning of a GGUF file.

Source: GGUF's specification (ggml, ``docs/gguf.md``), versions 2 and 3.  The file may
be anything that someone has put into a folder: whatever it claims is checked against
what is there, and nothing is kept but single values and short lists of numbers.
"""

import os
import re
import struct
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias, TypeVar

from shoal.domain.errors import ConfigError

HEADER_MAX = 64 << 20  # bytes; the largest vocabularies take about 16 MB
FIRST_READ = 1 << 20  # bytes; grows until the metadata are read
VALUES_MAX = 65_536
KEY_MAX = 65_535  # bytes
LIST_MAX = 1024  # numbers of a list that is kept; there may be one for each layer
COUNT_MAX = 1 << 32  # of what a number in the header counts
TENSORS_MAX = 1 << 20  # of one file
DIMENSIONS_MAX = 8  # of a tensor; llama.cpp's have up to four
ALIGNMENT = 32  # bytes, of tensors in a file that does not state its own

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS: Mapping[int, struct.Struct] = {
    number: struct.Struct(f"<{letter}")
    for number, letter in (*enumerate("BbHhIif?"), *enumerate("Qqd", 10))
}
_COUNT, _TYPE = _NUMBERS[10], _NUMBERS[4]

# By ``general.file_type`` (llama.cpp, ``llama_ftype``); a dash: there is none.
_FILE_TYPES = (
    "F32 F16 Q4_0 Q4_1 - - - Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M "
    "Q5_K_S Q5_K_M Q6_K IQ2_XXS IQ2_XS Q2_K_S IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M "
    "IQ2_S IQ2_M IQ4_XS IQ1_M BF16 - - - TQ1_0 TQ2_0 MXFP4 NVFP4 Q1_0"
)
_QUANTIZATIONS = _FILE_TYPES.split(" ")

_LAYER = re.compile(r"blk\.(\d{1,4})\.")

_MODEL_TYPES = ("", "model")  # else adapter, mmproj, imatrix and others
_GUESSED = 1024  # is added to a file type that was derived from the tensors
_F16 = 2  # bytes of a number in the cache
_F32 = 4  # bytes of a number that is computed with
VOCABULARY = 160_000  # tokens, if it is not stated: more than most have

Value: TypeAlias = str | int | float | tuple[int | float, ...]

T = TypeVar("T")


class InvalidGguf(ConfigError):
    """A file is no GGUF file, or a damaged one; the message names it and says why."""


class _Short(Exception):
    """The data end within the metadata."""


class TensorPlace(NamedTuple):
    """Where the numbers of a tensor lie in a file, in bytes.

    The size may include some bytes behind them, up to where the next one begins.
    """

    offset: int
    size: int


class GgufHeader:
    """The metadata of a model: its single values, and short lists of numbers."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.values = values

    @cached_property
    def architecture(self) -> str:
        """The name of the model's architecture, which begins its keys."""
        return self.text("general.architecture")

    def text(self, key: str) -> str:
        """Return a text; empty: there is none."""
        found = self.values.get(key)
        return found if isinstance(found, str) else ""

    def count(self, key: str) -> int:
        """Return a number of things that the architecture has; 0: it is not stated."""
        return _as_count(self.values.get(f"{self.architecture}.{key}"))

    @property
    def is_language_model(self) -> bool:
        """Whether it is no model of images, adapter, projector or the like."""
        return self.text("general.type") in _MODEL_TYPES and self.context > 0

    @property
    def pooling(self) -> int:
        """How the vectors of tokens are pooled: 0: not, 4: to the rank of a text."""
        return self.count("pooling_type")

    @property
    def context(self) -> int:
        """The longest context that the model was trained for, in tokens; 0: unknown."""
        return self.count("context_length")

    @property
    def quantization(self) -> str:
        """The name of the quantization; empty: unknown."""
        number = self.values.get("general.file_type")
        if not isinstance(number, int) or number % _GUESSED >= len(_QUANTIZATIONS):
            return ""
        return _QUANTIZATIONS[number % _GUESSED].strip("-")

    @property
    def cache(self) -> int:
        """The bytes of float16 that each token of a context takes; 0: unknown.

        Layers with a sliding window take fewer.
        """
        layers, heads = self.count("block_count"), self.count("attention.head_count")
        each = self.count("embedding_length") // heads if heads else 0
        key = self.count("attention.key_length") or each
        value = self.count("attention.value_length") or each
        by_layer = self.values.get(f"{self.architecture}.attention.head_count_kv")
        if isinstance(by_layer, tuple):
            kv_heads = sum(map(_as_count, by_layer))
        else:
            kv_heads = (_as_count(by_layer) or heads) * layers
        size = kv_heads * (key + value) * _F16
        return size if size < COUNT_MAX else 0

    @property
    def states(self) -> int:
        """The bytes that a layer computes with, about, for each token of a batch."""
        width, inner = self.count("embedding_length"), self.count("feed_forward_length")
        return min(_F32 * (8 * width + 3 * inner), COUNT_MAX)

    @property
    def scores(self) -> int:
        """The bytes of the scores of all tokens, for each token of a batch."""
        return min(_F32 * (self.count("vocab_size") or VOCABULARY), COUNT_MAX)


def read_header(path: Path) -> GgufHeader:
    """Read the metadata of a GGUF file.  Raises InvalidGguf, and OSError."""
    with path.open("rb") as file:
        try:
            return parse_header(file)
        except InvalidGguf as error:
            raise InvalidGguf(f"{path} {error}") from None


def parse_header(file: BinaryIO) -> GgufHeader:
    """Read the metadata of an open GGUF file.

    Raises InvalidGguf without the file's name, and OSError.
    """
    return _parsed(file, lambda data: GgufHeader(_parse(data)[0]))


def read_tensors(path: Path) -> Mapping[str, TensorPlace]:
    """Read where the tensors of a GGUF file lie, by name.

    Raises InvalidGguf, and OSError.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        try:
            return _parsed(file, lambda data: _parse_tensors(data, size))
        except InvalidGguf as error:
            raise InvalidGguf(f"{path} {error}") from None


def tensors_in(data: bytes, size: int) -> Mapping[str, TensorPlace] | None:
    """Return where the tensors of a file of a ``size`` lie that begins with ``data``.

    None: these bytes are too few.  Raises InvalidGguf without the file's name.
    """
    try:
        return _parse_tensors(data, size)
    except _Short:
        if len(data) < min(size, HEADER_MAX):
            return None
        raise InvalidGguf("is incomplete, or has too many metadata") from None


def layer_of(tensor: str) -> int | None:
    """Return the layer that a tensor belongs to, by its name; None: to none."""
    found = _LAYER.match(tensor)
    return None if found is None else int(found[1])


def _parsed(file: BinaryIO, parse: Callable[[bytes], T]) -> T:
    """Return what is parsed of the beginning of a file.  Raises InvalidGguf."""
    data = file.read(FIRST_READ)
    while True:
        try:
            return parse(data)
        except _Short:
            more = file.read(3 * len(data))
            if not more:
                raise InvalidGguf("is incomplete: it ends in its metadata") from None
            data += more
            if len(data) > HEADER_MAX:
                limit = f"{HEADER_MAX >> 20} MiB"
                raise InvalidGguf(f"has more than {limit} of metadata") from None


def _parse(data: bytes) -> tuple[Mapping[str, Value], int]:
    """Return the values at the beginning of a GGUF file, and where they end."""
    if data[:4] != MAGIC[: len(data)]:
        raise InvalidGguf(f"is not a GGUF file: it begins with {data[:4]!r}")
    try:
        (version,) = _TYPE.unpack_from(data, 4)
        if version not in VERSIONS:
            raise InvalidGguf(f"has version {version} of GGUF, which is unknown here")
        (count,) = _COUNT.unpack_from(data, 16)
        if count > VALUES_MAX:
            raise InvalidGguf(f"is damaged: it claims to have {count} values")
        return _parse_values(data, 24, count)
    except (struct.error, IndexError, OverflowError):
        raise _Short from None


def _parse_tensors(data: bytes, size: int) -> Mapping[str, TensorPlace]:
    """Return where the tensors of a GGUF file of a ``size`` lie."""
    values, at = _parse(data)
    (count,) = _COUNT.unpack_from(data, 8)
    if count > TENSORS_MAX:
        raise InvalidGguf(f"is damaged: it claims to have {count} tensors")
    offsets: dict[str, int] = {}
    try:
        for _ in range(count):
            (length,) = _COUNT.unpack_from(data, at)
            name = _text(data, at + 8, length)
            (dimensions,) = _TYPE.unpack_from(data, at + 8 + length)
            if dimensions > DIMENSIONS_MAX:
                raise InvalidGguf(f"is damaged: {name!a:.80} has {dimensions} axes")
            at += 8 + length + 4 + 8 * dimensions + 4
            (offsets[name],) = _COUNT.unpack_from(data, at)
            at += 8
    except struct.error:
        raise _Short from None
    alignment = _as_count(values.get("general.alignment")) or ALIGNMENT
    first = -(-at // alignment) * alignment
    # One lies behind the other, and the last one reaches to the end of the file.
    placed = sorted((first + offset, name) for name, offset in offsets.items())
    begins = [*(min(begin, size) for begin, _ in placed), size]
    return {
        name: TensorPlace(begin, after - begin)
        for (_, name), (begin, after) in zip(placed, pairwise(begins), strict=True)
    }


def _parse_values(data: bytes, at: int, count: int) -> tuple[Mapping[str, Value], int]:
    values: dict[str, Value] = {}
    for _ in range(count):
        (length,) = _COUNT.unpack_from(data, at)
        if not 0 < length <= KEY_MAX:
            raise InvalidGguf(f"is damaged: a key has {length} bytes")
        key = _text(data, at + 8, length)
        at += 8 + length
        (kind,) = _TYPE.unpack_from(data, at)
        at += 4
        if kind == _STRING:
            (length,) = _COUNT.unpack_from(data, at)
            values[key] = _text(data, at + 8, length)
            at += 8 + length
        elif kind == _ARRAY:
            at, numbers = _parse_array(data, at, key)
            if numbers:
                values[key] = numbers
        elif kind in _NUMBERS:
            (values[key],) = _NUMBERS[kind].unpack_from(data, at)
            at += _NUMBERS[kind].size
        else:
            raise InvalidGguf(f"is damaged: {key!a:.80} is of type {kind}")
    return values, at


def _parse_array(data: bytes, at: int, key: str) -> tuple[int, tuple[int | float, ...]]:
    """Return where an array ends, and its numbers if they are few."""
    (kind,) = _TYPE.unpack_from(data, at)
    (count,) = _COUNT.unpack_from(data, at + 4)
    at += 12
    if kind == _STRING:
        if count > HEADER_MAX // _COUNT.size:
            raise InvalidGguf(f"is damaged: {key!a:.80} has {count} texts")
        unpack_from = _COUNT.unpack_from
        for _ in range(count):
            at += unpack_from(data, at)[0] + 8
        if at > len(data):
            raise _Short
        return at, ()
    if kind not in _NUMBERS:
        raise InvalidGguf(f"is damaged: {key!a:.80} is an array of type {kind}")
    letter, size = _NUMBERS[kind].format[-1], _NUMBERS[kind].size
    end = at + count * size
    if count * size > HEADER_MAX:
        raise InvalidGguf(f"is damaged: {key!a:.80} has {count} numbers")
    if end > len(data):
        raise _Short
    if count > LIST_MAX:
        return end, ()
    return end, struct.unpack_from(f"<{count}{letter}", data, at)


def _text(data: bytes, at: int, length: int) -> str:
    if length > HEADER_MAX:
        raise InvalidGguf(f"is damaged: a text has {length} bytes")
    if at + length > len(data):
        raise _Short
    return data[at : at + length].decode(errors="replace")


def _as_count(value: object) -> int:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value < COUNT_MAX else 0  # type: ignore[operator,return-value]
