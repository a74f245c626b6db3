"""Hashes of files, which are computed once and never of another content."""

import os
from pathlib import Path

import pytest

from models.manifests import manifest_of
from shoal.models import file_hashes
from shoal.models.file_hashes import FileHashes, identity, read_chunk
from shoal.models.library import Library, NotShareable, SharedModel
from shoal.models.manifest import CHUNK

CONTENT = {"a.bin": b"a" * (CHUNK + 1), "b.json": b"{}"}


@pytest.fixture
def model(tmp_path: Path) -> SharedModel:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
    found = Library({"m": folder}).find("m")
    assert found is not None
    return found


def spoil(hashes: Path) -> None:
    """Replace all hashes that are kept, so that their use is noticed."""
    for each in hashes.iterdir():
        each.write_bytes(each.read_bytes()[:-1] + b"!")


def test_hashes_are_kept_until_the_file_changes(
    model: SharedModel, tmp_path: Path
) -> None:
    expected = manifest_of(CONTENT)
    assert FileHashes(tmp_path).manifest(model) == expected
    spoil(tmp_path / "hashes")

    assert FileHashes(tmp_path).manifest(model) != expected  # not computed again
    for file in model.files:
        about = file.path.stat()
        os.utime(file.path, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    assert FileHashes(tmp_path).manifest(model) == expected


def test_known_hashes_are_those_of_the_chunks(
    model: SharedModel, tmp_path: Path
) -> None:
    hashes = FileHashes(tmp_path)
    path = model.files[0].path
    assert hashes.known(path) is None

    hashes.manifest(model)

    assert hashes.known(path) == manifest_of(CONTENT).files[0].chunks
    assert hashes.known(tmp_path / "missing") is None


def test_address_is_known_once_all_files_are_hashed(
    model: SharedModel, tmp_path: Path
) -> None:
    hashes = FileHashes(tmp_path)
    files = [(each.name, each.path) for each in model.files]
    assert hashes.address(files) == ""

    address = hashes.manifest(model).address

    assert hashes.address(files[::-1]) == address
    assert hashes.address([*files, ("c", tmp_path / "missing")]) == ""
    os.utime(files[0][1], (0, 0))
    assert hashes.address(files) == ""


def test_damaged_hashes_are_computed_again(model: SharedModel, tmp_path: Path) -> None:
    hashes = FileHashes(tmp_path)
    hashes.manifest(model)
    for each in (tmp_path / "hashes").iterdir():
        each.write_bytes(b"?")

    assert hashes.manifest(model) == manifest_of(CONTENT)


def test_only_so_many_are_kept(
    model: SharedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_hashes, "ENTRIES_MAX", 1)

    FileHashes(tmp_path).manifest(model)

    assert len([*(tmp_path / "hashes").iterdir()]) == 1


def test_a_data_folder_that_cannot_be_written_only_costs_time(
    model: SharedModel, tmp_path: Path
) -> None:
    (tmp_path / "hashes").write_text("a file")

    assert FileHashes(tmp_path).manifest(model) == manifest_of(CONTENT)


def test_hashing_ends_with_the_program(model: SharedModel) -> None:
    hashes = FileHashes()
    hashes.close()

    with pytest.raises(NotShareable, match="this program ends"):
        hashes.manifest(model)


def test_a_chunk_of_a_changed_or_missing_file_is_not_read(model: SharedModel) -> None:
    path = model.files[0].path
    place, before = manifest_of(CONTENT).place(1), identity(path.stat())
    data = bytearray(CHUNK)
    assert read_chunk(path, place, before, memoryview(data)) == 1
    assert data[:1] == b"a"

    path.write_bytes(b"b" * (CHUNK + 2))
    with pytest.raises(NotShareable, match="has changed"):
        read_chunk(path, place, before, memoryview(data))
    path.unlink()
    with pytest.raises(NotShareable, match="No such file"):
        read_chunk(path, place, before, memoryview(data))
