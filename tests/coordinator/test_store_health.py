"""When writes that failed are repeated, and who learns of it."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine

import pytest

from shoal.coordinator.store_health import RETRY_MAX, RETRY_MIN, StoreHealth
from shoal.domain.errors import StoreBroken, StoreError
from shoal.transports.clock import LoopClock
from simulation import virtual
from simulation.virtual import STEP, scripted

FULL = StoreError("database or disk is full", "/data/shoal.db", temporary=True)
DAMAGED = StoreError("database disk image is malformed", "/data/shoal.db")


class Disk:
    """A disk that is full until a time, with the times of all attempts to write."""

    def __init__(self, health: StoreHealth, full_until: float = 0.0) -> None:
        self.health = health
        self.full_until = full_until
        self.error = FULL
        self.attempts: list[float] = []
        self.changes: list[str] = []
        health.subscribe(self)

    async def write(self) -> float:
        now = asyncio.get_running_loop().time()
        self.attempts.append(now)
        if now < self.full_until:
            raise self.error
        return now

    def on_store_failing(self, error: StoreError) -> None:
        self.changes.append("failing")

    def on_store_retried(self, error: StoreError) -> None:
        self.changes.append("retried")

    def on_store_healed(self) -> None:
        self.changes.append("healed")

    def on_store_broken(self, error: StoreError) -> None:
        self.changes.append("broken")


def play(script: Callable[[Disk], Coroutine[None, None, None]]) -> None:
    async def scenario() -> None:
        await script(Disk(StoreHealth(LoopClock())))

    virtual.run(scenario())


def test_slow_writes_are_shown_while_they_last_and_a_minute_longer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def script(disk: Disk) -> None:
        health = disk.health

        async def write(seconds: float) -> None:
            await health.write(lambda: asyncio.sleep(seconds))

        await write(0.9)
        assert health.slow_for == 0.0
        writing = asyncio.create_task(write(5.0))
        await asyncio.sleep(3.0)
        assert health.slow_for == pytest.approx(3.0, abs=5 * STEP)
        await writing
        await write(2.0)
        await asyncio.sleep(59.0)
        assert health.slow_for == pytest.approx(5.0, abs=5 * STEP)
        await asyncio.sleep(2.0)
        assert health.slow_for == 0.0
        await write(2.0)
        assert health.slow_for == pytest.approx(2.0, abs=5 * STEP)

    with caplog.at_level(logging.WARNING):
        play(script)
    assert caplog.text.count("slow store") == 2


@scripted(play)
async def test_clients_are_told_when_the_next_attempt_is_made(disk: Disk) -> None:
    disk.full_until = 30.0
    writing = asyncio.create_task(disk.health.write(disk.write))
    told = []
    for _ in range(3):
        await asyncio.sleep(1.3)  # at 1.3, 2.6 and 3.9 s
        assert disk.health.failure is not None
        told.append(disk.health.failure.retry_after)
    await writing

    # The attempts were made at 0, 1, 3 and 5 s.
    assert told == [3, 2, 3]


@scripted(play)
async def test_a_store_that_was_away_for_long_is_found_soon(disk: Disk) -> None:
    disk.full_until = 12.0

    await disk.health.write(disk.write)

    times = [0.0, *disk.attempts]
    pauses = [after - before for before, after in itertools.pairwise(times)]
    expected = [0.0, RETRY_MIN, *[RETRY_MAX] * 6]
    assert pauses == pytest.approx(expected, abs=2 * STEP)
    assert RETRY_MAX <= 2.0
    assert disk.health.failure is None
    assert disk.changes == ["failing", *["retried"] * 6, "healed"]


@scripted(play)
async def test_the_second_failure_begins_with_the_shortest_pause(disk: Disk) -> None:
    disk.full_until = 20.0
    await disk.health.write(disk.write)
    disk.attempts.clear()
    disk.full_until = asyncio.get_running_loop().time() + 0.5

    await disk.health.write(disk.write)

    first, second = disk.attempts
    assert second - first == pytest.approx(RETRY_MIN, abs=2 * STEP)


@scripted(play)
async def test_all_writers_go_on_when_one_has_succeeded(disk: Disk) -> None:
    disk.full_until = 100.0
    writing = [asyncio.create_task(disk.health.write(disk.write)) for _ in range(3)]
    await asyncio.sleep(70.0)
    disk.full_until = 0.0

    await disk.health.write(disk.write)  # a newcomer does not wait for the pause
    await asyncio.sleep(STEP)

    assert all(each.done() for each in writing)
    assert disk.changes[0] == "failing"
    assert disk.changes.count("healed") == 1


@scripted(play)
async def test_a_read_that_succeeds_does_not_end_the_failure(disk: Disk) -> None:
    disk.full_until = 100.0
    writing = asyncio.create_task(disk.health.write(disk.write))
    await asyncio.sleep(0.5)

    async def read() -> str:
        return "found"

    assert await disk.health.read(read) == "found"
    assert disk.health.failure is FULL
    disk.full_until = 0.0
    await writing
    assert disk.changes[-1] == "healed"


@scripted(play)
async def test_a_read_that_fails_is_repeated_and_ends_its_own_failure(
    disk: Disk,
) -> None:
    disk.full_until = 5.0

    await disk.health.read(disk.write)

    assert disk.changes == ["failing", "retried", "retried", "healed"]


@scripted(play)
async def test_a_writer_that_is_cancelled_leaves_the_others_waiting(disk: Disk) -> None:
    disk.full_until = 2.0
    leaving = asyncio.create_task(disk.health.write(disk.write))
    staying = asyncio.create_task(disk.health.write(disk.write))
    await asyncio.sleep(0.5)

    leaving.cancel()

    await staying
    assert leaving.cancelled()


@scripted(play)
async def test_a_broken_store_ends_all_writers(disk: Disk) -> None:
    disk.full_until = 100.0
    waiting = asyncio.create_task(disk.health.write(disk.write))
    await asyncio.sleep(0.5)
    disk.error = DAMAGED

    with pytest.raises(StoreError, match="malformed"):
        await disk.health.write(disk.write)
    with pytest.raises(StoreError, match="malformed"):
        await waiting

    assert await disk.health.wait_broken() is DAMAGED
    attempts = len(disk.attempts)
    with pytest.raises(StoreError, match="malformed"):
        await disk.health.write(disk.write)
    assert len(disk.attempts) == attempts
    assert disk.changes == ["failing", "broken"]


@scripted(play)
async def test_damage_that_a_read_has_found_ends_a_write_under_way(disk: Disk) -> None:
    writing = asyncio.create_task(disk.health.write(lambda: asyncio.sleep(1.0)))
    await asyncio.sleep(0.5)

    disk.health.report_broken(StoreBroken("malformed", "/data/shoal.db"))

    with pytest.raises(StoreBroken, match="malformed"):
        await writing
    assert disk.changes == ["broken"]


def test_each_change_is_one_line_with_the_path(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def script(disk: Disk) -> None:
        disk.full_until = 10.0
        await disk.health.write(disk.write)
        disk.error, disk.full_until = DAMAGED, 100.0
        with pytest.raises(StoreError):
            await disk.health.write(disk.write)

    caplog.set_level(logging.INFO, "shoal.coordinator")

    play(script)

    full, healed, broken = [each.getMessage() for each in caplog.records]
    assert full.endswith("refused: /data/shoal.db: database or disk is full")
    assert healed.startswith("store healed after_s=1")
    assert broken.endswith("ends: /data/shoal.db: database disk image is malformed")


def test_clients_do_not_see_the_path() -> None:
    assert str(FULL) == "database or disk is full"
    assert FULL.located == "/data/shoal.db: database or disk is full"
