"""What is said of calls that wait for long."""

import logging

import pytest

from client.coordinator import coordinating
from shoal import AsyncPool
from shoal.client import lookout
from shoal.client.lookout import why_waiting
from shoal.client.tasks import Tasks, TaskThere

NOBODY = Tasks((), 0, 0, 0)
ONE = Tasks((TaskThere("add", 1, 2),), 1, 2, 0)


@pytest.mark.parametrize(
    ("there", "names", "said"),
    [
        (NOBODY, {"add": False}, "no worker that calls functions is connected: add"),
        (NOBODY, {str(n): False for n in range(7)}, "0, 1, 2, 3, 4 and 2 more"),
        (ONE, {"sub": False, "add": False}, "no worker has sub now: start one"),
        (ONE, {"<lambda>": True}, "--trust-code"),
    ],
)
def test_calls_that_nobody_can_make_are_told_with_what_to_start(
    there: Tasks, names: dict[str, bool], said: str
) -> None:
    assert said in why_waiting(there, names)


@pytest.mark.parametrize(
    "there", [ONE, Tasks((), 1, 1, 1), Tasks((), 1, 1, 0, unnamed=1)]
)
def test_nothing_is_said_of_calls_that_are_only_queued(there: Tasks) -> None:
    coded = bool(there.code)

    assert why_waiting(there, {"add": coded}) == ""


async def test_program_hears_why_its_call_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lookout, "AFTER", 0.01)
    async with coordinating(other=lambda: 1) as there:
        there.held = True
        async with AsyncPool(there.url, there.place.api_key) as pool:
            with caplog.at_level(logging.WARNING, "shoal"):
                call = await pool.submit("mine.add")
                await there.eventually(lambda: "no worker has mine.add" in caplog.text)
            call.cancel()

    assert len(caplog.records) == 1
