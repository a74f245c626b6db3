"""Workers that never finish, duplicate keys or crash, as real processes."""

import json
import signal
from typing import Any
from urllib.request import Request, urlopen

import pytest

from live.programs import (
    KEY,
    PATIENCE,
    PRICES,
    Pool,
    Program,
    Programs,
    eventually,
)
from live.signing_worker import key_of, public_hex
from shoal.pool.react import WORKERS_LOST_MAX

SILENT = ("--mood", "silent")
HONEST = ("--mood", "honest")
TEN_MEGABYTES = 10_000_000


@pytest.fixture
def pool(programs: Programs) -> Pool:
    return programs.serve(*PRICES, "--queue-wait", "2")


def ask(pool: Pool, path: str, body: object = None, **headers: str) -> Any:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    named |= {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body, ensure_ascii=False).encode()
    with urlopen(Request(pool.url + path, data, named), timeout=PATIENCE) as answer:
        return json.load(answer)


def commit(pool: Pool, text: str = "hello", **headers: str) -> str:
    payload = {"task_type": "echo", "input": text}
    body = {"job_type": "TASK", "user_id": "u1", "payload": payload}
    job_id: str = ask(pool, "/v1/jobs/commit/cheap", body, **headers)["job_id"]
    return job_id


def ended(pool: Pool, job_id: str) -> Any:
    job: Any = None

    def over() -> bool:
        nonlocal job
        job = ask(pool, f"/v1/jobs/{job_id}?wait=10")
        return job["completed_at"] is not None or job["status"] == "failed"

    eventually(over, f"job {job_id} has ended")
    return job


def joined(pool: Pool, seed: str, *flags: str) -> Program:
    worker = pool.signing(seed, *flags)
    worker.event("joined")
    return worker


def balances(pool: Pool) -> dict[str, int]:
    """Return what there is on each account on which there is something."""
    listed = ask(pool, "/admin/accounts")
    assert listed["total"] == 0
    return {each["name"]: each["balance"] for each in listed["data"]}


def test_older_of_two_with_one_key_is_replaced(pool: Pool) -> None:
    older = joined(pool, "twin", *HONEST)
    newer = joined(pool, "twin", *HONEST)

    assert "replaced by a newer connection" in older.event("left")["reason"]
    assert older.wait() == 1
    job_id = commit(pool)
    assert newer.event("given")["job"] == job_id
    assert ended(pool, job_id)["result"]["by"] == public_hex(key_of("twin"))
    assert len(pool.workers()) == 1


def test_job_of_a_replaced_worker_goes_to_the_newer(pool: Pool) -> None:
    older = joined(pool, "twin", *SILENT)
    job_id = commit(pool)
    older.event("given")

    joined(pool, "twin", *HONEST)

    job = ended(pool, job_id)
    assert (job["status"], job["attempts"]) == ("completed", 2)


def test_unanswered_job_expires_free_of_charge(pool: Pool) -> None:
    worker = joined(pool, "mute", *SILENT)
    job_id = commit(pool, X_Shoal_First_Output_Seconds="0.5")
    worker.event("given")

    job = ended(pool, job_id)

    assert job["status"] == "failed"
    assert "over the limit of 0.5 s" in job["detail"]
    assert balances(pool) == {}


def test_job_continues_after_its_silent_worker_dies(pool: Pool) -> None:
    mute = joined(pool, "mute", *SILENT)
    job_id = commit(pool)
    mute.event("given")
    joined(pool, "other", *HONEST)

    mute.kill()

    job = ended(pool, job_id)
    assert job["result"]["by"] == public_hex(key_of("other"))
    assert job["attempts"] == 2
    assert job["receipt"]["verified"]
    assert balances(pool)[f"worker:{public_hex(key_of('other'))}"] > 0


def test_silent_worker_loses_its_lease(programs: Programs) -> None:
    pool = programs.serve(*PRICES, "--dispatch-silence", "5")
    stopped = joined(pool, "stopped", *SILENT)
    job_id = commit(pool)
    stopped.event("given")
    joined(pool, "other", *HONEST)

    stopped.process.send_signal(signal.SIGSTOP)

    assert ended(pool, job_id)["result"]["by"] == public_hex(key_of("other"))
    stopped.process.send_signal(signal.SIGCONT)
    stopped.event("joined")  # and is as good as any again


def test_client_gets_an_error_without_another_worker(
    pool: Pool,
) -> None:
    mute = joined(pool, "mute", *SILENT)
    job_id = commit(pool)
    mute.event("given")

    mute.kill()

    job = ended(pool, job_id)
    assert job["result"] == {"error": "no_eligible_worker"}
    assert "no worker is connected" in job["detail"]
    assert balances(pool) == {}


def test_job_that_crashes_its_workers_is_abandoned(programs: Programs) -> None:
    # The job waits for the next one to start, however long that takes.
    pool = programs.serve(*PRICES, "--queue-wait", str(PATIENCE))
    job_id = commit(pool)
    for number in range(WORKERS_LOST_MAX):
        victim = pool.signing(f"victim{number}", *SILENT)
        assert victim.event("given")["job"] == job_id
        victim.kill()

    job = ended(pool, job_id)

    assert job["result"] == {"error": "worker_disconnected"}
    assert job["attempts"] == WORKERS_LOST_MAX
    assert balances(pool) == {}


def test_ten_megabyte_job_round_trips(pool: Pool) -> None:
    joined(pool, "strong", *HONEST)

    job = ended(pool, commit(pool, "é," * (TEN_MEGABYTES // 3)))

    assert job["result"]["size"] == TEN_MEGABYTES // 3 * 2
    assert job["receipt"]["verified"]
