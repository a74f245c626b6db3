"""Models of the hub's cache that are stored as safetensors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from shoal.domain.work import JobKind
from shoal.models.safetensors_files import (
    ENGINES,
    HEADER_MAX,
    InvalidSafetensors,
    describe_model,
    in_cache,
    read_bytes_by_type,
)

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 4096,
}
WEIGHTS = save(
    {"a": np.zeros((8, 8), np.float16), "scale": np.zeros(2, np.float32)},
    {"format": "pt"},
)


def a_model(
    hub: Path, name: str, config: object = CONFIG, data: bytes = WEIGHTS
) -> Path:
    folder = hub / f"models--org--{name}" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(data)
    return folder


def file_of(tmp_path: Path, header: object, rest: bytes = b"") -> Path:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data + rest)
    return path


def test_a_model_is_described_by_its_headers_and_configuration(tmp_path: Path) -> None:
    found = describe_model(a_model(tmp_path, "m"))

    assert found.name == "org/m"
    assert found.size == len(WEIGHTS)
    assert found.quantization == "F16"
    assert found.context == 4096
    assert found.cache == 2 * 2 * 3 * 2 * 8
    assert found.engine == ENGINES
    assert found.memory(1000, 2) == found.size + found.size // 10 + 2000 * found.cache


@pytest.mark.parametrize(
    ("config", "quantization"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq 4 bits"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "4 bits"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": "none"}, "F16"),
    ],
)
def test_the_configuration_names_the_quantization(
    tmp_path: Path, config: dict[str, object], quantization: str
) -> None:
    found = describe_model(a_model(tmp_path, "m", CONFIG | config))

    assert found.quantization == quantization


def test_numbers_of_a_model_that_reads_images_are_those_of_its_text(
    tmp_path: Path,
) -> None:
    odd = {"max_position_embeddings": True, "num_hidden_layers": 1e99, "head_dim": -1}

    assert describe_model(a_model(tmp_path, "m", {"text_config": CONFIG})).cache
    unknown = describe_model(a_model(tmp_path, "odd", odd))
    assert (unknown.context, unknown.cache) == (0, 0)


def test_models_of_vectors_have_their_kind(tmp_path: Path) -> None:
    folder = a_model(tmp_path, "m")
    (folder / "modules.json").write_text("[]")

    assert describe_model(folder).kinds == {JobKind.EMBEDDING}


def test_damaged_models_are_left_out(tmp_path: Path) -> None:
    good = a_model(tmp_path, "good")
    a_model(tmp_path, "cut", data=WEIGHTS[:40])
    a_model(tmp_path, "odd", config=[])
    none = a_model(tmp_path, "none")
    (none / "model.safetensors").unlink()

    assert [folder for folder, _ in in_cache(tmp_path)] == [good]


TENSOR = {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": TENSOR | {"data_offsets": [0, 5]}},
        {"a": TENSOR | {"data_offsets": [-4, 0]}},
        {"a": TENSOR | {"data_offsets": [4, 0]}},
        {"a": TENSOR | {"data_offsets": [0, 1 << 70]}},
        {"a": TENSOR | {"dtype": 1}},
        {"a": {}},
        {"a": "F16"},
        [TENSOR],
        b"{",
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_hostile_header_is_refused(tmp_path: Path, header: object) -> None:
    with pytest.raises(InvalidSafetensors, match=r"x\.safetensors"):
        read_bytes_by_type(file_of(tmp_path, header, b"1234"))


@pytest.mark.parametrize("length", [HEADER_MAX + 1, 1 << 63, 5])
def test_a_length_beyond_the_file_is_refused_unread(
    tmp_path: Path, length: int
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")

    with pytest.raises(InvalidSafetensors, match="no file of safetensors"):
        read_bytes_by_type(path)


@given(data=st.binary(max_size=200), cut=st.integers(0, len(WEIGHTS)))
def test_no_bytes_break_the_reader(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cut: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    for each in (data, WEIGHTS[:cut], WEIGHTS[:cut] + data):
        path.write_bytes(each)
        try:
            read_bytes_by_type(path)
        except InvalidSafetensors:
            continue
