"""One key signs one history, whatever becomes of the database beside it."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from live.programs import KEY, PATIENCE, Pool, Programs, eventually
from shoal.ledger import bundle, checkpoint, consistency

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="files in use stay on Windows"
)

SEED = "7" * 64


def fetch(pool: Pool, path: str) -> bytes:
    headers = {"Authorization": f"Bearer {KEY}"}
    with urlopen(Request(pool.url + path, headers=headers), timeout=PATIENCE) as answer:
        data: bytes = answer.read()
        return data


def log_of(pool: Pool) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(fetch(pool, "/v1/log"))
    return found


def done(pool: Pool, number: int) -> list[str]:
    """Have so many jobs done, one after the other; return their ids."""
    worker = pool.joined("one")
    jobs = []
    for _ in range(number):
        with pool.client() as client:
            answer = client.chat.completions.with_raw_response.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=1
            )
        jobs.append(answer.headers["x-shoal-job"])
    worker.terminate()
    return jobs


def run(programs: Programs, *arguments: str) -> str:
    """Run a command for the data folder; return what it prints."""
    command = programs.run(*arguments, "--data-dir", str(programs.data))
    lines = []
    while (line := command.line()) is not None:
        lines.append(line)
    assert command.wait() == 0, command.errors
    return "".join(lines)


def refusal(programs: Programs) -> str:
    """Start a coordinator that does not start; return what it says."""
    refused = programs.start()
    assert refused.wait() == 74
    return refused.errors


def delete_database(data: Path) -> None:
    for file in data.glob("shoal.db*"):
        file.unlink()


def test_a_missing_database_is_not_begun_anew_under_its_key(programs: Programs) -> None:
    pool = programs.serve()
    first = log_of(pool)["public_key"]
    pool.program.kill()
    delete_database(programs.data)

    said = refusal(programs)

    assert f"{programs.data / 'shoal.db'}: is missing" in said
    assert "shoal db check" in said
    assert "--new-log" in said
    assert not (programs.data / "shoal.db").exists()
    pool = programs.serve("--new-log")
    log = log_of(pool)
    assert (log["size"], log["earlier"]) == (0, [])
    assert log["public_key"] != first


def test_a_database_behind_its_key_is_refused(programs: Programs) -> None:
    pool = programs.serve()
    done(pool, 2)
    backup = programs.folder / "backup.db"
    run(programs, "db", "backup", str(backup))
    done(pool, 2)
    assert log_of(pool)["size"] == 4
    pool.program.kill()  # at once: what was shown is on the disk before
    delete_database(programs.data)
    shutil.copy(backup, programs.data / "shoal.db")

    said = refusal(programs)

    behind = "has 2 receipts, and its signing key has shown a log of 4"
    assert behind in said
    checked = programs.run("db", "check", "--data-dir", str(programs.data))
    assert checked.wait() == 1
    assert behind in checked.errors
    assert f"shoal db restore {backup}" in said


def test_a_restored_backup_goes_on_with_a_new_key(programs: Programs) -> None:
    pool = programs.serve()
    first, second = done(pool, 2)
    backup = programs.folder / "backup.db"
    run(programs, "db", "backup", str(backup))
    done(pool, 1)
    before = log_of(pool)
    assert pool.program.terminate() == 0

    said = run(programs, "db", "restore", str(backup))

    pool = programs.serve()
    log = log_of(pool)
    new, old = bytes.fromhex(log["public_key"]), bytes.fromhex(before["public_key"])
    assert new != old
    assert new.hex() in said
    # It begins with the first two receipts, as both keys say.
    (link,) = log["earlier"]
    assert link["public_key"] == old.hex()
    assert link["successor"] == log["checkpoint"]
    begun = checkpoint.verify(link["checkpoint"], old)
    assert begun.size == 2
    assert checkpoint.verify(log["checkpoint"], new).root == begun.root

    (third,) = done(pool, 1)

    later = log_of(pool)
    assert later["size"] == 3
    assert checkpoint.verify(later["checkpoint"], new).size == 3
    for job, key in ((first, old), (second, old), (third, new)):
        exported = fetch(pool, f"/v1/receipts/{job}?request=true")
        assert all(each.ok for each in bundle.verify(exported, key)), job
    growth = fetch(pool, "/v1/log/growth?since=2")
    assert all(each.ok for each in consistency.verify(growth, new))
    # The next start finds all that was shown.
    pool.program.kill()
    assert log_of(programs.serve())["checkpoint"] == later["checkpoint"]


def test_what_was_shown_is_continued_after_each_kill(programs: Programs) -> None:
    pool = programs.serve()
    worker = pool.joined("one")
    seen = checkpoint.Checkpoint(0, b"", 0.0)
    for kills in range(5):
        with pool.client() as client:
            for _ in range(kills + 1):
                client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "hi"}]
                )
        log = log_of(pool)
        pool.program.kill()  # while nothing else but the answer has left it

        key = bytes.fromhex(log["public_key"])
        shown = checkpoint.verify(log["checkpoint"], key)
        assert shown.size > seen.size
        seen = shown
        pool = programs.serve(port=pool.port)
        growth = consistency.read(fetch(pool, f"/v1/log/growth?since={seen.size}"))
        assert checkpoint.verify(growth.first, key).root == seen.root
        eventually(pool.workers, "the worker is back")
    assert worker.process.poll() is None
