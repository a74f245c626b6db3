"""Call streams: calls are pushed ahead, recalled, and repeated."""

import asyncio
from pathlib import Path

import pytest

from shoal.domain.errors import InvalidRequest, NotFound, Unavailable
from shoal.domain.vocabulary import StreamedCall
from shoal.domain.work import CallStream
from shoal.tasks.exception_record import decode_exception
from shoal.tasks.limits import SENT_AHEAD_MAX
from tasks.callers import CODE, Gate, RecordedStream, caller_of, code_call, no_blobs


async def test_returns_are_in_call_order() -> None:
    async with caller_of() as caller:
        calling = RecordedStream.open(caller.processes, CallStream("demo.add"))
        calling.push(*((number, 1) for number in range(2000)))
        returns = await calling.wait_for(2000)

    assert returns == [(number, number + 1) for number in range(2000)]


async def test_error_fails_only_its_call() -> None:
    async with caller_of() as caller:
        calling = RecordedStream.open(caller.processes, CallStream("demo.fail"))
        calling.push(("zip",), ("zap", 5))
        (_, first), (_, second) = await calling.wait_for(2)

    record = decode_exception(calling.returns[0].value)
    assert record is not None
    assert (record.name, record.text) == ("ValueError", "zip")
    assert first.endswith("ValueError: zip")
    assert second.endswith("but 2 were given")


async def test_return_is_sent_during_a_slow_call(gate: Gate) -> None:
    async with caller_of() as caller:
        calling = RecordedStream.open(caller.processes, CallStream("waits"))
        calling.push((), gate.args)
        await gate.reached()

        assert len(await calling.wait_for(1)) == 1
        await gate.open()
        assert (await calling.wait_for(2))[1] == (1, None)


async def test_timed_out_call_fails_alone() -> None:
    async with caller_of() as caller:
        calling = RecordedStream.open(
            caller.processes, CallStream("demo.sleep", timeout=0.3)
        )
        calling.push((0,), (60,), (0.001,))
        returns = await calling.wait_for(3)

    assert sorted(returns) == [(0, 0), (1, "Task timed out after 0.3s"), (2, 0.001)]


async def test_crash_fails_only_the_running_call() -> None:
    async with caller_of() as caller:
        calling = RecordedStream.open(caller.processes, CallStream("crash_if"))
        calling.push(*((number, 7) for number in range(20)))
        returns = dict(await calling.wait_for(20))

    assert "ended with status 7" in returns.pop(7)
    assert returns == {number: number for number in range(20) if number != 7}


@pytest.mark.parametrize("timeout", [None, 60.0])
async def test_crash_report_excludes_output_of_earlier_calls(
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


async def test_recalled_calls_are_dropped(tmp_path: Path, gate: Gate) -> None:
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


async def test_running_call_is_aborted_when_recalled(
    tmp_path: Path, gate: Gate
) -> None:
    async with caller_of() as caller:
        calling = RecordedStream.open(caller.processes, CallStream("either"))
        assert calling.stream is not None
        calling.push(gate.args, (str(tmp_path / "next"),))
        await gate.reached()
        calling.stream.recall([0])

        assert await calling.wait_for(1) == [(1, None)]


async def test_closing_a_stream_aborts_its_call_and_frees_the_slot(
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


async def test_idle_stream_gives_its_process_to_others() -> None:
    async with caller_of(sharers=2) as caller:
        one = RecordedStream.open(caller.processes, CallStream("demo.add"))
        other = RecordedStream.open(caller.processes, CallStream("demo.ident"))
        one.push((1, 1))
        assert await one.wait_for(1) == [(0, 2)]

        other.push(("between",))
        assert await other.wait_for(1) == [(0, "between")]
        assert await caller("demo.add", 2) == 2
        one.push((2, 2), first=1)
        assert (await one.wait_for(2))[1] == (1, 4)
        with pytest.raises(Unavailable, match="all 1 slots are taken"):
            RecordedStream.open(caller.processes, CallStream("pid"))


async def test_busy_streams_take_turns_on_a_process(
    monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    monkeypatch.setattr("shoal.tasks.limits.STREAM_TURN", 0.0)
    many = 3 * SENT_AHEAD_MAX
    async with caller_of(sharers=2) as caller:
        one = RecordedStream.open(caller.processes, CallStream("either"))
        other = RecordedStream.open(caller.processes, CallStream("demo.ident"))
        one.push(gate.args)
        await gate.reached()
        one.push(*(("/dev/null",) for _ in range(many)), first=1)
        other.push(("between",))
        await gate.open()
        await other.wait_for(1)

        assert len(one.returns) < many
        returns = await one.wait_for(1 + many)
    assert [number for number, _ in returns] == [*range(1 + many)]


async def test_single_call_gets_its_turn_beside_a_busy_stream(
    monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    monkeypatch.setattr("shoal.tasks.limits.STREAM_TURN", 0.0)
    async with caller_of() as caller:
        calling = RecordedStream.open(caller.processes, CallStream("waits"))
        calling.push(gate.args, gate.args)
        await gate.reached()
        single = asyncio.create_task(caller("demo.add", 2))
        await asyncio.sleep(0)
        calling.push(gate.args, first=2)
        for _ in range(2):
            await gate.open()
            await gate.reached()

        assert await single == 2
        await gate.open()
        assert len(await calling.wait_for(3)) == 3


async def test_stream_for_an_unknown_function_is_rejected() -> None:
    async with caller_of() as caller:
        with pytest.raises(NotFound, match=r"Task 'demo\.nope' not registered"):
            RecordedStream.open(caller.processes, CallStream("demo.nope"))
        with pytest.raises(InvalidRequest, match="--trust-code"):
            RecordedStream.open(caller.processes, CallStream("code", None, CODE))


async def test_stream_calls_functions_sent_as_code() -> None:
    async with caller_of(trust_code=True) as caller:
        calling = RecordedStream.open(caller.processes, CallStream("code", None, CODE))
        assert calling.stream is not None
        sent = code_call(lambda x: x + 1, 41)
        calling.stream.push([StreamedCall(0, sent.args, sent.kwargs)])

        assert await calling.wait_for(1) == [(0, 42)]
