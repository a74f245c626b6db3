"""Files of the database that are deleted or damaged while real processes use them."""

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from live.programs import Pool, Programs, eventually

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="files in use stay on Windows"
)

JOBS = 20


def waiting_jobs(pool: Pool) -> list[str]:
    """Submit jobs for which there is no worker."""
    jobs = []
    for number in range(JOBS):
        job = {
            "job_type": "LLM_INFER",
            "user_id": "u",
            "payload": {"prompt": f"{number}"},
        }
        with pool.posting("/v1/jobs/commit/cheap", job) as lines:
            jobs.append(json.loads("".join(lines))["job_id"])
    return jobs


def stored_jobs(data: Path) -> set[str]:
    with closing(sqlite3.connect(data / "shoal.db")) as sql:
        return {row[0] for row in sql.execute("SELECT id FROM jobs")}


def test_jobs_survive_a_kill_after_the_log_was_deleted(programs: Programs) -> None:
    pool = programs.serve()
    jobs = waiting_jobs(pool)
    for suffix in ("-wal", "-shm"):
        (programs.data / f"shoal.db{suffix}").unlink()

    eventually(lambda: "deleted or replaced" in pool.program.errors, "it is noticed")
    pool.program.kill()

    assert stored_jobs(programs.data) >= set(jobs)


@pytest.mark.short
def test_a_stop_after_the_log_was_deleted_says_so(programs: Programs) -> None:
    pool = programs.serve("--drain", "0")
    jobs = waiting_jobs(pool)
    (programs.data / "shoal.db-wal").unlink()

    assert pool.program.terminate() == 74

    assert "shoal.db-wal: was deleted or replaced while in use" in pool.program.errors
    assert stored_jobs(programs.data) >= set(jobs)


@pytest.mark.short
def test_a_damaged_database_is_named_at_the_start(programs: Programs) -> None:
    assert programs.serve().program.terminate() == 0
    backup = programs.folder / "back up.db"
    backed_up = programs.run(
        *("db", "backup", str(backup), "--data-dir", str(programs.data))
    )
    assert backed_up.wait() == 0
    with (programs.data / "shoal.db").open("r+b") as file:
        file.write(b"nothing of SQLite's")

    refused = programs.start()

    assert refused.wait() == 74
    assert "shoal.db: file is not a database" in refused.errors
    assert f"shoal db check --data-dir {programs.data}" in refused.errors
    assert f"shoal db restore '{backup}' --data-dir {programs.data}" in refused.errors


def test_a_truncated_database_ends_a_coordinator_that_nobody_uses(
    programs: Programs,
) -> None:
    assert programs.serve().program.terminate() == 0  # with all in one file
    pool = programs.serve()
    with (programs.data / "shoal.db").open("r+b") as file:
        file.truncate(8192)

    assert pool.program.wait() == 74
