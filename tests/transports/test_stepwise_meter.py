"""What a coroutine costs, step by step, by a clock that a test sets."""

import asyncio

import pytest

from shoal.transports.strangers import StepwiseMeter


class Work:
    """Work of two steps, and others' work between them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.charged = 0.0
        self.between = asyncio.Event()

    async def run(self) -> str:
        self.now += 1.0
        await self.between.wait()
        self.now += 2.0
        return "done"

    async def run_with_clean_up(self) -> str:
        try:
            return await self.run()
        finally:
            self.now += 4.0

    def charge(self, seconds: float) -> None:
        self.charged += seconds

    async def metered(self) -> str:
        return await StepwiseMeter(
            self.run_with_clean_up(), lambda: self.now, self.charge
        )


async def test_its_own_steps_are_charged_and_nothing_between() -> None:
    work = Work()
    running = asyncio.create_task(work.metered())
    await asyncio.sleep(0)

    work.now += 1000.0
    work.between.set()

    assert await running == "done"
    assert work.charged == 7.0


async def test_cancellation_reaches_the_work_and_is_charged() -> None:
    work = Work()
    running = asyncio.create_task(work.metered())
    await asyncio.sleep(0)

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert work.charged == 5.0


async def test_its_error_is_passed_on() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await StepwiseMeter(fail(), lambda: 0.0, lambda seconds: None)
