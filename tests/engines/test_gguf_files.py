"""The file that is selected by default."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from engines.gguf_headers import Value, gguf
from engines.outputs import TINY
from shoal.domain.work import JobKind
from shoal.engines.gguf_files import (
    ModelFolder,
    find_model,
    find_models,
    is_gguf,
    kinds_of,
    largest_fitting_model,
    model_folders,
    model_size,
    projector_of,
)
from shoal.engines.server_kinds import EMBEDDINGS, RERANKINGS, TEXT


def pooled(pooling: int) -> bytes:
    return gguf({"general.architecture": "a", "a.pooling_type": pooling})


SMALL: Mapping[str, Value] = {"general.architecture": "a", "a.context_length": 1}


def write(path: Path, size: int, head: bytes = gguf(SMALL)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + bytes(max(0, size - len(head))))
    return path


def test_largest_fitting_model_is_selected(tmp_path: Path) -> None:
    write(tmp_path / "small.gguf", 100)
    middle = write(tmp_path / "deep" / "middle.gguf", 200)
    write(tmp_path / "large.gguf", 400)
    folders = [ModelFolder(tmp_path, "**/*.gguf")]

    assert largest_fitting_model(folders, memory=300) == middle
    assert largest_fitting_model(folders, memory=299) == tmp_path / "small.gguf"
    assert largest_fitting_model(folders, memory=100) is None
    assert largest_fitting_model(folders, memory=600, limit=300) == middle
    assert largest_fitting_model(folders, limit=300) == middle


def test_dependent_files_are_skipped(tmp_path: Path) -> None:
    write(tmp_path / "mmproj-model.gguf", 100)
    write(tmp_path / "vectors.gguf", 100, pooled(1))
    write(tmp_path / "unfinished.gguf", 100, b"\0\0\0\0")
    write(tmp_path / "cut.gguf", 20, gguf()[:20])
    write(tmp_path / "image.gguf", 100, gguf({"general.architecture": "flux"}))
    write(tmp_path / "lora.gguf", 200, gguf({"general.type": "adapter", **SMALL}))
    write(tmp_path / "empty.gguf", 0, b"")

    assert (
        largest_fitting_model([ModelFolder(tmp_path, "*.gguf")], memory=10**9) is None
    )


@pytest.mark.parametrize(
    ("model", "others", "projector"),
    [
        ("a.gguf", [], None),
        ("a.gguf", ["mmproj-F16.gguf"], "mmproj-F16.gguf"),
        ("a-Q4_K_M.gguf", ["mmproj-model-f16.gguf"], "mmproj-model-f16.gguf"),
        ("a.gguf", ["b.gguf", "mmproj-F16.gguf"], None),
        ("a-2b-Q4.gguf", ["b.gguf", "mmproj-a-2b-f16.gguf"], "mmproj-a-2b-f16.gguf"),
        ("A-2B.Q4.gguf", ["b.gguf", "A-2B.mmproj-Q8_0.gguf"], "A-2B.mmproj-Q8_0.gguf"),
        ("a-2b.gguf", ["b-2b.gguf", "mmproj-b-2b.gguf"], None),
        ("a-2b-Q4_K_M.gguf", ["a-2b-UD-IQ2_XS.gguf", "mmproj.gguf"], "mmproj.gguf"),
        ("a-2b-Q4_K_M.gguf", ["a-2b-MXFP4_MOE.gguf", "mmproj.gguf"], "mmproj.gguf"),
        ("a-2b-Q4_K_M.gguf", ["a-2b-NVFP4.gguf", "mmproj.gguf"], "mmproj.gguf"),
        ("a-2b-Q4_K_M.gguf", ["a-3b-Q4_K_M.gguf", "mmproj.gguf"], None),
        (
            "a-00001-of-00002.gguf",
            ["a-00002-of-00002.gguf", "mmproj.gguf"],
            "mmproj.gguf",
        ),
    ],
)
def test_projector_is_found_beside_its_model(
    tmp_path: Path, model: str, others: list[str], projector: str | None
) -> None:
    for name in (model, *others):
        write(tmp_path / name, 100)

    found = projector_of(tmp_path / model)

    assert (found and found.name) == projector


def test_smallest_of_several_projectors_is_used(tmp_path: Path) -> None:
    for name, size in (("a", 900), ("mmproj-F32", 400), ("mmproj-F16", 200)):
        write(tmp_path / f"{name}.gguf", size)

    assert projector_of(tmp_path / "a.gguf") == tmp_path / "mmproj-F16.gguf"


def test_incomplete_downloads_are_skipped(tmp_path: Path) -> None:
    write(tmp_path / ".incoming" / "id" / "files" / "half.gguf", 100)

    assert (
        largest_fitting_model([ModelFolder(tmp_path, "**/*.gguf")], memory=1000) is None
    )


def test_size_of_a_split_model_includes_all_parts(tmp_path: Path) -> None:
    parts = [write(tmp_path / f"m-0000{n}-of-00003.gguf", 100) for n in (1, 2, 3)]
    folders = [ModelFolder(tmp_path, "*.gguf")]

    assert list(find_models(folders)) == parts[:1]
    assert model_size(parts[0]) == 300
    assert largest_fitting_model(folders, memory=449) is None
    assert largest_fitting_model(folders, memory=450) == parts[0]
    parts[2].unlink()
    assert largest_fitting_model(folders, memory=450) is None, "a part is missing"


def test_file_is_found_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "Qwen3-8B-Q4_K_M.gguf", 100)
    folders = [
        ModelFolder(tmp_path / "not there", "*.gguf"),
        ModelFolder(tmp_path, "*.gguf"),
    ]

    assert find_model(folders, "Qwen3-8B-Q4_K_M") == path
    assert find_model(folders, "Qwen3*") == path
    assert find_model(folders, "qwen") is None


@pytest.mark.parametrize(
    ("pooling", "kinds"),
    [(0, TEXT), (1, EMBEDDINGS), (2, EMBEDDINGS), (3, EMBEDDINGS), (4, RERANKINGS)],
)
def test_pooling_declares_what_a_model_is_for(
    tmp_path: Path, pooling: int, kinds: frozenset[JobKind]
) -> None:
    path = write(tmp_path / "m.gguf", 100, pooled(pooling))

    assert kinds_of(path) == kinds
    assert kinds_of(TINY) == TEXT


def test_unreadable_file_is_skipped(tmp_path: Path) -> None:
    assert is_gguf(TINY)
    assert not is_gguf(tmp_path)
    assert not is_gguf(tmp_path / "none.gguf")
    assert model_size(tmp_path / "none.gguf") == 0


def test_default_folders_are_configurable(tmp_path: Path) -> None:
    environment = {"HF_HOME": str(tmp_path / "hf"), "LLAMA_CACHE": str(tmp_path / "l")}
    snapshot = tmp_path / "hf" / "hub" / "models--a--b" / "snapshots" / "1"
    expected = [
        write(tmp_path / "data" / "models" / "x" / "own.gguf", 10),
        write(snapshot / "sub" / "hub.gguf", 10),
        write(tmp_path / "l" / "cache.gguf", 10),
    ]

    found = list(find_models(model_folders(tmp_path / "data", environment)[:3]))

    assert found == expected
