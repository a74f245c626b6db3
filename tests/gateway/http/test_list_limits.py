"""The lists that one key may read."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from shoal.domain.errors import RateLimited
from shoal.gateway.http.quotas import LISTS_WAITING_MAX, ListLimits


async def read(limits: ListLimits, name: str, now: float = 0.0) -> None:
    async with limits.reading(name, now):
        pass


async def test_key_reads_one_list_at_a_time() -> None:
    limits = ListLimits()
    async with limits.reading("al", 0.0):
        waiting = asyncio.create_task(read(limits, "al"))
        await asyncio.sleep(0)
        assert not waiting.done()

        await read(limits, "bo")

    await waiting


async def test_more_waiting_requests_are_rejected() -> None:
    limits = ListLimits()
    async with AsyncExitStack() as undo:
        await undo.enter_async_context(limits.reading("al", 0.0))
        waiting = [
            asyncio.create_task(read(limits, "al")) for _ in range(LISTS_WAITING_MAX)
        ]
        await asyncio.sleep(0)

        with pytest.raises(RateLimited, match="9 lists at once") as caught:
            await read(limits, "al")

        assert caught.value.retry_after == 1
        waiting[0].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(read(limits, "al")))
        await asyncio.sleep(0)
        assert not waiting[-1].done()
    await asyncio.gather(*waiting[1:])


async def test_lists_of_a_minute_are_limited() -> None:
    limits = ListLimits(per_minute=60)
    for _ in range(60):
        await read(limits, "al")

    with pytest.raises(RateLimited, match=r"60 lists a minute.* 1 s") as caught:
        await read(limits, "al")

    assert caught.value.retry_after == 1
    await read(limits, "bo")
    await read(limits, "al", 1.0)


async def test_keys_that_read_nothing_are_forgotten() -> None:
    limits = ListLimits(per_minute=1)
    await read(limits, "al")
    async with limits.reading("bo", 0.0):
        limits.retain({"cy"})

        await read(limits, "al")
        with pytest.raises(RateLimited):
            await read(limits, "bo")
