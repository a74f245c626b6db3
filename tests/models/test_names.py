"""Valid names of models and files."""

import pytest

from shoal.domain.errors import InvalidRequest
from shoal.models.names import (
    NAME_MAX,
    check_file_name,
    check_model_name,
    model_folder_name,
)

MODELS = ["llama", "mlx-community/Qwen3-8B-4bit", "qwen3:8b", "hf.co/org/name:Q4_K_M"]
NO_MODELS = [
    "",
    ".",
    "..",
    "../../x",
    "a/../b",
    "/abs",
    "a//b",
    "a/",
    "_transfers",
    ".incoming",
    "a/.hidden",
    "C:\\x",
    "nul",
    "org/COM1.x",
    "ends.",
    "line\nbreak",
    "name\n",
    "null\0byte",
    "ü",
    "a/b/c/d/e",
    "x" * (NAME_MAX + 1),
]
FILES = ["model.safetensors", "model-00001-of-00002.gguf", "__init__.py", "a+b=c@d"]
NO_FILES = [
    "",
    ".",
    "..",
    "../x",
    "a/b",
    "/etc/passwd",
    "C:\\x",
    "a:stream",
    ".hidden",
    "-rf",
    "aux",
    "Con.txt",
    "ends.",
    "with blank",
    "line\n",
    "x\0",
    "x" * (NAME_MAX + 1),
]


@pytest.mark.parametrize("name", MODELS)
def test_common_model_names_are_valid(name: str) -> None:
    assert check_model_name(name) == name


@pytest.mark.parametrize("name", NO_MODELS)
def test_unsafe_model_names_are_rejected(name: str) -> None:
    with pytest.raises(InvalidRequest, match="expected letters, digits"):
        check_model_name(name)


@pytest.mark.parametrize("name", FILES)
def test_common_file_names_are_valid(name: str) -> None:
    assert check_file_name(name) == name


@pytest.mark.parametrize("name", NO_FILES)
def test_unsafe_file_names_are_rejected(name: str) -> None:
    with pytest.raises(InvalidRequest, match="expected letters, digits"):
        check_file_name(name)


def test_error_truncates_a_long_name() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_file_name("/" * 100_000)

    assert len(str(refusal.value)) < 300


def test_tag_becomes_a_portable_folder_name() -> None:
    assert model_folder_name("org/qwen3:8b") == "org/qwen3-8b"
