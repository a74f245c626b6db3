"""The models among the files of a machine."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.gguf_headers import LLAMA, gguf
from engines.outputs import TINY
from shoal.domain.work import Feature, HubModel
from shoal.domain.worker import LoadableModel
from shoal.engines import loadable_files
from shoal.engines.loadable_files import FileLibrary, describe_file
from shoal.engines.server_kinds import EMBEDDINGS, RERANKINGS, TEXT


def write(path: Path, data: bytes = gguf(), size: int = 1000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data + bytes(size - len(data)))
    return path


def library(folder: Path) -> FileLibrary:
    def listed() -> Iterator[tuple[str, Path]]:
        return ((each.stem, each) for each in sorted(folder.glob("*.gguf")))

    return FileLibrary(listed)


def test_file_is_described_by_its_header(tmp_path: Path) -> None:
    model = describe_file(write(tmp_path / "m.gguf"))

    assert (model.name, model.size, model.engine) == ("m", 1000, "embedded")
    assert (model.context, model.cache, model.quantization) == (8192, 256, "Q4_K_M")
    assert model.kinds == TEXT
    assert {Feature.TOOLS, Feature.CONTINUE} <= model.features
    assert {Feature.IMAGES, Feature.AUDIO}.isdisjoint(model.features)
    assert model.digest == ""


def test_template_without_tools_has_none(tmp_path: Path) -> None:
    values = {**LLAMA, "tokenizer.chat_template": "{{ messages }}"}

    model = describe_file(write(tmp_path / "m.gguf", gguf(values)))

    assert Feature.TOOLS not in model.features


@pytest.mark.parametrize(("pooling", "kinds"), [(1, EMBEDDINGS), (4, RERANKINGS)])
def test_models_that_write_no_text_have_no_features(
    tmp_path: Path, pooling: int, kinds: object
) -> None:
    values = {**LLAMA, "llama.pooling_type": pooling}

    model = describe_file(write(tmp_path / "m.gguf", gguf(values)))

    assert model.kinds == kinds
    assert model.features == frozenset()


def test_projector_adds_its_senses_and_its_size(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    senses = {"clip.has_vision_encoder": True, "clip.has_audio_encoder": False}
    write(tmp_path / "mmproj-m.gguf", gguf(senses), 500)

    model = describe_file(path)

    assert Feature.IMAGES in model.features
    assert Feature.AUDIO not in model.features
    assert model.size == 1500

    write(tmp_path / "mmproj-m.gguf", b"damaged", 500)
    assert Feature.IMAGES not in describe_file(path).features


def test_split_model_is_one_of_all_its_parts(tmp_path: Path) -> None:
    first = write(tmp_path / "m-00001-of-00002.gguf")
    found = library(tmp_path)
    found.scan()
    assert found.files == {}, "a part is missing"

    write(tmp_path / "m-00002-of-00002.gguf", b"no header", 300)
    found.scan()
    assert [each.model.size for each in found.files.values()] == [1300]
    assert [each.path for each in found.files.values()] == [first]


def test_file_of_the_hubs_cache_has_its_repository(tmp_path: Path) -> None:
    cache, commit = tmp_path / "hub", "a" * 40
    for place, found in (
        (f"models--org--name-1.5/snapshots/{commit}/Q8/m.gguf", True),
        ("models--org--name/snapshots/main/m.gguf", False),
        (f"models--name/snapshots/{commit}/m.gguf", False),
        (f"other/snapshots/{commit}/m.gguf", False),
        ("m.gguf", False),
    ):
        model = describe_file(write(cache / place))

        expected = HubModel("org/name-1.5", "Q8/m.gguf", commit, 1000)
        assert model.hub == (expected if found else None), place


def test_only_files_that_changed_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def describe(path: Path) -> LoadableModel:
        read.append(path.name)
        return describe_file(path)

    monkeypatch.setattr(loadable_files, "describe_file", describe)
    one, two = write(tmp_path / "one.gguf"), write(tmp_path / "two.gguf")
    write(tmp_path / "no.gguf", b"<html>")
    write(tmp_path / "image.gguf", gguf({"general.architecture": "flux"}))
    found = library(tmp_path)
    found.scan()
    assert found.files.keys() == {"one", "two"}
    assert sorted(read) == ["image.gguf", "no.gguf", "one.gguf", "two.gguf"]

    found.scan()
    assert len(read) == 4

    os.utime(one, (1, 1))
    two.unlink()
    write(tmp_path / "no.gguf", size=2000)
    found.scan()
    assert found.files.keys() == {"no", "one"}
    assert read[4:] == ["no.gguf", "one.gguf"]


def test_first_of_a_name_counts_and_odd_names_do_not(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.gguf"), write(tmp_path / "b.gguf", size=2000)
    files = [("a", first), ("a", second), ("", second), ("x" * 300, second)]
    found = FileLibrary(lambda: files)

    found.scan()

    assert {name: each.path for name, each in found.files.items()} == {"a": first}


def test_many_files_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loadable_files, "MODELS_MAX", 2)
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.gguf").symlink_to(TINY)
    found = library(tmp_path)

    found.scan()

    assert found.files.keys() == {"a", "b"}
