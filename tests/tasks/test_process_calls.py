"""Lanes: calls of one function, pushed ahead, recalled, and made again."""

from pathlib import Path

import pytest

from shoal.domain.errors import InvalidRequest, NotFound, Unavailable
from shoal.domain.vocabulary import StreamedCall
from shoal.domain.work import CallStream
from tasks.callers import CODE, Gate, RecordedStream, caller_of, code_call, no_blobs


async def test_returns_come_in_the_order_of_the_calls() -> None:
    async with caller_of() as caller:
        calling = RecordedStream.open(caller.processes, CallStream("demo.add"))
        calling.push(*((number, 1) for number in range(2000)))
        returns = await calling.wait_for(2000)

    assert returns == [(number, number + 1) for number in range(2000)]


async def test_error_of_one_call_is_its_own() -> None:
    async with caller_of() as caller:
        calling = RecordedStream.open(caller.processes, CallStream("demo.fail"))
        calling.push(("zip",), ("zap", 5))
        (_, first), (_, second) = await calling.wait_for(2)

    assert first.endswith("ValueError: zip")
    assert second.endswith("but 2 were given")


async def test_return_does_not_wait_for_a_slow_call(gate: Gate) -> None:
    async with caller_of() as caller:
        calling = RecordedStream.open(caller.processes, CallStream("waits"))
        calling.push((), gate.args)
        await gate.reached()

        assert len(await calling.wait_for(1)) == 1
        await gate.open()
        assert (await calling.wait_for(2))[1] == (1, None)


async def test_call_that_takes_too_long_is_told_and_the_others_are_made() -> None:
    async with caller_of() as caller:
        calling = RecordedStream.open(
            caller.processes, CallStream("demo.sleep", timeout=0.3)
        )
        calling.push((0,), (60,), (0.001,))
        returns = await calling.wait_for(3)

    assert sorted(returns) == [(0, 0), (1, "Task timed out after 0.3s"), (2, 0.001)]


async def test_crash_is_told_of_the_call_that_crashed_alone() -> None:
    async with caller_of() as caller:
        calling = RecordedStream.open(caller.processes, CallStream("crash_if"))
        calling.push(*((number, 7) for number in range(20)))
        returns = dict(await calling.wait_for(20))

    assert "ended with status 7" in returns.pop(7)
    assert returns == {number: number for number in range(20) if number != 7}


@pytest.mark.parametrize("timeout", [None, 60.0])
async def test_crash_tells_nothing_of_what_earlier_calls_have_printed(
    timeout: float | None,
) -> None:
    async with caller_of() as caller:
        first = RecordedStream.open(
            caller.processes, CallStream("speaks", timeout=timeout)
        )
        first.push(("the secret of another",))
        await first.wait_for(1)
        assert first.stream is not None
        first.stream.close()
        calling = RecordedStream.open(
            caller.processes, CallStream("speaks", timeout=timeout)
        )
        calling.push(("one",), ("two",), ("mine", 3))
        returns = await calling.wait_for(3)

    assert returns[:2] == [(0, None), (1, None)]
    assert str(returns[2][1]).endswith("with status 3; its last output:\nmine")


async def test_recalled_calls_are_not_made(tmp_path: Path, gate: Gate) -> None:
    async with caller_of() as caller:
        calling = RecordedStream.open(caller.processes, CallStream("either"))
        assert calling.stream is not None
        calling.push(gate.args)
        calling.push(*((str(tmp_path / f"{n}"),) for n in range(1, 1000)), first=1)
        await gate.reached()
        calling.stream.recall(range(600, 1000))
        await gate.open()
        returns = await calling.wait_for(600)
        calling.stream.close()

    assert [number for number, _ in returns] == [*range(600)]
    assert (tmp_path / "599").exists()
    assert not (tmp_path / "600").exists()


async def test_recalled_call_that_runs_is_stopped(tmp_path: Path, gate: Gate) -> None:
    async with caller_of() as caller:
        calling = RecordedStream.open(caller.processes, CallStream("either"))
        assert calling.stream is not None
        calling.push(gate.args, (str(tmp_path / "next"),))
        await gate.reached()
        calling.stream.recall([0])

        assert await calling.wait_for(1) == [(1, None)]


async def test_closing_a_lane_stops_what_runs_and_gives_the_slot_back(
    gate: Gate,
) -> None:
    async with caller_of() as caller:
        calling = RecordedStream.open(caller.processes, CallStream("waits"))
        assert calling.stream is not None
        calling.push(gate.args)
        await gate.reached()
        with pytest.raises(Unavailable, match="all 1 slots are taken"):
            caller.processes.open_stream(CallStream("pid"), no_blobs, calling.returned)
        calling.stream.close()

        assert await caller("demo.add", 2) == 2
        assert calling.returns == []


async def test_lane_for_a_function_that_is_not_there_is_refused() -> None:
    async with caller_of() as caller:
        with pytest.raises(NotFound, match=r"Task 'demo\.nope' not registered"):
            RecordedStream.open(caller.processes, CallStream("demo.nope"))
        with pytest.raises(InvalidRequest, match="--trust-code"):
            RecordedStream.open(caller.processes, CallStream("code", None, CODE))


async def test_lane_calls_functions_that_are_sent_along() -> None:
    async with caller_of(trust_code=True) as caller:
        calling = RecordedStream.open(caller.processes, CallStream("code", None, CODE))
        assert calling.stream is not None
        sent = code_call(lambda x: x + 1, 41)
        calling.stream.push([StreamedCall(0, sent.args, sent.kwargs)])

        assert await calling.wait_for(1) == [(0, 42)]
