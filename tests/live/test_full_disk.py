"""A coordinator on a disk of its own, which is filled and emptied again.

And a backup on a disk that is full.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from gateway.batches.uploads import CHAT_PATH, chat_line, jsonl
from harness.slow_imports import openai
from live.programs import (
    KEY,
    TINY,
    GatedModel,
    Pool,
    Program,
    Programs,
    answer_to,
    eventually,
    text_in,
)
from models.tiny_answers import ANSWERS

STORY = "Tell me a story."
# More than fits into free pages of the database, however it is compressed.
LARGE = Random(1).randbytes(500_000).hex()
LONG = LARGE[:60_000]  # is written with its job
SIZE = 32 << 20  # bytes of the disk
BLOCK = b"x" * 65536

# As root on Linux: a file system that only the coordinator sees.
MOUNT = f'mount -t tmpfs -o size={SIZE},mode=700 none "$0"'
FILL = 'cat /dev/zero > "$0/ballast" 2> /dev/null'


def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    mounting = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0"', "/mnt"]
    return subprocess.run(mounting, capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(
    not (sys.platform == "linux" and _can_mount()), reason="needs to mount"
)


class Disk:
    """The coordinator's disk, by way of its process."""

    def __init__(self, folder: Path, program: Program) -> None:
        self.folder = Path(f"/proc/{program.process.pid}/root{folder}")
        self._ballast = self.folder / "ballast"

    def fill(self) -> None:
        """Leave no space at all."""
        with self._ballast.open("wb", buffering=0) as ballast:
            for block in (BLOCK, b"x"):
                try:
                    while True:
                        ballast.write(block)
                except OSError:
                    continue

    def free(self) -> None:
        self._ballast.unlink()


@pytest.fixture
def pool(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> Pool:
    program = start(programs, monkeypatch, f'{MOUNT} && exec "$@"')
    return Pool(programs, program, program.event("ready"))


def start(programs: Programs, monkeypatch: pytest.MonkeyPatch, script: str) -> Program:
    """Start a coordinator by a script in a mount namespace of its own."""
    programs.data.mkdir()
    python = programs.folder / "python"
    command = f'exec unshare -m sh -c \'{script}\' "{programs.data}" "{sys.executable}"'
    python.write_text(f'#!/bin/sh\n{command} "$@"\n')
    python.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        return programs.start("--log-level", "info", "--api-key", KEY)


def health(pool: Pool, path: str) -> tuple[int, str]:
    try:
        with urlopen(pool.url + path) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def refusal(pool: Pool, question: str) -> "openai.InternalServerError":
    """Ask a question, and return the error."""
    with pool.client() as client, pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": question}]
        )
    return caught.value


def test_a_full_disk_heals_without_a_restart(
    programs: Programs, pool: Pool, slow_model: GatedModel
) -> None:
    pool.joined("one", *slow_model.flags)
    disk = Disk(programs.data, pool.program)
    with pool.client() as client, answer_to(client, STORY) as stream:
        pieces = text_in(stream)
        text = next(pieces)
        disk.fill()

        error = refusal(pool, LONG)
        body: Any = error.body
        assert (error.status_code, body["code"]) == (503, "store_failed")
        assert int(error.response.headers["Retry-After"]) <= 31
        status, said = health(pool, "/readyz")
        assert status == 503
        for shown in (str(error), said):
            assert str(programs.data) not in shown
        assert health(pool, "/healthz")[0] == 200
        assert str(programs.data) in pool.admin("status")["why_not"]
        slow_model.go_on.set()
        while len(text) < len(ANSWERS[STORY]):
            text += next(pieces)

        disk.free()
        eventually(lambda: health(pool, "/readyz")[0] == 200, "it has healed")

        assert text + "".join(pieces) == ANSWERS[STORY]
    with pool.client() as client, answer_to(client, STORY) as stream:
        assert "".join(text_in(stream)) == ANSWERS[STORY]
    log = pool.program.errors
    assert log.count("store failing") == log.count("store healed") == 1
    assert pool.program.terminate() == 0


@pytest.mark.long
def test_a_batch_waits_for_a_full_disk(
    programs: Programs, pool: Pool, slow_model: GatedModel
) -> None:
    pool.joined("one", *slow_model.flags)
    disk = Disk(programs.data, pool.program)
    lines = jsonl([chat_line(number, "tiny", STORY) for number in range(3)])
    with pool.client() as client:
        file = client.files.create(file=("in.jsonl", lines), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint=CHAT_PATH, completion_window="24h"
        )
        eventually(lambda: slow_model.requests, "a line runs")
        disk.fill()

        with pytest.raises(openai.InternalServerError) as caught:
            client.files.create(file=("more", LARGE.encode()), purpose="batch")
        assert caught.value.status_code == 503
        assert names(disk.folder / "files") == {file.id}
        slow_model.go_on.set()
        eventually(lambda: health(pool, "/readyz")[0] == 503, "a result is not stored")
        disk.free()

        eventually(
            lambda: client.batches.retrieve(batch.id).status == "completed", "its end"
        )
        output = client.batches.retrieve(batch.id).output_file_id
        assert output is not None
        answers = [
            json.loads(line)["response"]["body"]["choices"][0]["message"]["content"]
            for line in client.files.content(output).text.splitlines()
        ]
        assert answers == [ANSWERS[STORY]] * 3
        assert names(disk.folder / "files") == {file.id, output}


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


def test_a_deleted_database_ends_the_process(programs: Programs, pool: Pool) -> None:
    pool.joined("one", "--model", f"tiny={TINY}")
    (Disk(programs.data, pool.program).folder / "shoal.db").unlink()

    assert refusal(pool, STORY).status_code == 503
    status, said = health(pool, "/healthz")

    assert status == 503
    assert "deleted or replaced" in said
    assert pool.program.wait() == 74
    assert f"{programs.data / 'shoal.db'}: was deleted" in pool.program.errors


@pytest.mark.long
def test_a_start_on_a_full_disk_waits_for_space(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f'{MOUNT} && ({FILL}; true) && exec "$@"'
    program = start(programs, monkeypatch, script)
    eventually(lambda: "waiting to start" in program.errors, "it waits")
    disk = Disk(programs.data, program)
    assert [each.name for each in disk.folder.iterdir()] == ["ballast"]

    disk.free()
    pool = Pool(programs, program, program.event("ready"))

    assert f"--data-dir {programs.data} has 0.0 MB free" in program.errors
    assert health(pool, "/readyz")[0] == 200
    assert program.terminate() == 0


@pytest.mark.long
def test_a_start_that_waits_for_space_can_be_stopped(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f'{MOUNT} && ({FILL}; true) && exec "$@"'
    program = start(programs, monkeypatch, script)
    eventually(lambda: "waiting to start" in program.errors, "it waits")

    assert program.terminate() == 0


def test_a_file_system_that_is_read_only_is_named(tmp_path: Path) -> None:
    script = f'{MOUNT} && mount -o remount,ro "$0" && exec "$@"'
    program = """
import sqlite3, sys
from pathlib import Path
from shoal.store.sqlite.database import reason_of
file = Path(sys.argv[1]) / "shoal.db"
try:
    sqlite3.connect(file).execute("CREATE TABLE t (a)")
except sqlite3.Error as error:
    print(reason_of(error, file))
"""

    done = subprocess.run(
        [
            *("unshare", "-m", "sh", "-c", script, str(tmp_path)),
            *(sys.executable, "-c", program, str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )

    assert "its file system is read-only (EROFS)" in done.stdout, done.stderr


def test_a_backup_on_a_full_disk_leaves_nothing(programs: Programs) -> None:
    pool = programs.serve()
    disk = programs.folder / "backups"
    disk.mkdir()
    script = f'{MOUNT} && ({FILL}; true) && "$@"; code=$?; ls -A "$0"; exit $code'
    backup = ("-m", "shoal", "db", "backup", "--data-dir", str(programs.data))

    done = subprocess.run(
        [
            *("unshare", "-m", "sh", "-c", script, str(disk)),
            *(sys.executable, *backup, str(disk / "copy.db")),
        ],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert f"shoal db: {disk / 'copy.db'}: a backup needs " in done.stderr
    assert f"{disk} has 0 free: free some space first" in done.stderr
    assert done.stdout.split() == ["ballast"]
    assert pool.program.terminate() == 0
