"""Work that a stop cancels."""

import asyncio

import pytest

from shoal.worker.model_offers import until_stopped


async def wait_for_ever() -> int:
    await asyncio.Event().wait()
    return 1


async def test_result_is_returned_unless_the_worker_is_stopped() -> None:
    stop = asyncio.Event()

    assert await until_stopped(stop, asyncio.sleep(0, "done")) == "done"
    asyncio.get_running_loop().call_soon(stop.set)
    assert await until_stopped(stop, wait_for_ever()) is None


async def test_error_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("why")

    with pytest.raises(ValueError, match="why"):
        await until_stopped(asyncio.Event(), fail())


async def test_cancelled_caller_cancels_the_work() -> None:
    working = asyncio.create_task(wait_for_ever())

    async def work() -> int:
        return await working

    waiting = asyncio.create_task(until_stopped(asyncio.Event(), work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    assert working.cancelled()
