"""Calls recorded with a real MacFleet worker return the same results here."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from protocols.macfleet.recorded import Case, case_of, recorded
from shoal.domain.errors import JobError, ShoalError
from shoal.domain.work import Call
from shoal.tasks.values import ValueReader
from tasks.callers import ProcessCaller, caller_of, ignore_progress, no_blobs
from tasks.clusters.real import DEMO_FILE, TYPED_FILE

HEAD = 24  # bytes before the payload of a frame
TYPE = slice(4, 6)  # of a frame, in its head
TASK = 8

SESSION = frozenset(
    {
        "taskrun/not msgpack",
        "taskrun/missing name",
        "taskrun/bad crc",
        "taskrun/unknown frame type",
        "taskrun/name not str",
        "taskrun/timeout string",
    }
)
"""What never comes as far as the functions: see the tests of the session."""

NO_ANSWER = "taskrun/unserializable result"
"""Where real workers say nothing, and ours say why."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def caller() -> AsyncIterator[ProcessCaller]:
    """One process for all cases."""
    async with caller_of(DEMO_FILE, TYPED_FILE) as running:
        yield running


@pytest.mark.asyncio(loop_scope="module")
@recorded("task_worker")
async def test_recorded_task_returns_the_recorded_result(
    case: Case, caller: ProcessCaller
) -> None:
    if case["name"] in SESSION:
        return
    calls = [_call(frame) for frame in map(bytes.fromhex, case["input"]["frames_hex"])]
    pending = [_answer(caller, call) for call in calls if call is not None]
    answers = await asyncio.gather(*pending)

    if case["name"] == NO_ANSWER:
        (error,) = answers
        assert isinstance(error, JobError)
        assert "cannot be sent" in str(error)
        return
    replies = [reply["result"] for reply in case["expect"]["replies"]]
    assert len(answers) == len(replies)
    for answer, reply in zip(answers, replies, strict=True):
        if reply["ok"]:
            assert answer == _plain(reply["value"])
        else:
            assert isinstance(answer, ShoalError)
            _compare(str(answer), reply["error"])


def test_session_replies_match_the_recording() -> None:
    assert all(case_of(name) for name in SESSION)


def _call(frame: bytes) -> Call | None:
    if int.from_bytes(frame[TYPE]) != TASK:
        return None
    task: dict[str, Any] = msgspec.msgpack.decode(frame[HEAD:])
    encode = msgspec.msgpack.encode
    return Call(
        task["name"],
        encode(task.get("args") or []),
        encode(task.get("kwargs") or {}),
        task.get("timeout", 300),
    )


async def _answer(caller: ProcessCaller, call: Call) -> object:
    try:
        value = await caller.processes.call(call, no_blobs, ignore_progress)
    except ShoalError as error:
        return error
    return ValueReader().read(value)


def _plain(value: Any) -> Any:
    match value:
        case {"$bytes": text}:
            return bytes.fromhex(text)
        case _:
            return value


def _compare(actual: str, recorded: str) -> None:
    """Compare errors by their last lines, which are what people and peers read."""
    last = actual.splitlines()[-1]
    expected = recorded.removeprefix("<traceback ending with> ")
    if "TaskNotRegisteredError" in expected:
        # Ours has a module of its own, and more functions.
        text = expected.partition("TaskNotRegisteredError")[2]
        begin, _, known = text.partition(" Known tasks: [")
        assert f"TaskNotRegisteredError{begin} Known tasks: [" in last
        assert all(name in last for name in known.rstrip("]").split(", "))
    else:
        assert last.strip() == expected.strip()
