"""Models copied between processes, some of which are killed in the middle."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pexpect
import pytest

from live.gated_line import GatedLine, gated_line
from live.programs import KEY, PATIENCE, TINY, TOKEN, Program, Programs, eventually

BLOCK = os.urandom(1_000_003)  # no two chunks of its repetitions are the same
BIG = 100 * len(BLOCK)  # bytes
PART = 20_000_000  # bytes after which a copy is interrupted
ONCE_MORE = 12 << 20  # bytes: what may be on its way to a process when it is killed


@pytest.fixture
def model(programs: Programs) -> Path:
    """A model with a small file and a large one."""
    folder = programs.folder / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "weights.bin").write_bytes(100 * BLOCK)
    return folder


def share(programs: Programs, model: Path, *flags: str) -> tuple[Program, str]:
    """Start a coordinator that shares a model; return it, and where peers reach it."""
    pool = programs.serve("--share", f"org/name={model}", *flags)
    return pool.program, f"127.0.0.1:{pool.port}"


def getting(
    programs: Programs,
    *peers: str,
    flags: tuple[str, ...] = (),
    ours: Path | None = None,
) -> Program:
    sources = [part for peer in peers for part in ("--from", peer)]
    return programs.run(
        *("models", "get", "org/name", *sources, "--json"),
        *("--to", str(ours or programs.folder / "ours")),
        *(flags or ("--token", TOKEN)),
    )


def port_of(peer: str) -> int:
    return int(peer.rpartition(":")[2])


@contextmanager
def half_copied(programs: Programs, peer: str) -> Iterator[tuple[Program, GatedLine]]:
    """Begin to copy the model; yield what gets it, and its line to the peer."""
    with gated_line(port_of(peer), PART) as line:
        get = getting(programs, f"127.0.0.1:{line.port}")
        eventually(lambda: held(programs.folder / "ours") > PART // 2, "a part")
        yield get, line


def held(ours: Path) -> int:
    """Return about how many bytes of the model lie in its hidden folder."""
    parts = ours.glob(".partial/*/files/weights.bin")
    return sum(each.stat().st_blocks * 512 for each in parts)


def assert_same(model: Path, copy: Path) -> None:
    compared = subprocess.run(["diff", "-r", str(model), str(copy)], check=False)
    assert compared.returncode == 0


def test_model_is_copied_from_a_coordinator(programs: Programs, model: Path) -> None:
    _, peer = share(programs, model)

    get = getting(programs, peer)
    line = get.line()

    assert line is not None, get.errors
    got = json.loads(line)
    path = programs.folder / "ours" / "org" / "name"
    assert (got["path"], got["size"], got["files"]) == (str(path), BIG + 2, 2)
    assert got["gguf"] is None
    assert_same(model, path)
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

    terminal.expect(r"org/name.*/100\.0 MB.*MB/s")
    terminal.expect_exact(f"{ours / 'org' / 'name'} (2 files, 100.0 MB)")
    terminal.expect(pexpect.EOF)
    terminal.wait()
    assert terminal.exitstatus == 0


def test_unauthenticated_peers_get_no_model(programs: Programs, model: Path) -> None:
    _, peer = share(programs, model)

    get = getting(programs, peer, flags=("--passcode", "guessed"))

    assert get.wait() == 1
    assert "did not admit this one" in get.errors
    assert not (programs.folder / "ours").exists()


def test_killed_getter_goes_on_where_it_ended(programs: Programs, model: Path) -> None:
    sharer, peer = share(programs, model)
    ours = programs.folder / "ours"
    with half_copied(programs, peer) as (get, first):
        get.kill()
        came = first.passed
    assert sharer.process.poll() is None
    assert not (ours / "org").exists()

    with gated_line(port_of(peer), 2 * BIG) as line:
        again = getting(programs, f"127.0.0.1:{line.port}")
        assert again.wait() == 0, again.errors

    assert_same(model, ours / "org" / "name")
    assert not (ours / ".partial").exists()
    assert came + line.passed < BIG * 1.02 + ONCE_MORE


def test_killed_sharer_is_waited_for(programs: Programs, model: Path) -> None:
    sharer, peer = share(programs, model)
    with half_copied(programs, peer) as (get, line):
        sharer.kill()
        line.go_on.set()
        assert get.wait() == 1
        assert "what has arrived is kept: run it again to go on" in get.errors
        assert not (programs.folder / "ours" / "org").exists()

        with_its_port = ("--port", str(port_of(peer)))
        share(programs, model, *with_its_port)
        again = getting(programs, peer)
        assert again.wait() == 0, again.errors

    assert_same(model, programs.folder / "ours" / "org" / "name")


def test_one_of_two_sources_is_killed_and_the_other_changes(
    programs: Programs, model: Path
) -> None:
    """The third has it all, and the model is whole and right."""
    theirs = programs.folder / "damaged"
    shutil.copytree(model, theirs)
    killed, one = share(programs, model)
    others = [share_more(programs, theirs, "b"), share_more(programs, model, "c")]
    with gated_line(port_of(one), PART // 2) as line:
        get = getting(programs, f"127.0.0.1:{line.port}", *others)
        eventually(lambda: held(programs.folder / "ours") > 0, "a part")
        killed.kill()
        weights = theirs / "weights.bin"
        about = weights.stat()
        with weights.open("r+b") as file:
            file.write(os.urandom(BIG))
        os.utime(weights, ns=(about.st_atime_ns, about.st_mtime_ns))

        assert get.wait() == 0, get.errors

    assert_same(model, programs.folder / "ours" / "org" / "name")


def test_a_second_getter_gets_what_the_first_has(
    programs: Programs, model: Path
) -> None:
    """The coordinator sends each of them a part, and then nothing more."""
    _, peer = share(programs, model)
    ours, others = programs.folder / "ours", programs.folder / "others"
    with half_copied(programs, peer) as (first, line):
        eventually(lambda: line.passed >= PART, "all that it gets for now")
        with gated_line(port_of(peer), PART) as second_line:
            second = getting(*(programs, f"127.0.0.1:{second_line.port}"), ours=others)
            eventually(lambda: held(others) > PART * 1.5, "a part of both")
            assert held(ours) < PART * 1.5
            second_line.go_on.set()
            line.go_on.set()
            assert (first.wait(), second.wait()) == (0, 0), second.errors

    for copy in (ours, others):
        assert_same(model, copy / "org" / "name")


def share_more(programs: Programs, model: Path, name: str) -> str:
    """Start another coordinator that shares a model; return where peers reach it."""
    program = programs.run(
        *("serve", "--json", "--port", "0", "--log-level", "warning"),
        *("--data-dir", str(programs.folder / name), "--join-token", TOKEN),
        *("--share", f"org/name={model}"),
    )
    return str(program.event("ready")["url"]).removeprefix("http://")


def test_interrupted_download_is_kept(programs: Programs, model: Path) -> None:
    _, peer = share(programs, model)
    ours = programs.folder / "ours"
    with half_copied(programs, peer) as (get, _):
        assert get.terminate() == 130

    assert held(ours) > 0
    assert not (ours / "org").exists()
    removed = programs.run("models", "rm", "org/name", "--yes", "--in", str(ours))
    assert removed.wait() == 0, removed.errors
    assert held(ours) == 0


def test_full_disk_is_the_reported_reason(programs: Programs, model: Path) -> None:
    _, peer = share(programs, model)
    ours = programs.folder / "ours"
    ours.mkdir()
    with small_disk(ours, BIG + (32 << 20)) as disk:
        get = [
            *(*disk.enter, sys.executable, "-m", "shoal", "models", "get", "org/name"),
            *("--token", TOKEN, "--to", str(ours)),
        ]
        with (
            gated_line(port_of(peer), PART) as line,
            disk.path("ballast").open("wb") as ballast,
        ):
            first = subprocess.Popen(
                [*get, "--from", f"127.0.0.1:{line.port}"], stderr=subprocess.PIPE
            )
            eventually(lambda: held(disk.path()) > PART // 2, "a part")
            with suppress(OSError):
                while True:
                    ballast.write(bytes(1 << 20))
                    ballast.flush()
            line.go_on.set()
            _, errors = first.communicate(timeout=PATIENCE)
        assert first.returncode == 1
        assert f"cannot write to {ours}: No space left on device".encode() in errors
        assert not disk.path("org").exists()

        # Before it begins: there is too little.
        done = subprocess.run(
            [*get, "--from", peer], capture_output=True, check=False, timeout=PATIENCE
        )
        assert done.returncode == 1
        assert b"bytes free, and the model has" in done.stderr

        disk.path("ballast").unlink()
        again = subprocess.run(
            [*get, "--from", peer], capture_output=True, check=False, timeout=PATIENCE
        )
        assert again.returncode == 0, again.stderr
        assert_same(model, disk.path("org/name"))


@dataclass
class SmallDisk:
    """A file system that only processes behind ``enter`` see, at a folder."""

    holder: "subprocess.Popen[bytes]"
    folder: Path

    @property
    def enter(self) -> list[str]:
        return ["nsenter", "-t", str(self.holder.pid), "-m"]

    def path(self, name: str = "") -> Path:
        """Return where this process sees a file of it."""
        inside = str(self.folder / name).lstrip("/")
        return Path(f"/proc/{self.holder.pid}/root", inside)


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[SmallDisk]:
    """Mount a disk of a few bytes; skip the test where that cannot be."""
    if sys.platform != "linux" or shutil.which("nsenter") is None:
        pytest.skip("needs to mount")
    mount = f'mount -t tmpfs -o size={size} none "$0" && echo ready && exec cat'
    with subprocess.Popen(
        ["unshare", "-m", "sh", "-c", mount, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        if not holder.stdout.readline():
            pytest.skip("needs to mount")
        yield SmallDisk(holder, folder)
        holder.stdin.close()
