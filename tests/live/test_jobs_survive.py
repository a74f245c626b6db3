"""What ``docs/promises.md`` says of jobs, payments and receipts, with real processes
killed.

One siege; ``pytest tests/live/test_jobs_survive.py --every`` has as many as make a
thousand kills.  The tests look at what it has left.
"""

import asyncio
import base64
import importlib.util
import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import Request, urlopen

import pytest

from live import checker, databases, laws
from live.clients import digest_of_result
from live.programs import KEY, PATIENCE, Programs
from live.siege import KILLS, Siege
from shoal.ledger import bundle, consistency
from shoal.store.packing import unpack

SIEGES = 17
VERIFIER = Path(__file__).parents[2] / "examples" / "verify_receipt.py"
SAMPLE = 100  # receipts that both verifiers are given


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "siege" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every")
        seeds = range(SIEGES if every else 1)
        metafunc.parametrize("siege", seeds, indirect=True, scope="module")


@pytest.fixture(scope="module")
def siege(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Siege]:
    """A running coordinator after the siege, without open jobs."""
    programs = Programs(tmp_path_factory.mktemp("siege"))
    siege = Siege(programs, Random(request.param))
    try:
        asyncio.run(siege.run())
        yield siege
    finally:
        programs.close()


@pytest.fixture(scope="module")
def database(siege: Siege) -> Iterator[sqlite3.Connection]:
    """A copy of the database, with what the clients were told attached."""
    file = databases.copied(siege.programs.data, siege.programs.folder / "end")
    with databases.opened(file) as database:
        checker.check_shown(database, siege.history)
        yield database


@pytest.fixture(scope="module")
def public_key(siege: Siege) -> bytes:
    return bytes.fromhex(ask(siege, "/v1/log")["public_key"])


def fetch(siege: Siege, path: str) -> bytes:
    headers = {"Authorization": f"Bearer {KEY}"}
    request = Request(siege.pool.url + path, headers=headers)
    with urlopen(request, timeout=PATIENCE) as answer:
        data: bytes = answer.read()
        return data


def ask(siege: Siege, path: str) -> Any:
    return json.loads(fetch(siege, path))


# What happened, so that the rest means something.


def test_siege_killed_and_completed_enough(
    siege: Siege, database: sqlite3.Connection
) -> None:
    figures = checker.figures(database)
    print(
        siege.killed,
        figures,
        f"requests={siege.history.broken}",
        f"commits={siege.commits}",
    )

    assert siege.killed.total() >= KILLS
    assert all(siege.killed.values())
    assert all(figures.values()), figures
    assert siege.history.broken  # requests that nobody answered, and were sent again
    assert siege.commits


def test_no_worker_crashed_by_itself(siege: Siege) -> None:
    logs = {file.name: file.read_text() for file in siege.programs.folder.glob("*.log")}

    assert not {name: log for name, log in logs.items() if "Traceback" in log}


# Promises R1 and R2: the history.


@pytest.mark.parametrize("law", laws.ENDS)
def test_each_accepted_job_ends_once(database: sqlite3.Connection, law: str) -> None:
    assert not checker.broken(database, {law: laws.LAWS[law]})


@pytest.mark.parametrize("law", laws.ONCE)
def test_each_key_is_answered_and_paid_for_once(
    database: sqlite3.Connection, law: str
) -> None:
    assert not checker.broken(database, {law: laws.LAWS[law]})


def test_results_are_stable(siege: Siege) -> None:
    read = siege.history.read
    for job_id in list(siege.history.done.values())[:SAMPLE]:
        said = fetch(siege, f"/v1/jobs/{job_id}")

        assert {digest_of_result(said)} == read[job_id]


def test_all_completed_jobs_are_listed(
    siege: Siege, database: sqlite3.Connection
) -> None:
    done = "SELECT id FROM jobs WHERE state = 'done' ORDER BY rowid DESC"
    listed: list[str] = []
    query = "limit=100&status=completed"
    while True:
        page = ask(siege, f"/v1/jobs?{query}")
        listed += [job["id"] for job in page["jobs"]]
        if page["next"] is None:
            break
        query = f"limit=100&status=completed&before={page['next']}"

    assert listed == [job_id for (job_id,) in database.execute(done)]


# Promise R7: the books.


@pytest.mark.parametrize("law", laws.BOOKS)
def test_the_books_balance(database: sqlite3.Connection, law: str) -> None:
    assert not checker.broken(database, {law: laws.LAWS[law]})


def test_killed_processes_left_consistent_state(siege: Siege) -> None:
    assert siege.found == []


def test_shown_accounts_match_the_stored_ones(
    siege: Siege, database: sqlite3.Connection
) -> None:
    something = "SELECT name, balance FROM accounts WHERE balance <> 0"
    stored = dict(database.execute(something))

    shown = ask(siege, "/admin/accounts")

    assert shown["total"] == 0
    assert {each["name"]: each["balance"] for each in shown["data"]} == stored


# Promise R8: receipts and their log.


@pytest.mark.parametrize("law", laws.RECEIPTS)
def test_each_completed_job_has_its_receipts(
    database: sqlite3.Connection, law: str
) -> None:
    assert not checker.broken(database, {law: laws.LAWS[law]})


def test_every_receipt_is_signed(
    database: sqlite3.Connection, public_key: bytes
) -> None:
    assert list(checker.unsigned(database, public_key)) == []


def test_last_checkpoint_covers_these_receipts(
    siege: Siege, database: sqlite3.Connection
) -> None:
    *_, root = ask(siege, "/v1/log")["checkpoint"].split("\n")[:3]

    assert base64.b64decode(root) == checker.root(database)


def test_receipts_verify_by_two_verifiers(siege: Siege, public_key: bytes) -> None:
    jobs = list(siege.history.done.values())
    for job_id in jobs[:: len(jobs) // SAMPLE + 1]:
        data = fetch(siege, f"/v1/receipts/{job_id}")

        assert all(check.ok for check in bundle.verify(data, public_key)), job_id
        assert list(verify_apart(data, public_key)), job_id


def test_receipts_verify_on_the_command_line(
    siege: Siege, public_key: bytes, tmp_path: Path
) -> None:
    file, key = tmp_path / "receipt.json", public_key.hex()
    job_id = next(iter(siege.history.done.values()))
    flags = ("--url", siege.pool.url, "--api-key", KEY)

    run("-m", "shoal", "receipts", "export", job_id, "-o", str(file), *flags)

    run("-m", "shoal", "receipts", "verify", str(file), "--key", key)
    run(str(VERIFIER), str(file), "--key", key)


def test_log_is_append_only_since_every_issued_checkpoint(
    siege: Siege, public_key: bytes
) -> None:
    assert siege.checkpoints
    for size, note in siege.checkpoints.items():
        data = fetch(siege, f"/v1/log/growth?since={size}")

        assert json.loads(data)["first"] == note
        assert all(check.ok for check in consistency.verify(data, public_key)), size
        assert list(verify_apart(data, public_key)), size


# The checker itself.

FORGERIES = {
    "a job is lost": "DELETE FROM jobs WHERE id IN (SELECT job FROM done)",
    "a job has not ended": "UPDATE jobs SET ended_at = NULL WHERE rowid = 1",
    "a job has two ends": """
        INSERT INTO facts (at, type, job_id, body)
        SELECT at, 'JobFailed', job, '{}' FROM stories
        WHERE type = 'JobCompleted' LIMIT 1""",
    "a job goes on after its end": """
        INSERT INTO facts (at, type, job_id, body)
        SELECT at, 'JobLeased', job, '{}' FROM stories
        WHERE type = 'JobCompleted' LIMIT 1""",
    "a key is done twice": """
        INSERT INTO jobs SELECT id || 'again', kind, model, owner, state, work, limits,
            lease, outcome, error, submitted_at, ended_at, priority, NULL, terms, user,
            function_call, value, packed_work, packed_outcome, packed_history
        FROM jobs WHERE state = 'done' LIMIT 1""",
    "another result was read": """
        UPDATE read SET digest = '' WHERE job IN (SELECT job FROM done)""",
    "a job is paid for twice": """
        INSERT INTO transfers (at, job_id, debit, credit, amount, why)
        SELECT at, job_id, debit, credit, amount, why FROM transfers
        WHERE why = 'paid' LIMIT 1""",
    "a job is not paid for": """
        DELETE FROM transfers WHERE number IN (
            SELECT number FROM transfers WHERE why = 'paid' LIMIT 1)""",
    "money comes from nowhere": "UPDATE accounts SET balance = balance + 1",
    "a receipt is gone": "DELETE FROM receipts WHERE leaf = 1",
    "the last receipt is gone": """
        DELETE FROM receipts WHERE leaf = (SELECT max(leaf) FROM receipts)""",
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_checker_detects(database: sqlite3.Connection, forgery: str) -> None:
    try:
        database.execute(FORGERIES[forgery])

        assert checker.broken(database)
    finally:
        database.rollback()


def test_checker_detects_a_changed_receipt(
    database: sqlite3.Connection, public_key: bytes
) -> None:
    before = checker.root(database)
    try:
        (body,) = database.execute(
            "SELECT body FROM receipts WHERE leaf = 7"
        ).fetchone()
        changed = unpack(body).replace(b'"fee":', b'"fee":1')
        database.execute("UPDATE receipts SET body = ? WHERE leaf = 7", (changed,))

        assert list(checker.unsigned(database, public_key)) == [7]
        assert checker.root(database) != before
    finally:
        database.rollback()


def verify_apart(data: bytes, key: bytes) -> Iterator[str]:
    """Verify with the second verifier, which shares no code with Shoal."""
    spec = importlib.util.spec_from_file_location("verify_receipt", VERIFIER)
    assert spec is not None
    assert spec.loader is not None
    verifier = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(verifier)
    yield from verifier.verify(data, key)


def run(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
