"""What the dashboard's folder holds: few bytes, and libraries with their licences."""

import gzip
import re
from pathlib import Path

import shoal

FOLDER = Path(shoal.__file__).parent / "dashboard_files"
VENDOR = FOLDER / "vendor"
SIZE_MAX = 300_000  # bytes that a browser receives, if it opens every view
LICENCE = re.compile(r"Apache License|Permission is hereby granted")


def files() -> list[Path]:
    return [each for each in FOLDER.rglob("*") if each.is_file()]


def test_folder_is_small_as_it_is_served() -> None:
    sizes = [len(gzip.compress(each.read_bytes(), 9)) for each in files()]

    assert sum(sizes) <= SIZE_MAX


def test_vendored_libraries_have_licence_and_version() -> None:
    page = (VENDOR / "README.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \|(.*)\|$", page, re.MULTILINE)
    listed = dict(rows)
    libraries = {
        each.name for each in VENDOR.iterdir() if each.suffix in (".js", ".css")
    }

    assert {*listed} == libraries
    for row in listed.values():
        assert re.search(r"\d+\.\d+\.\d+", row)
        licences = re.findall(r"`([\w.]+\.LICENSE)`", row)
        assert licences
        for each in licences:
            assert LICENCE.search((VENDOR / each).read_text())


def test_nothing_is_inline_or_from_elsewhere() -> None:
    index = (FOLDER / "index.html").read_text()

    assert re.findall(r"<script(?![^>]*\bsrc=)", index) == []
    assert re.findall(r"\sstyle=|\son\w+=", index) == []
    assert re.findall(r"(?:src|href)=\"(?!/dashboard/)", index) == []
    for each in files():
        if each.suffix in (".js", ".css") and VENDOR not in each.parents:
            text = each.read_text()
            assert not re.search(r"""(?:from|import)\s*\(?["']https?:""", text), each
            assert not re.search(r"url\(\s*[\"']?https?:", text), each
            assert "innerHTML" not in text, each
            assert not re.search(r"<[^>]*\sstyle=\"", text), each


def test_imported_modules_are_there() -> None:
    for each in files():
        if each.suffix != ".js" or VENDOR in each.parents:
            continue
        for path in re.findall(
            r"""(?:from|import)\s+["'](\.[^"']+)["']""", each.read_text()
        ):
            assert (each.parent / path).resolve().is_file(), f"{each}: {path}"
