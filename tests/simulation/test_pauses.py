"""Tests of paused processes: they stand still, and time goes on."""

import asyncio

from simulation import pauses
from simulation.pauses import Process


def test_a_paused_process_does_nothing_until_it_is_resumed() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        paused, other = Process(), Process()
        seen: list[tuple[str, float]] = []

        async def count(name: str) -> None:
            for _ in range(3):
                await asyncio.sleep(1.0)
                seen.append((name, loop.time()))

        tasks = [paused.start(count("paused")), other.start(count("other"))]
        await asyncio.sleep(1.5)
        paused.pause()
        await asyncio.sleep(8.5)
        assert [name for name, _ in seen].count("paused") == 1
        assert tasks[1].done()

        paused.resume()
        await asyncio.gather(*tasks)

        times = [round(at) for name, at in seen if name == "paused"]
        assert times == [1, 10, 11]

    pauses.run(scenario())


def test_a_timer_that_is_cancelled_before_the_process_goes_on_does_not_fire() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        process = Process()
        fired: list[str] = []
        process.pause()
        kept, cancelled = (
            process.context.run(loop.call_later, 1.0, fired.append, name)
            for name in ("kept", "cancelled")
        )
        await asyncio.sleep(2.0)
        assert fired == []

        cancelled.cancel()
        process.resume()
        await asyncio.sleep(0.0)

        assert fired == ["kept"]
        assert not kept.cancelled()

    pauses.run(scenario())
