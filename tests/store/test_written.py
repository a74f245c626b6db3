"""Databases written by earlier versions: one file for each version."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from shoal.domain.credentials import Key, KeyUsage, Scope, digest_of
from shoal.domain.ids import JobId
from shoal.domain.job import Webhook
from shoal.domain.outcome import Outcome, Usage
from shoal.domain.work import Call, Chat, Feature
from shoal.pool.lifecycle import JobState
from shoal.store.sqlite.schema import MIGRATIONS
from shoal.store.sqlite.store import SqliteStore
from shoal.store.webhooks import DeliveryState, WebhookDelivery

WRITTEN = sorted((Path(__file__).parent / "written").glob("version*.db"))
WRITTEN_5 = Path(__file__).parent / "written" / "version5.db"

STATES = {
    "done": JobState.DONE,
    "failed": JobState.FAILED,
    "cancelled": JobState.CANCELLED,
    "expired": JobState.EXPIRED,
    "running": JobState.LEASED,
    "waiting": JobState.QUEUED,
}


@pytest.mark.parametrize("written", WRITTEN, ids=lambda path: path.stem)
async def test_database_of_an_earlier_version_is_complete(
    written: Path, tmp_path: Path
) -> None:
    path = tmp_path / "shoal.db"
    shutil.copy(written, path)
    store = SqliteStore(path)

    await store.open()

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
    opened = [each.job.id for each in await store.open_jobs()]
    assert opened[:2] == ["running", "waiting"]
    assert await store.models_since(since=0.0) == {"m"}
    await store.close()


@pytest.mark.parametrize("written", WRITTEN, ids=lambda path: path.stem)
async def test_database_of_an_earlier_version_accepts_writes(
    written: Path, tmp_path: Path
) -> None:
    path = tmp_path / "shoal.db"
    shutil.copy(written, path)
    store = SqliteStore(path)
    await store.open()

    await store.keys.keys.add(Key("k", "a", digest_of("sk"), "", Scope.USE, 1.0))
    assert await store.keys.usage_of("nobody", 0) == KeyUsage()
    ended = 5 if written == WRITTEN_5 else 4
    assert await store.prune(1000.0) == ended
    await store.close()

    with closing(sqlite3.connect(path)) as database:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        assert version == len(MIGRATIONS)
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_migration_keeps_webhook_deliveries_and_function_calls(
    tmp_path: Path,
) -> None:
    path = tmp_path / "shoal.db"
    shutil.copy(WRITTEN_5, path)
    store = SqliteStore(path)

    await store.open()

    done, failed = JobId("done"), JobId("failed")
    webhook = Webhook("https://done.example/hook", "shh-shh-shh-shh")
    pending = DeliveryState(WebhookDelivery(done, webhook), due_at=20.0)
    assert await store.webhooks.due(20.0, 9) == [pending]
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
