"""The lists that one key may read, and all keys together."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from shoal.domain.errors import RateLimited
from shoal.gateway.http.list_limits import (
    LISTS_BURST,
    LISTS_SHARE,
    LISTS_WAITING_MAX,
    REQUEST_COST,
    ListLimits,
)
from shoal.transports.clock import LoopClock
from simulation import virtual

KEYS = [f"key{number}" for number in range(10)]
PAGE = 0.01  # seconds
UNLIMITED = 1_000_000  # lists a minute


def make_limits(per_minute: int = 600) -> ListLimits:
    return ListLimits(LoopClock(), per_minute)


async def read(limits: ListLimits, name: str) -> None:
    async with limits.reading(name):
        pass


async def test_key_reads_one_list_at_a_time() -> None:
    limits = make_limits()
    async with limits.reading("al"):
        waiting = asyncio.create_task(read(limits, "al"))
        await asyncio.sleep(0)
        assert not waiting.done()

        await read(limits, "bo")

    await waiting


async def test_more_waiting_requests_are_rejected() -> None:
    limits = make_limits()
    async with AsyncExitStack() as undo:
        await undo.enter_async_context(limits.reading("al"))
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


@virtual.in_virtual_time
async def test_lists_of_a_minute_are_limited() -> None:
    limits = make_limits(per_minute=60)
    for _ in range(60):
        await read(limits, "al")

    with pytest.raises(RateLimited, match=r"60 lists a minute.* 1 s") as caught:
        await read(limits, "al")

    assert caught.value.retry_after == 1
    await read(limits, "bo")
    await asyncio.sleep(1.0)
    await read(limits, "al")


async def test_keys_that_read_nothing_are_forgotten() -> None:
    limits = make_limits(per_minute=1)
    await read(limits, "al")
    async with limits.reading("bo"):
        limits.retain({"cy"})

        await read(limits, "al")
        with pytest.raises(RateLimited):
            await read(limits, "bo")


async def pages_read(limits: ListLimits, name: str, seconds: float) -> int:
    """Read a list after the other; return their number."""
    pages, until = 0, asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < until:
        async with limits.reading(name):
            await asyncio.sleep(PAGE)
        pages += 1
    return pages


@virtual.in_virtual_time
async def test_keys_at_full_speed_have_one_share_of_a_core_together() -> None:
    limits, seconds = make_limits(UNLIMITED), 60.0

    pages = await asyncio.gather(*(pages_read(limits, name, seconds) for name in KEYS))

    used = sum(pages) * (PAGE + REQUEST_COST)
    allowed = LISTS_SHARE * seconds + LISTS_BURST
    assert 0.9 * allowed < used < allowed + len(KEYS) * (PAGE + REQUEST_COST)
    assert max(pages) - min(pages) <= 1


@virtual.in_virtual_time
async def test_key_that_reads_a_list_now_and_then_waits_for_a_turn_only() -> None:
    limits = make_limits(UNLIMITED)
    others = [asyncio.create_task(pages_read(limits, name, 30.0)) for name in KEYS]
    loop = asyncio.get_running_loop()
    waits = []
    for _ in range(10):
        await asyncio.sleep(1.0)
        began = loop.time()
        await read(limits, "al")
        waits.append(loop.time() - began)
    await asyncio.gather(*others)

    # It has cost least, so that the turn after the lists under way is its own.
    assert max(waits) < len(KEYS) * (PAGE + REQUEST_COST) / LISTS_SHARE


@virtual.in_virtual_time
async def test_slow_list_delays_no_other_key() -> None:
    limits = make_limits()
    async with limits.reading("al"):
        await asyncio.sleep(100.0)
        began = asyncio.get_running_loop().time()
        await read(limits, "bo")
        assert asyncio.get_running_loop().time() == began
