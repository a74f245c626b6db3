"""Default names of workers."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.worker.identity import chosen_name, unique_name

HOST = socket.gethostname()


def test_workers_of_one_host_have_unique_names(tmp_path: Path) -> None:
    with unique_name(tmp_path) as first, unique_name(tmp_path) as second:
        assert (first, second) == (HOST, f"{HOST}-2")


def test_name_is_the_same_after_a_restart(tmp_path: Path) -> None:
    with unique_name(tmp_path):
        pass

    with unique_name(tmp_path) as name:
        assert name == HOST


def test_name_is_free_after_its_process_exits(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from shoal.worker.identity import unique_name\n"
        "with unique_name(Path(sys.argv[1])) as name:\n"
        "    print(name, flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline().strip() == HOST
        with unique_name(tmp_path) as name:
            assert name == f"{HOST}-2"
        other.kill()

    with unique_name(tmp_path) as name:
        assert name == HOST


def test_without_locks_the_name_has_the_process_id(
    tmp_path: Path,
) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")

    with unique_name(file) as name:
        assert name == f"{HOST}-{os.getpid()}"


def test_duplicate_chosen_name_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        chosen_name(tmp_path, "vm", "http://a"),
        chosen_name(tmp_path, "vm", "http://b"),
        chosen_name(tmp_path, "other", "http://a"),
    ):
        assert not caplog.messages

        with chosen_name(tmp_path, "vm", "http://a") as name:
            assert name == "vm"

    (warning,) = caplog.messages
    assert "is named vm and joins http://a as well" in warning
    assert "--name" in warning
