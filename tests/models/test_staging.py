"""A staged model is committed completely or not at all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.domain.errors import ConfigError
from shoal.models.staging import INCOMING, FileWrite, Staging

WRITES = [FileWrite("b", 0, b"1"), FileWrite("a", 0, b""), FileWrite("b", 1, b"2")]


def staging(
    folder: Path, name: str = "org/name", size: int = 2, *, replace: bool = False
) -> Staging:
    return Staging(folder, name, f"id-{name.replace('/', '-')}", size, replace)


def all_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_complete_model_is_moved_into_place(tmp_path: Path) -> None:
    new = staging(tmp_path / "models")
    new.begin()
    new.write(WRITES)
    assert not (tmp_path / "models" / "org").exists()

    path = new.commit()
    new.remove()

    assert path == tmp_path / "models" / "org" / "name"
    assert all_in(tmp_path / "models") == {
        "org",
        "org/name",
        "org/name/a",
        "org/name/b",
    }
    assert (path / "b").read_bytes() == b"12"


def test_aborted_model_leaves_no_files(tmp_path: Path) -> None:
    new = staging(tmp_path)
    new.begin()
    new.write(WRITES)

    new.remove()

    assert all_in(tmp_path) == set()


def test_existing_model_is_replaced_only_on_request(tmp_path: Path) -> None:
    existing = tmp_path / "org" / "name"
    existing.mkdir(parents=True)
    (existing / "old").touch()

    with pytest.raises(ConfigError, match="exists already; give --replace"):
        staging(tmp_path).begin()
    assert all_in(existing) == {"old"}

    new = staging(tmp_path, replace=True)
    new.begin()
    new.write(WRITES)
    new.commit()
    new.remove()

    assert all_in(existing) == {"a", "b"}
    assert all_in(tmp_path) == {"org", "org/name", "org/name/a", "org/name/b"}


def test_model_created_meanwhile_is_kept(tmp_path: Path) -> None:
    new = staging(tmp_path)
    new.begin()
    new.write(WRITES)
    (tmp_path / "org" / "name").mkdir(parents=True)

    with pytest.raises(ConfigError, match="exists already"):
        new.commit()
    new.remove()

    assert all_in(tmp_path) == {"org", "org/name"}


def test_model_larger_than_the_disk_is_rejected_at_once(tmp_path: Path) -> None:
    new = staging(tmp_path, size=1 << 60)

    with pytest.raises(ConfigError, match="free some space, or give another folder"):
        new.begin()
    new.remove()

    assert all_in(tmp_path) == set()


def test_error_names_an_invalid_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=r"cannot write to .*file"):
        staging(tmp_path / "file").begin()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_full_disk_is_reported_and_leaves_no_files(tmp_path: Path) -> None:
    # The limit is the process's, so it is one of its own that runs into it.
    program = f"""
import resource, signal
from pathlib import Path
from shoal.domain.errors import ConfigError
from shoal.models.staging import Staging
from shoal.models.staging import FileWrite
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, 1_500_000))
new = Staging(Path({str(tmp_path)!r}), "m", "id", 0, False)
new.begin()
try:
    new.write([FileWrite("w", at, bytes(1_000_000)) for at in (0, 1_000_000)])
except ConfigError as error:
    print(error)
finally:
    new.remove()
"""

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout == f"cannot write to {tmp_path}: File too large\n"
    assert all_in(tmp_path) == set()


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    program = f"""
import os
from pathlib import Path
from shoal.models.staging import Staging
from shoal.models.staging import FileWrite
new = Staging(Path({str(tmp_path)!r}), "m", "killed", 0, False)
new.begin()
new.write([FileWrite("w", 0, b"half")])
os._exit(9)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    assert (tmp_path / INCOMING / "killed" / "files" / "w").exists()
    assert not (tmp_path / "m").exists()

    new = staging(tmp_path)
    new.begin()

    assert os.listdir(tmp_path / INCOMING) == ["id-org-name"]
    new.remove()
    assert all_in(tmp_path) == set()


def test_old_model_is_restored_after_a_kill_during_replacement(
    tmp_path: Path,
) -> None:
    existing = tmp_path / "org" / "name"
    existing.mkdir(parents=True)
    (existing / "old").touch()
    program = f"""
import os, pathlib
from shoal.models.staging import Staging
new = Staging(pathlib.Path({str(tmp_path)!r}), "org/name", "killed", 0, True)
new.begin()
rename, done = pathlib.Path.rename, []
def once(self, target):
    if done:
        os._exit(9)
    done.append(rename(self, target))
pathlib.Path.rename = once
new.commit()
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    assert not existing.exists()

    new = staging(tmp_path, "another")
    new.begin()
    new.remove()

    assert all_in(tmp_path) == {"org", "org/name", "org/name/old"}


def test_folder_of_other_models_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)

    with pytest.raises(ConfigError, match="contains other models"):
        staging(tmp_path, "org", replace=True).begin()


def test_downloads_of_other_processes_are_kept(tmp_path: Path) -> None:
    first, second = staging(tmp_path, "one"), staging(tmp_path, "two")
    first.begin()
    first.write(WRITES)

    second.begin()
    second.remove()

    assert first.commit() == tmp_path / "one"
    first.remove()
