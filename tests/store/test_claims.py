"""What every store keeps of payments."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shoal.domain.ids import JobId
from shoal.store.sqlite import SqliteStore


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "shoal.db")
    await store.open()
    yield store
    await store.close()


async def test_payment_is_for_one_job(store: SqliteStore) -> None:
    assert await store.ledger.claim_payment("TX", JobId("a"), 1.0)
    assert not await store.ledger.claim_payment("TX", JobId("b"), 2.0)
    assert not await store.ledger.claim_payment("TX", JobId("a"), 3.0)
    assert await store.ledger.claim_payment("TX2", JobId("b"), 4.0)


async def test_payment_stays_used_when_its_job_is_forgotten(store: SqliteStore) -> None:
    await store.ledger.claim_payment("TX", JobId("a"), 1.0)

    await store.prune(1e12)

    assert not await store.ledger.claim_payment("TX", JobId("b"), 2.0)
