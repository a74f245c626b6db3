"""Chats of many megabytes, to a model that workers have, beside those of others.

What each transaction of the store writes is counted, because no other begins before it
ends.
"""

import asyncio
import io
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from attacks.siege import CHAT, ask, besieged, join
from gateway.serving import Pool, eventually
from store.metered import MeteredStore

MEBI = 1 << 20
LARGE, AT_ONCE = 4, 2  # chats, and how many at once
SIZE = 6 * MEBI  # bytes of each
OTHERS = 5
WRITTEN_MAX = MEBI  # bytes of a transaction
OVERHEAD = 1.5  # bytes written for each byte of a chat

pytestmark = pytest.mark.long


@pytest.fixture
async def metered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Pool, MeteredStore]]:
    stores: list[MeteredStore] = []

    def make(path: Path, *_: object) -> MeteredStore:
        stores.append(MeteredStore(path))
        return stores[-1]

    monkeypatch.setattr("shoal.app.database.SqliteStore", make)
    async with besieged(tmp_path, caplog) as pool:
        yield pool, stores[0]


async def flood(pool: Pool, turns: asyncio.Semaphore, number: int) -> int:
    """Send a large chat; return the status of the response."""
    text = random.Random(number).randbytes(SIZE // 2).hex()  # hard to compress
    body = {"model": "m1", "messages": [{"role": "user", "content": text}]}
    sent = io.BytesIO(json.dumps(body).encode())
    headers = pool.headers() | {"Content-Type": "application/json"}
    async with (
        turns,
        pool.session.post(pool.url + CHAT, data=sent, headers=headers) as response,
    ):
        await response.read()
        return response.status


async def test_large_chats_are_written_between_the_commits_of_others(
    metered: tuple[Pool, MeteredStore],
) -> None:
    pool, store = metered
    turns = asyncio.Semaphore(AT_ONCE)
    async with join(pool) as node:
        await eventually(lambda: "m1" in pool.hub.pool.roster.with_model)
        store.forget()
        control = asyncio.create_task(ask(pool))
        await node.answer("mine", number=0)
        assert "mine" in await control
        alone = sum(store.written)
        store.forget()

        chats = [flood(pool, turns, number) for number in range(LARGE)]
        floods = [asyncio.create_task(each) for each in chats]
        asking = [asyncio.create_task(ask(pool)) for _ in range(OTHERS)]
        for number in range(1, 1 + LARGE + OTHERS):
            await node.answer("mine", number=number)

        assert [await each for each in floods] == [200] * LARGE
        assert all("mine" in each for each in await asyncio.gather(*asking))
        written = store.written
    assert max(written) <= WRITTEN_MAX
    assert sum(written) <= OVERHEAD * LARGE * SIZE + 2 * OTHERS * alone
