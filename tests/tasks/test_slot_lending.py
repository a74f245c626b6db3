"""Slots of tasks that wait for calls of their own."""

import asyncio
from collections.abc import Iterator

import pytest

from shoal.domain.work import CallStream
from shoal.tasks import limits
from shoal.tasks.running_call import runs_tasks, set_lending_handler, slot_lent
from tasks.callers import Gate, ProcessCaller, RecordedStream, caller_of


@pytest.fixture
def reports() -> Iterator[list[bool]]:
    reports: list[bool] = []
    set_lending_handler(reports.append)
    yield reports
    set_lending_handler(None)


def test_only_the_first_and_the_last_of_several_waits_count(
    reports: list[bool],
) -> None:
    assert runs_tasks()
    with slot_lent(), slot_lent():
        pass
    with slot_lent():
        assert reports == [True, False, True]

    assert reports == [True, False, True, False]


def test_a_process_without_a_slot_lends_none() -> None:
    assert not runs_tasks()
    with slot_lent():
        pass


def recorded_loans(caller: ProcessCaller) -> list[int]:
    loans: list[int] = []
    caller.processes.on_lent = loans.append
    return loans


async def test_other_calls_run_while_one_waits_for_calls_of_its_own(gate: Gate) -> None:
    async with caller_of() as caller:
        loans = recorded_loans(caller)
        waiting = asyncio.create_task(caller("lends", *gate.args))
        await gate.reached()

        assert await caller("demo.add", 1, 2) == 3
        assert loans == [1]

        await gate.open()
        assert await waiting == "went on"
        assert loans == [1, 0]


async def test_streams_use_slots_that_are_lent(gate: Gate) -> None:
    async with caller_of() as caller:
        waiting = RecordedStream.open(caller.processes, CallStream("lends"))
        waiting.push(gate.args)
        lent = asyncio.Event()
        caller.processes.on_lent = lambda _: lent.set()
        await gate.reached()
        await lent.wait()

        other = RecordedStream.open(caller.processes, CallStream("demo.ident"))
        other.push((1,), (2,))
        assert await other.wait_for(2) == [(0, 1), (1, 2)]

        await gate.open()
        assert await waiting.wait_for(1) == [(0, "went on")]


async def test_cancelled_call_lends_no_longer(gate: Gate) -> None:
    async with caller_of() as caller:
        loans = recorded_loans(caller)
        waiting = asyncio.create_task(caller("lends", *gate.args))
        await gate.reached()
        assert await caller("demo.add", 1, 2) == 3

        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

        assert loans == [1, 0]
        assert await caller("demo.add", 1, 2) == 3


async def test_processes_beyond_the_slots_end(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SPARE_TIMEOUT", 0.0)
    async with caller_of() as caller:
        waiting = asyncio.create_task(caller("lends", *gate.args))
        await gate.reached()
        await caller("pid")
        await gate.open()
        await waiting

        # Idle processes take turns, until one is left.
        while len(left := {await caller("pid") for _ in range(4)}) > 1:
            pass
        assert len(left) == 1


async def test_number_of_lent_slots_is_limited(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "LENT_MAX", 0)
    async with caller_of() as caller:
        loans = recorded_loans(caller)
        waiting = asyncio.create_task(caller("lends", *gate.args))
        await gate.reached()
        await gate.open()
        await waiting

    assert loans == []
    assert "they may wait for ever" in caplog.text
