"""Files and folders that only their owner can read, on POSIX systems."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.config.private_files import (
    create_private,
    make_private_folder,
    open_private,
    readable_by_others,
    write_private,
)
from shoal.domain.errors import ConfigError


@pytest.fixture(autouse=True)
def careless() -> Iterator[None]:
    """Let new files be readable by everybody, unless they are made otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_new_folder_is_private(tmp_path: Path) -> None:
    make_private_folder(tmp_path / "a" / "b")

    assert mode(tmp_path / "a" / "b") == 0o700


def test_existing_folder_is_restricted(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)

    make_private_folder(tmp_path)

    assert mode(tmp_path) == 0o700


def test_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)

    with pytest.raises(ConfigError, match=f"another user .uid {uid}.*own, such as"):
        make_private_folder(tmp_path)


def test_shared_folder_is_refused_and_stays_shared(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)

    with pytest.raises(ConfigError, match="is shared with other users: use a folder"):
        make_private_folder(tmp_path)

    assert mode(tmp_path) == 0o1777


def test_file_is_private_from_its_creation(tmp_path: Path) -> None:
    file = tmp_path / "secret"

    with open(file, "x", opener=open_private) as new:
        assert mode(file) == 0o600
        new.write("secret")


@pytest.mark.parametrize("make", [create_private, lambda file: write_private(file, "")])
def test_existing_file_is_restricted(tmp_path: Path, make: object) -> None:
    assert callable(make)
    file = tmp_path / "secret"
    file.write_text("known")
    assert readable_by_others(file)

    make(file)

    assert mode(file) == 0o600


def test_existing_file_keeps_its_content(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("known")

    create_private(file)

    assert file.read_text() == "known"
