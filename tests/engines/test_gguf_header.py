"""The metadata of GGUF files, also of damaged and hostile ones."""

import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
from gguf import GGUFReader, LlamaFileType

from engines.gguf_headers import LLAMA, Value, gguf
from engines.outputs import TINY
from shoal.engines import gguf_header
from shoal.engines.gguf_header import GgufHeader, InvalidGguf, read_header


def read(tmp_path: Path, data: bytes) -> GgufHeader:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    return read_header(path)


def read_values(tmp_path: Path, **values: Value) -> GgufHeader:
    """Read a file of the architecture llama with these values beside."""
    return read(
        tmp_path,
        gguf(
            {"general.architecture": "llama"}
            | {f"llama.{k}": values[k] for k in values}
        ),
    )


def test_header_says_what_llama_cpp_says() -> None:
    header, theirs = read_header(TINY), GGUFReader(TINY)

    for key, value in header.values.items():
        found = theirs.fields[key].contents()
        assert found == (list(value) if isinstance(value, tuple) else value), key
    missing = theirs.fields.keys() - header.values.keys()
    assert {each for each in missing if not each.startswith("GGUF.")} == {
        "tokenizer.ggml.tokens"
    }


def test_model_is_described(tmp_path: Path) -> None:
    header = read(tmp_path, gguf() + bytes(1000))

    assert header.architecture == "llama"
    assert header.context == 8192
    assert header.cache == 4 * 2 * (8 + 8) * 2  # layers, heads, keys and values, f16
    assert header.quantization == "Q4_K_M"
    assert header.pooling == 0
    assert header.text("tokenizer.chat_template") == "{{ tools }}"


@pytest.mark.parametrize(
    ("values", "cache"),
    [
        ({}, 0),
        ({"block_count": 2, "attention.head_count": 0}, 0),
        (
            {
                "block_count": 2,
                "embedding_length": 64,
                "attention.head_count": 4,
            },
            2 * 4 * 32 * 2,
        ),
        (
            {
                "block_count": 2,
                "attention.head_count": 4,
                "attention.head_count_kv": 1,
                "attention.key_length": 576,
                "attention.value_length": 512,
            },
            2 * 1 * 1088 * 2,
        ),
        (
            {
                "block_count": 3,
                "embedding_length": 64,
                "attention.head_count": 4,
                "attention.head_count_kv": (0, 2, 0),
            },
            2 * 32 * 2,
        ),
        (
            {
                "block_count": 2**31,
                "embedding_length": 2**31,
                "attention.head_count": 1,
            },
            0,
        ),
    ],
    ids=["nothing", "no heads", "all heads", "own lengths", "by layer", "absurd"],
)
def test_cache_of_a_token(
    tmp_path: Path, values: Mapping[str, Value], cache: int
) -> None:
    assert read_values(tmp_path, **values).cache == cache


@pytest.mark.parametrize("kind", LlamaFileType)
def test_quantization_is_named_as_by_llama_cpp(
    tmp_path: Path, kind: LlamaFileType
) -> None:
    header = read(tmp_path, gguf({"general.file_type": int(kind)}))
    if kind is LlamaFileType.GUESSED:
        assert header.quantization == "F32"  # it is added to others
        return

    name = kind.name.removeprefix("ALL_").removeprefix("MOSTLY_")
    assert header.quantization == name.removesuffix("_MOE")


def test_values_of_other_types_are_unknown(tmp_path: Path) -> None:
    header = read(
        tmp_path,
        gguf(
            {
                "general.architecture": 7,
                "general.file_type": "Q4",
                ".context_length": True,
                ".pooling_type": "mean",
                ".block_count": -1.5,
            }
        ),
    )

    assert header.architecture == ""
    assert header.quantization == ""
    assert (header.context, header.pooling, header.cache) == (0, 0, 0)


def test_large_header_is_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_header, "FIRST_READ", 8)
    words = ["word"] * 10_000
    data = gguf({"a.tokens": words, **LLAMA})

    assert read(tmp_path, data + bytes(100)).context == 8192


def test_every_shorter_file_is_incomplete(tmp_path: Path) -> None:
    whole = gguf()

    for length in range(len(whole)):
        with pytest.raises(InvalidGguf, match="is incomplete"):
            read(tmp_path, whole[:length])


def head(count: int = 1, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 0, count)


KEY = struct.pack("<Q", 1) + b"k"
HUGE = 2**64 - 1


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"<html>", "is not a GGUF file: it begins with b'<htm'"),
        (gguf(version=1), "has version 1"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "has version 50331648"),
        (head(HUGE), "claims to have 18446744073709551615 values"),
        (head() + struct.pack("<Q", HUGE), "a key has 18446744073709551615 bytes"),
        (head() + struct.pack("<Q", 0), "a key has 0 bytes"),
        (head() + KEY + struct.pack("<I", 99), "'k' is of type 99"),
        (head() + KEY + struct.pack("<IQ", 8, HUGE), "a text has 18446744073709551615"),
        (
            head() + KEY + struct.pack("<IIQ", 9, 8, HUGE),
            "'k' has 18446744073709551615",
        ),
        (
            head() + KEY + struct.pack("<IIQ", 9, 4, HUGE),
            "'k' has 18446744073709551615",
        ),
        (head() + KEY + struct.pack("<IIQ", 9, 9, 1), "'k' is an array of type 9"),
        (head() + KEY + struct.pack("<IIQQ", 9, 8, 2, HUGE), "is incomplete"),
        (head() + KEY + struct.pack("<IIQ", 9, 4, 2**20), "is incomplete"),
    ],
    ids=str,
)
def test_hostile_header_is_refused(tmp_path: Path, data: bytes, complaint: str) -> None:
    with pytest.raises(InvalidGguf, match=f"m.gguf .*{complaint}"):
        read(tmp_path, data)


def test_endless_metadata_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_header, "FIRST_READ", 1000)
    monkeypatch.setattr(gguf_header, "HEADER_MAX", 1 << 20)
    data = head() + KEY + struct.pack("<IIQ", 9, 8, 1 << 17) + bytes(2 << 20)

    with pytest.raises(InvalidGguf, match="more than 1 MiB of metadata"):
        read(tmp_path, data[: 1 << 20] + struct.pack("<Q", HUGE) * 1000)


def test_missing_file_raises_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_header(tmp_path / "none.gguf")
