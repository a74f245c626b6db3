"""The coordinators that have admitted this machine."""

import os
import sys
from pathlib import Path

import pytest

from shoal.worker.identity import (
    COORDINATORS,
    KnownCoordinator,
    known_coordinator,
    remember_coordinator,
)

ONE, OTHER = KnownCoordinator("aa", "bb"), KnownCoordinator("cc")


def test_coordinators_are_known_by_their_urls(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    assert known_coordinator(folder, "https://one") is None

    remember_coordinator(folder, "https://one", OTHER)
    remember_coordinator(folder, "https://other", OTHER)
    remember_coordinator(folder, "https://one", ONE)

    assert known_coordinator(folder, "https://one") == ONE
    assert known_coordinator(folder, "https://other") == OTHER
    if sys.platform != "win32":
        assert (folder / COORDINATORS).stat().st_mode & 0o077 == 0


def test_full_disk_loses_no_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_coordinator(tmp_path, "https://one", ONE)

    def fail(number: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            remember_coordinator(tmp_path, "https://other", OTHER)

    assert known_coordinator(tmp_path, "https://one") == ONE
    assert known_coordinator(tmp_path, "https://other") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"https://one": {"x": 1}}'])
def test_damaged_file_names_none(tmp_path: Path, text: str) -> None:
    (tmp_path / COORDINATORS).write_text(text)

    assert known_coordinator(tmp_path, "https://one") is None
    remember_coordinator(tmp_path, "https://one", ONE)
    assert known_coordinator(tmp_path, "https://one") == ONE
