"""Models copied between processes, some of which are killed in the middle."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pexpect
import pytest

from live.gated_line import gated_line
from live.programs import KEY, PATIENCE, TINY, TOKEN, Program, Programs, eventually
from models.transfer_pair import files

BIG = 300_000_000  # bytes
PART = 20_000_000  # bytes after which a copy is interrupted


@pytest.fixture
def model(programs: Programs) -> Path:
    """A model with a small file, and one that is large and costs no disk to make."""
    folder = programs.folder / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with (folder / "weights.bin").open("wb") as weights:
        weights.write(b"begin")
        weights.truncate(BIG)
    return folder


def share(programs: Programs, model: Path, *flags: str) -> tuple[Program, str]:
    """Start a coordinator that shares a model; return it, and where peers reach it."""
    pool = programs.serve("--share", f"org/name={model}", *flags)
    return pool.program, f"127.0.0.1:{pool.port}"


def getting(programs: Programs, peer: str, *flags: str) -> Program:
    return programs.run(
        *("models", "get", "org/name", "--from", peer, "--json"),
        *("--to", str(programs.folder / "ours"), *(flags or ("--token", TOKEN))),
    )


@contextmanager
def half_copied(programs: Programs, peer: str) -> Iterator[tuple[Program, Event]]:
    """Begin to copy the model; yield what gets it, and what lets the rest come."""
    staged = programs.folder / "ours"
    with gated_line(int(peer.rpartition(":")[2]), PART) as (port, go_on):
        get = getting(programs, f"127.0.0.1:{port}")
        eventually(
            lambda: any(
                each.stat().st_size
                for each in staged.glob(".incoming/*/files/weights.bin")
            ),
            "a part",
        )
        yield get, go_on


def test_model_is_copied_from_a_coordinator(programs: Programs, model: Path) -> None:
    _, peer = share(programs, model)

    get = getting(programs, peer)
    line = get.line()

    assert line is not None, get.errors
    got = json.loads(line)
    path = programs.folder / "ours" / "org" / "name"
    assert (got["path"], got["size"], got["files"]) == (str(path), BIG + 2, 2)
    assert got["gguf"] is None
    compared = subprocess.run(["diff", "-r", str(model), str(path)], check=False)
    assert compared.returncode == 0
    assert get.wait() == 0


def test_model_of_a_worker_is_found_and_copied_from_the_coordinator(
    programs: Programs,
) -> None:
    pool = programs.serve()
    pool.joined("otter")

    find = programs.run("models", "find", "tiny", "--url", pool.url, "--api-key", KEY)
    lines = [(find.line() or "").rstrip() for _ in range(3)]
    to = programs.folder / "ours"
    get = programs.run(
        *("models", "get", "tiny", "--from", pool.url, "--token", TOKEN),
        *("--to", str(to)),
    )

    assert lines[1].startswith("shoal:otter "), find.errors
    assert (
        lines[2]
        == f"to copy it: shoal models get tiny --from {pool.url} --token JOIN_TOKEN"
    )
    assert get.wait() == 0, get.errors
    assert (to / "tiny" / TINY.name).read_bytes() == TINY.read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="pexpect needs a pty")
def test_download_shows_its_progress_at_a_terminal(
    programs: Programs, model: Path
) -> None:
    _, peer = share(programs, model)
    ours = programs.folder / "ours"

    terminal = pexpect.spawn(
        sys.executable,
        [
            *("-m", "shoal", "models", "get", "org/name", "--from", peer),
            *("--token", TOKEN, "--to", str(ours)),
        ],
        encoding="utf-8",
        timeout=PATIENCE,
        dimensions=(24, 100),
        env={**os.environ, "TERM": "xterm"},
    )

    terminal.expect(r"org/name.*/300\.0 MB.*MB/s")
    terminal.expect_exact(f"{ours / 'org' / 'name'} (2 files, 300.0 MB)")
    terminal.expect(pexpect.EOF)
    terminal.wait()
    assert terminal.exitstatus == 0


def test_unauthenticated_peers_get_no_model(programs: Programs, model: Path) -> None:
    _, peer = share(programs, model)

    get = getting(programs, peer, "--passcode", "guessed")

    assert get.wait() == 1
    assert "did not admit this one" in get.errors
    assert not (programs.folder / "ours").exists()


@pytest.mark.parametrize("killed", ["the getter", "the sharer"])
def test_kill_during_a_download_leaves_no_partial_model(
    programs: Programs, model: Path, killed: str
) -> None:
    sharer, peer = share(programs, model)
    with half_copied(programs, peer) as (get, go_on):
        (get if killed == "the getter" else sharer).kill()
        go_on.set()
        if killed == "the sharer":
            assert get.wait() == 1
            assert "the connection ended" in get.errors
            assert not (programs.folder / "ours" / ".incoming").exists()
    if killed == "the getter":
        assert sharer.process.poll() is None
    assert not (programs.folder / "ours" / "org").exists()

    if killed == "the sharer":
        (programs.folder / "data").rename(programs.folder / "before")
        _, peer = share(programs, model)
    again = getting(programs, peer)
    assert again.wait() == 0, again.errors
    assert set(files(programs.folder / "ours")) == {
        "org/name/config.json",
        "org/name/weights.bin",
    }


def test_interrupted_download_leaves_no_files(programs: Programs, model: Path) -> None:
    _, peer = share(programs, model)
    with half_copied(programs, peer) as (get, _):
        assert get.terminate() == 130

    assert files(programs.folder / "ours") == {}


def test_full_disk_is_the_reported_reason(programs: Programs, model: Path) -> None:
    _, peer = share(programs, model)
    command = (
        "import resource, signal, sys; from shoal.cli.main import main; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10**8, 10**8)); sys.exit(main())"
    )
    ours = programs.folder / "ours"

    done = subprocess.run(
        [
            *(sys.executable, "-c", command, "models", "get", "org/name"),
            *("--from", peer, "--token", TOKEN, "--to", str(ours)),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )

    assert done.returncode == 1
    assert f"cannot write to {ours}: File too large" in done.stderr
    assert files(ours) == {}
