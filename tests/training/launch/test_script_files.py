"""The files of a script, packed and unpacked."""

import io
import zipfile
from pathlib import Path

import pytest

from shoal.domain.errors import ConfigError, InvalidRequest
from shoal.training.launch import script as script_files
from shoal.training.launch.script import (
    collect_output,
    pack_script,
    unpack_script,
    write_output,
)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    (folder / "lib" / "deep").mkdir(parents=True)
    (folder / "lib" / "__pycache__").mkdir()
    (folder / "train.py").write_text("import lib")
    (folder / "data.txt").write_text("to be or not to be")
    (folder / "lib" / "__init__.py").write_text("")
    (folder / "lib" / "deep" / "model.py").write_text("x = 1")
    (folder / "lib" / "__pycache__" / "old.pyc").write_text("")
    (folder / "lib" / ".secret").write_text("")
    return folder


def names_in(folder: Path) -> set[str]:
    return {
        each.relative_to(folder).as_posix()
        for each in folder.rglob("*")
        if each.is_file()
    }


def test_script_is_unpacked_with_its_files(sources: Path, tmp_path: Path) -> None:
    archive = pack_script(sources / "train.py", [sources / "lib", sources / "data.txt"])
    work = tmp_path / "work"
    work.mkdir()

    unpack_script(archive, work)

    files = {"train.py", "data.txt", "lib/__init__.py", "lib/deep/model.py"}
    assert names_in(work) == files
    assert (work / "lib" / "deep" / "model.py").read_text() == "x = 1"


def test_equal_files_make_equal_archives(sources: Path) -> None:
    script = sources / "train.py"
    first = pack_script(script, [sources / "lib"])
    script.touch()

    assert pack_script(script, [sources / "lib"]) == first


def test_missing_and_doubled_files_are_named(sources: Path) -> None:
    script = sources / "train.py"
    for missing in ("nope.py", "lib"):
        with pytest.raises(ConfigError, match=missing):
            pack_script(sources / missing, [])
    with pytest.raises(ConfigError, match=r"--with .*nope"):
        pack_script(script, [sources / "nope"])
    (sources / "lib" / "train.py").write_text("")
    with pytest.raises(ConfigError, match=r"train\.py"):
        pack_script(script, [sources / "lib" / "train.py"])


def test_too_many_and_too_large_files_are_refused(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, beside = sources / "train.py", [sources / "lib"]
    with monkeypatch.context() as limits:
        limits.setattr(script_files, "FILES_MAX", 2)
        with pytest.raises(ConfigError, match="2 files"):
            pack_script(script, beside)
    with monkeypatch.context() as limits:
        limits.setattr(script_files, "SIZE_MAX", 12)
        with pytest.raises(ConfigError, match=r"model\.py"):
            pack_script(script, beside)
    monkeypatch.setattr(script_files, "ARCHIVE_MAX", 100)
    with pytest.raises(ConfigError, match="compressed"):
        pack_script(script, beside)


def archive_of(name: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(name, "x")
    return data.getvalue()


@pytest.mark.parametrize(
    "archive",
    [b"", b"PK", archive_of("../x"), archive_of("/etc/x"), archive_of("a/../../x")],
)
def test_archive_that_leads_elsewhere_is_refused(
    archive: bytes, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest):
        unpack_script(archive, tmp_path)

    assert names_in(tmp_path) == set()


@pytest.mark.parametrize("together", [script_files.TOGETHER_MAX, 4])
def test_output_is_returned_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """What is beyond a limit goes in pieces."""
    monkeypatch.setattr(script_files, "TOGETHER_MAX", together)
    monkeypatch.setattr(script_files, "PIECE_MAX", 2)
    left, target = tmp_path / "left", tmp_path / "target"
    (left / "deep").mkdir(parents=True)
    (left / "a").write_bytes(b"GGUF")
    (left / "deep" / "model.gguf").write_bytes(b"GGUF!")
    pieces: dict[str, bytes] = {}

    def store(piece: bytes) -> str:
        pieces[piece.hex()] = piece
        return piece.hex()

    files = collect_output(left, store)
    write_output(files, target, pieces.__getitem__)

    assert [*pieces.values()] == ([b"GG", b"UF", b"!"] if together == 4 else [])
    assert [*files] == ["a", "deep/model.gguf"]
    assert (target / "a").read_bytes() == b"GGUF"
    assert (target / "deep" / "model.gguf").read_bytes() == b"GGUF!"


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "a\\..\\x"])
def test_returned_name_that_leads_elsewhere_is_refused(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest):
        write_output({name: b""}, tmp_path / "target", str.encode)


def test_too_many_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_files, "FILES_MAX", 1)
    for name in "ab":
        (tmp_path / name).touch()

    with pytest.raises(InvalidRequest, match="output folder"):
        collect_output(tmp_path, str)
