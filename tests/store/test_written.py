"""Databases of all versions since the first release: one file for each."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from shoal.domain.credentials import BrowserSession, Key, KeyUsage, Scope, digest_of
from shoal.domain.facts import (
    AliasSet,
    DeploymentSet,
    JobCancelled,
    JobCompleted,
    JobLeased,
    JobStarted,
    JobSubmitted,
    LateResult,
    PassedOver,
    WorkerApproved,
    WorkerJoined,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import JobTerms, Priority, TimeLimits, Webhook
from shoal.domain.outcome import Outcome, Usage
from shoal.domain.receipts import Verdict
from shoal.domain.work import Call, Chat, Feature
from shoal.domain.worker import Suspension
from shoal.pool.lifecycle import JobState
from shoal.store.ledger import MinuteUsage
from shoal.store.port import RecordedFact
from shoal.store.sql.schema import MIGRATIONS, VERSION, VERSION_OF_TABLES
from shoal.store.sqlite.database import SqliteStore
from shoal.store.webhooks import DeliveryState, WebhookDelivery

FOLDER = Path(__file__).parent / "written"
VERSIONS = range(VERSION_OF_TABLES, VERSION + 1)
WITH_OPEN_JOBS = 17  # versions from which on there are the open jobs of a minute
WITH_ALIASES = 19  # and an alias
WITH_SIGN_INS = 20  # and a browser that is signed in, and a code
WITH_DEPLOYMENTS = 21  # and a model that is to be loaded
WITH_HOSTED = 22  # and a key that may use hosted providers

W = WorkerId("w")
STATES = {
    "done": JobState.DONE,
    "failed": JobState.FAILED,
    "cancelled": JobState.CANCELLED,
    "expired": JobState.EXPIRED,
    "running": JobState.LEASED,
    "waiting": JobState.QUEUED,
}


_migrated: dict[int, bytes] = {}  # the content of each, once a test has opened it


async def opened(version: int, folder: Path) -> SqliteStore:
    """Return the database of a version, opened by the present one."""
    path = folder / "shoal.db"
    if version in _migrated:
        path.write_bytes(_migrated[version])
    else:
        script = (FOLDER / f"version{version}.sql").read_text("utf-8")
        with closing(sqlite3.connect(path)) as database:
            database.executescript(script)
        store = SqliteStore(path)
        await store.open()
        await store.close()
        _migrated[version] = path.read_bytes()
    store = SqliteStore(path)
    await store.open()
    return store


def loaded(version: int) -> sqlite3.Connection:
    """Make the database of a version, as it was written."""
    database = sqlite3.connect(":memory:", isolation_level=None)
    database.executescript((FOLDER / f"version{version}.sql").read_text("utf-8"))
    return database


def shape(database: sqlite3.Connection) -> dict[str, object]:
    """Return the columns of each table, and of each index."""
    query = "SELECT name, type FROM sqlite_master"
    return {
        name: database.execute(
            f"PRAGMA {'table_xinfo' if type_ == 'table' else 'index_xinfo'}({name})"
        ).fetchall()
        for name, type_ in database.execute(query).fetchall()
    }


def test_a_database_of_every_version_is_kept() -> None:
    kept = {path.name for path in FOLDER.iterdir()}

    assert kept == {f"version{version}.sql" for version in VERSIONS}, (
        "run scripts/write_database.py after adding a migration"
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_migrations_still_make_each_version(version: int) -> None:
    with closing(sqlite3.connect(":memory:")) as made, closing(loaded(version)) as kept:
        for step in MIGRATIONS[: version - VERSION_OF_TABLES + 1]:
            made.executescript(step)

        assert shape(made) == shape(kept)
        assert kept.execute("PRAGMA user_version").fetchone() == (version,)


@pytest.mark.parametrize("version", VERSIONS)
async def test_database_of_an_earlier_version_is_complete(
    version: int, tmp_path: Path
) -> None:
    store = await opened(version, tmp_path)

    for name, state in STATES.items():
        stored = await store.job(JobId(name))
        assert stored is not None
        assert stored.state is state
        assert isinstance(stored.job.work, Chat)
        content = stored.job.work.messages[1]["content"]
        assert content == f"question {name} é 🦦"
        assert stored.job.work.options == {"stop": ["\n"], "seed": 7}
        assert stored.job.owner == "default"
        assert len(await store.history(JobId(name))) > 0
    done = await store.job(JobId("done"))
    assert done is not None
    assert done.outcome == Outcome("the answer é", "length", Usage(12, 34))
    running = [each.job.id for each in await store.open_jobs()]
    assert running[:2] == ["running", "waiting"]
    assert await store.models_since(since=0.0) == {"m"}
    assert WorkerJoined in {type(each.fact) for each in await store.worker_facts(9)}
    await store.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_database_of_an_earlier_version_accepts_writes(
    version: int, tmp_path: Path
) -> None:
    store = await opened(version, tmp_path)

    await store.keys.keys.add(Key("k", "a", digest_of("new"), "", Scope.USE, 1.0))
    assert await store.keys.usage_of("nobody", 0) == KeyUsage()
    assert await store.prune(1000.0) == 7
    await store.close()

    with closing(sqlite3.connect(tmp_path / "shoal.db")) as database:
        (found,) = database.execute("PRAGMA user_version").fetchone()
        assert found == VERSION
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        for table in ("work_parts", "unclaimed_works"):
            count = f"SELECT count(*) FROM {table}"
            assert database.execute(count).fetchone() == (0,)


@pytest.mark.parametrize("version", VERSIONS)
async def test_migration_keeps_webhook_deliveries_and_function_calls(
    version: int, tmp_path: Path
) -> None:
    store = await opened(version, tmp_path)

    done, failed = JobId("done"), JobId("failed")
    webhook = Webhook("https://done.example/hook", "shh-shh-shh-shh")
    pending = DeliveryState(
        WebhookDelivery(done, webhook), "default", "default done.example", due_at=20.0
    )
    assert await store.webhooks.first_of_lanes() == [pending]
    delivered = await store.webhooks.state_of(failed)
    assert delivered is not None
    assert (delivered.attempts, delivered.due_at) == (1, None)
    call = Call(
        *("f", b"\x91\xc4\x01\xff", b"\x80", 2.5),
        frozenset({Feature.VALUES}),
        (bytes(32),),
    )
    assert [each.job.work for each in await store.open_jobs()][2:] == [call]
    called = await store.job(JobId("called"))
    assert called is not None
    assert called.job.work == call
    assert called.outcome == Outcome("", value=b"\xc4\x01\xff", blobs=(bytes(32),))
    await store.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_migration_keeps_credentials(version: int, tmp_path: Path) -> None:
    store = await opened(version, tmp_path)

    key, *later = await store.keys.keys.all()
    assert (key.name, key.priority_max) == ("al", Priority.HIGH)
    assert key.hosted_after is None
    hosted = [("bo", 20.0)] if version >= WITH_HOSTED else []
    assert [(each.name, each.hosted_after) for each in later] == hosted
    (token,) = await store.keys.tokens.all()
    assert (token.uses_max, token.workers) == (3, frozenset({"wire:w"}))
    assert (await store.keys.usage_of("default", 0)).prompt_tokens == 12
    await store.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_migration_keeps_the_ledger(version: int, tmp_path: Path) -> None:
    store = await opened(version, tmp_path)

    done = JobId("done")
    opening = await store.ledger.load()
    assert opening.accounts["user:default"].balance == 7_000
    assert opening.head is not None
    assert opening.head.size == 1
    (receipt,) = await store.ledger.receipts_of(done)
    assert await store.ledger.recent_receipts("default", 9) == [receipt]
    (moved,) = await store.ledger.transfers("user:default", 9)
    assert moved.transfer.amount == 7_000
    assert not await store.ledger.claim_payment(["tx1"], JobId("failed"), 1.0)
    (trusted,) = await store.trusted_workers()
    assert (trusted.owner, trusted.user) == ("default", "ada")
    (code,) = await store.pairing.find("code")
    assert code.expires_at == 2000.0
    await store.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_facts_follow_those_of_an_earlier_version(
    version: int, tmp_path: Path
) -> None:
    store = await opened(version, tmp_path)
    job_id = JobId("running")
    before = await store.history(job_id)
    late = LateResult(job_id, LeaseNumber(1), WorkerId("x"), "completed")

    await store.append([late, JobCancelled(job_id, "enough")], 50.0)

    history = await store.history(job_id)
    assert history[: len(before)] == before
    assert [each.fact for each in history[len(before) :]] == [
        late,
        JobCancelled(job_id, "enough"),
    ]
    assert await store.history_since(job_id, len(before)) == history[len(before) :]
    await store.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_compressed_texts_are_read(version: int, tmp_path: Path) -> None:
    store = await opened(version, tmp_path)

    stored = await store.job(JobId("packed"))

    assert stored is not None
    assert isinstance(stored.job.work, Chat)
    assert stored.job.work.messages == (
        {"role": "system", "content": "é " * 200},
        {"role": "user", "content": "question packed é 🦦"},
    )
    assert stored.job.limits == TimeLimits(queue=5.0)
    assert stored.job.terms == JobTerms(price=7, form='{"key": "packed"}')
    assert stored.outcome == Outcome("the answer é " * 40, "length", Usage(12, 34))
    one = LeaseNumber(1)
    busy = PassedOver("all slots busy", 2, (WorkerId("x"),))
    assert await store.history(JobId("packed")) == [
        RecordedFact(30.0, JobSubmitted(stored.job)),
        RecordedFact(30.0, JobLeased(JobId("packed"), W, one, "best", (busy,))),
        RecordedFact(30.0, JobStarted(JobId("packed"), one)),
        RecordedFact(
            40.0, JobCompleted(JobId("packed"), one, stored.outcome, Verdict.VALID)
        ),
        RecordedFact(
            41.0, LateResult(JobId("packed"), one, WorkerId("x"), "completed")
        ),
    ]
    await store.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_work_in_parts_is_read(version: int, tmp_path: Path) -> None:
    store = await opened(version, tmp_path)

    stored = await store.job(JobId("large"))

    assert stored is not None
    assert isinstance(stored.job.work, Chat)
    assert stored.job.work.messages == (
        {"role": "system", "content": "é " * 200},
        {"role": "user", "content": "question large é 🦦"},
    )
    assert stored.job.terms.form == '{"key": "large"}'
    await store.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_migration_keeps_suspensions(version: int, tmp_path: Path) -> None:
    store = await opened(version, tmp_path)

    ((suspended, at),) = await store.suspensions()
    assert (suspended.name, suspended.how) == ("w", Suspension.PAUSED)
    assert at == 12.0
    await store.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_migration_keeps_approvals(version: int, tmp_path: Path) -> None:
    store = await opened(version, tmp_path)

    kept = [WorkerApproved("w", "admin", "8a"), WorkerApproved("x", "admin")]
    assert await store.approvals() == kept
    await store.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_migration_keeps_aliases(version: int, tmp_path: Path) -> None:
    store = await opened(version, tmp_path)

    kept = [AliasSet("gpt-*", ("m", "n"), "admin")]
    assert await store.aliases() == (kept if version >= WITH_ALIASES else [])
    await store.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_migration_keeps_deployments(version: int, tmp_path: Path) -> None:
    store = await opened(version, tmp_path)

    kept = [DeploymentSet("qwen3", 2, "admin", 0, ("anna",), True, 60.0)]
    assert await store.deployments() == (kept if version >= WITH_DEPLOYMENTS else [])
    await store.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_migration_keeps_sign_ins(version: int, tmp_path: Path) -> None:
    store = await opened(version, tmp_path)
    key = b"\xaa" * 32

    kept = [BrowserSession(b"\x01" * 32, key, 1e9)]
    assert await store.sign_ins.sessions() == (kept if version >= WITH_SIGN_INS else [])
    code = await store.sign_ins.redeem(b"\x02" * 32)
    assert (code is not None) == (version >= WITH_SIGN_INS)
    await store.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_minutes_are_kept(version: int, tmp_path: Path) -> None:
    store = await opened(version, tmp_path)

    kept = [MinuteUsage(29_000_000, 1, 34, running=2, queued=5)]
    assert await store.usage.minutes(0) == (kept if version >= WITH_OPEN_JOBS else [])
    await store.close()
