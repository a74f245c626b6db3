"""Calls of coroutines, over a real socket to a server that answers as documented."""

import asyncio
import gc
import itertools
import re
import warnings
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import numpy as np
import pytest

import shoal
from client.coordinator import KEY, Coordinator, running_coordinator
from shoal import AsyncPool
from shoal.client import pending_calls
from shoal.client.pending_calls import ClientCall
from shoal.domain.errors import TooLarge, Unauthorized


def pool_of(server: Coordinator, *, durable: bool = True) -> AsyncPool:
    return AsyncPool(server.url, KEY, durable=durable)


async def test_function_is_called_by_its_name() -> None:
    async with (
        running_coordinator(add=lambda a, b: a + b) as server,
        pool_of(server) as pool,
    ):
        assert await pool.call("add", 1, b=2) == 3


async def test_results_are_in_order_or_as_completed() -> None:
    async with (
        running_coordinator(double=lambda x: 2 * x) as server,
        pool_of(server) as pool,
    ):
        assert await pool.map("double", range(100)) == [*range(0, 200, 2)]

        came = [x async for x in pool.map("double", range(100), ordered=False)]

    assert sorted(came) == [*range(0, 200, 2)]


async def test_lambda_is_sent_as_code() -> None:
    y = 5
    async with running_coordinator() as server, pool_of(server) as pool:
        assert await pool.call(lambda x: x + y, 2) == 7


async def test_remote_error_is_raised_with_its_traceback_as_the_cause() -> None:
    def fail() -> None:
        raise ValueError("zap")

    async with running_coordinator(fail=fail) as server, pool_of(server) as pool:
        with pytest.raises(ValueError, match="zap") as caught:
            await pool.call("fail")

    assert isinstance(caught.value.__cause__, shoal.RemoteTraceback)
    assert 'raise ValueError("zap")' in str(caught.value.__cause__)


async def test_large_bytes_are_sent_in_place_to_workers_for_plain_values() -> None:
    big = bytes(300 << 10)
    async with (
        running_coordinator(size=lambda a, b: len(a[0]) + b) as server,
        pool_of(server) as pool,
    ):
        server.refusals.append(["values", "plain values only", {}])
        assert await pool.call("size", [big], b=1) == len(big) + 1

    first, second = server.calls
    assert first[5]["needs"] == ["values"]
    assert not second[5].keys() & {"needs", "blobs"}
    assert len(second[3]) > len(big)


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [
        ((1, np.ones(3)), {}, "args[1]"),
        ((), {"given": {"a": [{1, 2}]}}, "kwargs.given.a[0]"),
        ((bytes(300 << 10), np.ones(100_000)), {}, "args[1]"),
    ],
)
async def test_refusal_names_the_argument_that_is_not_plain(
    args: tuple[object, ...], kwargs: dict[str, object], named: str
) -> None:
    async with running_coordinator() as server, pool_of(server) as pool:
        server.refusals.append(["values", "plain values only", {}])
        with pytest.raises(shoal.PlainValuesOnly, match=re.escape(named)) as caught:
            await pool.call("f", *args, **kwargs)

    assert str(caught.value) == f"{named}: plain values only"


async def test_value_in_place_is_named_if_it_is_too_large() -> None:
    async with running_coordinator() as server, pool_of(server) as pool:
        server.refusals.append(["values", "plain values only", {}])
        with pytest.raises(TooLarge, match=r"args\[1\]"):
            await pool.call("f", 1, bytes(65 << 20))


async def test_large_argument_is_uploaded_once() -> None:
    big = np.arange(100_000, dtype=np.float64)
    async with (
        running_coordinator(total=lambda a, k: float(a.sum()) + k) as server,
        pool_of(server) as pool,
    ):
        totals = await pool.map("total", [big] * 5, range(5))

    assert totals == [big.sum() + k for k in range(5)]
    assert len(server.put) == 1


async def test_large_result_is_downloaded() -> None:
    async with (
        running_coordinator(zeros=lambda n: np.zeros(n)) as server,
        pool_of(server) as pool,
    ):
        zeros = await pool.call("zeros", 1_000_000)

    assert zeros.shape == (1_000_000,)


async def test_cancelled_coroutine_cancels_the_call() -> None:
    async with (
        running_coordinator(wait=lambda: None) as server,
        pool_of(server) as pool,
    ):
        server.paused = True
        calling = asyncio.create_task(pool.call("wait"))
        await server.wait_for_calls(1)

        calling.cancel()

        await server.eventually(lambda: server.cancelled == [server.calls[0][1]])
    assert calling.cancelled()


async def test_durable_calls_are_resent_under_their_keys() -> None:
    called: list[int] = []

    def note(x: int) -> int:
        called.append(x)
        return x

    async with running_coordinator(note=note) as server, pool_of(server) as pool:
        assert await pool.call("note", 0) == 0
        server.paused = True
        calls = [await pool.submit("note", x) for x in (1, 2)]
        await server.wait_for_calls(3)
        await server.hang_up()
        server.paused = False

        assert await asyncio.gather(*calls) == [1, 2]

    keys = [item[5]["key"] for item in server.calls]
    assert keys[1:3] == keys[3:5]
    assert [item[5]["fresh"] for item in server.calls] == [True] * 3 + [False] * 2
    assert called == [0, 1, 2]


async def test_each_ended_call_admits_one_waiting_submission(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pending_calls, "CALL_MEMORY_MAX", 1 << 20)
    tries: list[object] = []
    add = pending_calls.CallMemory.add

    def counted(
        self: pending_calls.CallMemory, call: ClientCall, *, force: bool = False
    ) -> bool:
        tries.append(call)
        return add(self, call, force=force)

    monkeypatch.setattr(pending_calls.CallMemory, "add", counted)
    sizes = range(400_000, 400_060)
    async with running_coordinator(size=len) as server, pool_of(server) as pool:
        called = await asyncio.gather(
            *(pool.call("size", bytes(size)) for size in sizes)
        )

    assert called == [*sizes]
    assert len(tries) <= 3 * len(sizes)


async def test_volatile_call_fails_with_its_connection() -> None:
    async with (
        running_coordinator(wait=lambda: None) as server,
        pool_of(server, durable=False) as pool,
    ):
        server.paused = True
        call = await pool.submit("wait")
        await server.wait_for_calls(1)
        await server.hang_up()

        with pytest.raises(ConnectionError, match="retry=True"):
            await call


async def test_wrong_key_fails_at_once() -> None:
    async with (
        running_coordinator() as server,
        AsyncPool(server.url, "sk-other") as pool,
    ):
        with pytest.raises(Unauthorized, match="SHOAL_API_KEY"):
            await pool.call("add")


async def test_progress_is_reported() -> None:
    reports = []
    async with running_coordinator(work=lambda: 1) as server, pool_of(server) as pool:
        server.paused = True
        watched = pool.with_options(
            on_progress=lambda *message: reports.append(message)
        )
        call = await watched.submit("work")
        await server.wait_for_calls(1)
        await server.send([4, server.calls[0][1], 0.5, "half"])
        await server.resume()
        await call

    assert reports == [(0.5, "half")]
    assert server.calls[0][5]["progress"] is True


async def numbers(count: int, gate: asyncio.Event | None = None) -> AsyncIterator[int]:
    """Yield numbers; before the last one, wait."""
    for number in range(count):
        if gate is not None and number == count - 1:
            await gate.wait()
        yield number


@pytest.mark.parametrize("ordered", [True, False])
async def test_items_may_be_asynchronous(ordered: bool) -> None:
    async with (
        running_coordinator(add=lambda a, b: a + b) as server,
        pool_of(server) as pool,
    ):
        sums = await pool.map("add", numbers(300), itertools.count(), ordered=ordered)

    assert sorted(sums) == [*range(0, 600, 2)]
    assert not ordered or sums == sorted(sums)


@pytest.mark.parametrize("ordered", [True, False])
async def test_results_do_not_wait_for_later_items(ordered: bool) -> None:
    gate = asyncio.Event()
    came = []
    async with (
        running_coordinator(same=lambda x: x) as server,
        pool_of(server) as pool,
    ):
        async for result in pool.map("same", numbers(3, gate), ordered=ordered):
            came.append(result)
            if len(came) == 2:
                gate.set()

    assert sorted(came) == [0, 1, 2]


async def test_buffersize_limits_the_calls_whose_results_are_not_taken() -> None:
    numbers = iter(range(100))

    async with (
        running_coordinator(same=lambda x: x) as server,
        pool_of(server) as pool,
    ):
        results = aiter(pool.map("same", numbers, buffersize=3))
        assert await anext(results) == 0
        assert next(numbers) == 3
        assert len([each async for each in results]) == 98


async def test_leaving_an_asynchronous_map_closes_its_source() -> None:
    closed = []

    async def source() -> AsyncIterator[int]:
        try:
            async for number in numbers(1 << 20):
                yield number
        finally:
            closed.append(True)

    async with (
        running_coordinator(same=lambda x: x) as server,
        pool_of(server) as pool,
    ):
        results = aiter(pool.map("same", source()))
        assert isinstance(results, AsyncGenerator)
        async with aclosing(results):
            assert await anext(results) == 0

    assert closed


async def test_error_of_a_source_is_raised() -> None:
    async def source() -> AsyncIterator[int]:
        yield 1
        raise OSError("unplugged")

    async with (
        running_coordinator(same=lambda x: x) as server,
        pool_of(server) as pool,
    ):
        with pytest.raises(OSError, match="unplugged"):
            await pool.map("same", source())


async def test_cancelling_the_start_leaves_no_task() -> None:
    before = asyncio.all_tasks()

    for turns in range(4):
        entering = asyncio.create_task(AsyncPool("127.0.0.1:1", KEY).__aenter__())
        for _ in range(turns):
            await asyncio.sleep(0)
        entering.cancel()
        await asyncio.wait([entering])
        if not entering.cancelled():  # it had started
            await entering.result().shutdown()

    assert asyncio.all_tasks() == before


async def test_cancelling_at_any_time_closes_the_connection() -> None:
    async with running_coordinator(add=lambda a, b: a + b) as server:

        async def add() -> None:
            async with pool_of(server, durable=False) as pool:
                await pool.call("add", 1, 2)

        with warnings.catch_warnings(record=True) as unclosed:
            warnings.simplefilter("always", ResourceWarning)
            for turns in range(40):  # from before it connects until after the answer
                adding = asyncio.create_task(add())
                for _ in range(turns):
                    await asyncio.sleep(0)
                adding.cancel()
                await asyncio.wait([adding])
                del adding
                gc.collect()

    assert [str(each.message) for each in unclosed] == []
