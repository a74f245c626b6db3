"""Warnings about stalled calls."""

import logging

import pytest

from client.coordinator import running_coordinator
from shoal import AsyncPool
from shoal.client import availability
from shoal.client.availability import TaskAvailability, TaskList, stall_warning

NOBODY = TaskList((), 0, 0, 0)
ONE = TaskList((TaskAvailability("add", 1, 2),), 1, 2, 0)


@pytest.mark.parametrize(
    ("there", "names", "expected"),
    [
        (NOBODY, {"add": False}, "waiting for add; start one"),
        (NOBODY, {str(n): False for n in range(7)}, "0, 1, 2, 3, 4 and 2 more"),
        (ONE, {"sub": False, "add": False}, "no worker has sub: waiting; start one"),
        (ONE, {"<lambda>": True}, "--trust-code"),
    ],
)
def test_warning_names_stalled_calls_and_a_remedy(
    there: TaskList, names: dict[str, bool], expected: str
) -> None:
    assert expected in stall_warning(there, names)


@pytest.mark.parametrize(
    "there", [ONE, TaskList((), 1, 1, 1), TaskList((), 1, 1, 0, unnamed=1)]
)
def test_queued_calls_cause_no_warning(there: TaskList) -> None:
    coded = bool(there.code)

    assert stall_warning(there, {"add": coded}) == ""


async def test_stalled_call_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(availability, "STALL_TIMEOUT", 0.01)
    async with running_coordinator(other=lambda: 1) as there:
        there.paused = True
        async with AsyncPool(there.url, there.address.api_key) as pool:
            with caplog.at_level(logging.WARNING, "shoal"):
                call = await pool.submit("mine.add")
                await there.eventually(lambda: "no worker has mine.add" in caplog.text)
            call.cancel()

    assert len(caplog.records) == 1
