"""Blocking calls over a real socket."""

import itertools
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

import shoal
from client.coordinator_thread import CoordinatorThread
from shoal.client import pending_calls
from shoal.client.map_results import AHEAD_FIRST
from shoal.domain.errors import (
    InvalidRequest,
    QueueFull,
    ShoalError,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnknownTask,
    WorkerLost,
)
from shoal.tasks import registry, values
from shoal.tasks.registry import TASKS
from tasks import demo_tasks
from tasks.demo_tasks import Point


def test_function_is_called_by_its_name(beside: CoordinatorThread) -> None:
    beside.functions(add=lambda a, b: a + b)

    with beside.pool() as pool:
        assert pool.submit("add", 1, b=2).result() == 3


def test_task_is_called_by_its_registered_name(beside: CoordinatorThread) -> None:
    beside.functions(**{"demo.add": lambda a, b: a + b})

    with beside.pool() as pool:
        assert pool.submit(demo_tasks.add, 1, 2).result() == 3

    assert beside.coordinator.calls[0][2] == "demo.add"


def test_pool_is_an_executor(beside: CoordinatorThread) -> None:
    beside.functions(double=lambda x: 2 * x)

    with beside.pool() as pool:
        assert isinstance(pool, futures.Executor)
        calls = [pool.submit("double", x) for x in range(10)]
        done = {call.result() for call in futures.as_completed(calls)}
        finished, _ = futures.wait(calls)

    assert done == {*range(0, 20, 2)}
    assert len(finished) == 10


@pytest.mark.parametrize("ordered", [True, False])
def test_map_yields_every_result(beside: CoordinatorThread, ordered: bool) -> None:
    beside.functions(add=lambda a, b: a + b)

    with beside.pool(durable=False) as pool:
        sums = list(pool.map("add", range(1000), range(1000), ordered=ordered))

    assert sorted(sums) == [*range(0, 2000, 2)]
    if ordered:
        assert sums == sorted(sums)


def test_map_of_an_infinite_iterable_is_lazy(
    beside: CoordinatorThread,
) -> None:
    beside.functions(double=lambda x: 2 * x)

    with beside.pool(durable=False) as pool:
        doubled = pool.map("double", itertools.count())
        first = [*itertools.islice(doubled, 20)]
        doubled.close()

    assert first == [*range(0, 40, 2)]


def test_many_calls_share_few_messages(beside: CoordinatorThread) -> None:
    beside.functions(same=lambda x: x)

    with beside.pool(durable=False) as pool:
        assert list(pool.map("same", range(5000))) == [*range(5000)]

    assert beside.coordinator.messages < 500


def test_exceptions_are_returned_in_place(beside: CoordinatorThread) -> None:
    beside.functions(inverse=lambda x: 1 / x)

    with beside.pool() as pool:
        results = pool.map("inverse", [1, 0, 2], return_exceptions=True)

    assert results[::2] == [1.0, 0.5]
    assert isinstance(results[1], ZeroDivisionError)


def test_first_error_of_a_map_cancels_the_rest(beside: CoordinatorThread) -> None:
    beside.coordinator.refusals.append(["raised", "ValueError: bad", {}])
    beside.coordinator.paused = True

    with beside.pool() as pool, pytest.raises(ValueError, match="bad"):
        list(pool.map("some", range(3)))

    numbers = [item[1] for item in beside.coordinator.calls]
    assert beside.coordinator.cancelled == numbers[1:]


def test_map_times_out(beside: CoordinatorThread) -> None:
    beside.coordinator.paused = True

    with beside.pool() as pool, pytest.raises(TimeoutError):
        list(pool.map("some", [1], timeout=0.01))


def test_cancelled_future_cancels_the_call(beside: CoordinatorThread) -> None:
    beside.coordinator.paused = True

    with beside.pool() as pool:
        call = pool.submit("some")
        beside.run(beside.coordinator.wait_for_calls(1))

        assert call.cancel()
        assert call.cancel(), "again, as for any future"
        assert [*futures.as_completed([call])] == [call]

    assert beside.coordinator.cancelled == [beside.coordinator.calls[0][1]]
    with pytest.raises(futures.CancelledError):
        call.result()


def test_call_cancelled_elsewhere_is_cancelled_here(
    beside: CoordinatorThread,
) -> None:
    beside.coordinator.refusals.append(["cancelled", "cancelled by its owner", {}])

    with beside.pool() as pool:
        call = pool.submit("some")
        with pytest.raises(futures.CancelledError):
            call.result()


def test_lambda_is_sent_with_its_arguments(beside: CoordinatorThread) -> None:
    scale = 3
    with beside.pool() as pool:
        assert pool.submit(lambda x, y: scale * x + y, 2, y=1).result() == 7

    options = beside.coordinator.calls[0][5]
    assert options["needs"] == ["code"]
    assert options["python"] == "{}.{}".format(*sys.version_info)


def test_sent_function_without_a_worker_has_a_remedy(
    beside: CoordinatorThread,
) -> None:
    beside.coordinator.trusts_code = False

    with (
        beside.pool() as pool,
        pytest.raises(shoal.CodeRefused, match="sent by clients"),
    ):
        pool.submit(lambda: 1).result()


class Own:
    """An object that can only be sent as a pickle."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own)

    def __hash__(self) -> int:
        return 1


def test_pickled_result_requires_trust(beside: CoordinatorThread) -> None:
    with beside.pool() as pool, pytest.raises(InvalidRequest, match="trust_code=True"):
        pool.submit(lambda: Own()).result()

    with beside.pool(trust_code=True) as pool:
        assert pool.submit(lambda: Own()).result() == Own()


def test_error_names_the_unsupported_argument(beside: CoordinatorThread) -> None:
    with beside.pool() as pool, pytest.raises(InvalidRequest, match=r"args\[0\]\.x"):
        pool.submit("some", {"x": Own()})


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("unknown", UnknownTask),
        ("code", shoal.CodeRefused),
        ("values", shoal.PlainValuesOnly),
        ("timeout", TimeoutError),
        ("lost", WorkerLost),
        ("busy", QueueFull),
        ("invalid", InvalidRequest),
    ],
)
def test_every_error_kind_has_its_exception(
    beside: CoordinatorThread, kind: str, error: type[Exception]
) -> None:
    beside.coordinator.refusals.append([kind, "so it is", {"job": "j7"}])

    with beside.pool() as pool, pytest.raises(error, match="so it is"):
        pool.submit("some").result()


def test_remote_traceback_is_the_cause(beside: CoordinatorThread) -> None:
    def fail() -> None:
        raise KeyError("zap")

    beside.functions(fail=fail)

    with beside.pool() as pool, pytest.raises(KeyError) as caught:
        pool.submit("fail").result()

    assert caught.value.args == ("zap",)
    assert 'raise KeyError("zap")' in str(caught.value.__cause__)


def test_large_value_is_put_once_and_referenced(beside: CoordinatorThread) -> None:
    beside.functions(total=lambda a: float(a["x"].sum()))
    array = np.ones(200_000)

    with beside.pool() as pool:
        ref = pool.put(array)
        totals = list(pool.map("total", [{"x": ref}] * 3))

    assert totals == [200_000.0] * 3
    assert len(beside.coordinator.put) == 1


def test_evicted_blob_is_uploaded_again(
    beside: CoordinatorThread,
) -> None:
    beside.functions(total=lambda a: float(a.sum()))
    array = np.ones(200_000)

    with beside.pool() as pool:
        assert pool.submit("total", array).result() == 200_000.0
        beside.coordinator.blobs.clear()
        assert pool.submit("total", array).result() == 200_000.0

    assert len(beside.coordinator.put) == 2


def test_ref_to_an_evicted_value_is_an_error(
    beside: CoordinatorThread,
) -> None:
    with beside.pool() as pool:
        ref = pool.put(np.ones(200_000))
        beside.coordinator.blobs.clear()

        with pytest.raises(ShoalError, match="upload the value again"):
            pool.submit("total", ref).result()


def test_wrong_key_fails_at_once(beside: CoordinatorThread) -> None:
    with beside.pool(key="sk-other") as pool, pytest.raises(Unauthorized):
        pool.submit("some").result()


def test_unreachable_coordinator_fails_at_once() -> None:
    with (
        shoal.Pool("http://127.0.0.1:9", "sk") as pool,
        pytest.raises(shoal.ConnectionLost, match="is `shoal serve` running"),
    ):
        pool.submit("some").result()


def test_durable_calls_survive_a_restarted_coordinator(
    beside: CoordinatorThread,
) -> None:
    beside.functions(same=lambda x: x)
    server = beside.coordinator

    with beside.pool() as pool:
        pool.submit("same", 0).result()
        server.paused = True
        calls = [pool.submit("same", x) for x in range(3)]
        beside.run(server.wait_for_calls(4))
        beside.run(server.stop())
        server.paused = False
        beside.run(server.start())

        assert [call.result() for call in calls] == [0, 1, 2]


def test_volatile_call_is_resent_only_with_retry(
    beside: CoordinatorThread,
) -> None:
    beside.functions(same=lambda x: x)

    with beside.pool(durable=False) as pool:
        pool.submit("same", 0).result()
        beside.coordinator.paused = True
        lost = pool.submit("same", 1)
        again = pool.with_options(retry=True).submit("same", 2)
        beside.run(beside.coordinator.wait_for_calls(3))
        beside.coordinator.paused = False
        beside.run(beside.coordinator.hang_up())

        assert again.result() == 2
        with pytest.raises(ConnectionError, match="retry=True"):
            lost.result()


def test_durable_call_waits_for_the_next_start_of_one_that_stops(
    beside: CoordinatorThread,
) -> None:
    beside.functions(same=lambda x: x)
    stops = ["unavailable", "it is stopping", {"stopping": True}]

    with beside.pool() as pool:
        pool.submit("same", 0).result()
        beside.coordinator.refusals += [stops, stops]
        waiting = pool.submit("same", 1)
        refused = pool.with_options(durable=False).submit("same", 2)
        with pytest.raises(Unavailable, match="it is stopping"):
            refused.result()
        beside.run(beside.coordinator.wait_for_calls(3))
        beside.run(beside.coordinator.hang_up())

        assert waiting.result() == 1


def test_key_names_a_call_and_indexes_a_map(
    beside: CoordinatorThread,
) -> None:
    beside.functions(same=lambda x: x)

    with beside.pool() as pool:
        nightly = pool.with_options(key="nightly")
        nightly.submit("same", 1).result()
        list(nightly.map("same", range(2)))

    keys = [item[5]["key"] for item in beside.coordinator.calls]
    assert keys == ["nightly", "nightly/0", "nightly/1"]


def test_options_are_sent_on_the_wire(beside: CoordinatorThread) -> None:
    beside.functions(same=lambda x: x)

    with beside.pool() as pool:
        hasty = pool.with_options(timeout=1.5, queue=20, priority="high", durable=False)
        hasty.submit("same", 1).result()

    assert beside.coordinator.calls[0][5] == {
        "timeout": 1.5,
        "queue": 20.0,
        "priority": "high",
        "kept": False,
        "exact": True,
    }


def test_shut_down_pool_rejects_calls(beside: CoordinatorThread) -> None:
    pool = beside.pool()
    pool.shutdown()

    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit("some")


def test_shutdown_can_cancel_open_calls(beside: CoordinatorThread) -> None:
    beside.coordinator.paused = True
    pool = beside.pool()
    call = pool.submit("some")
    beside.run(beside.coordinator.wait_for_calls(1))

    pool.shutdown(cancel_futures=True)

    assert call.cancelled()
    assert len(beside.coordinator.cancelled) == 1


def test_submit_blocks_at_the_memory_limit(
    beside: CoordinatorThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_calls, "CALL_MEMORY_MAX", 1 << 20)
    beside.functions(size=len)
    beside.coordinator.paused = True
    third = threading.Event()

    with beside.pool() as pool:

        def submit() -> None:
            calls = [pool.submit("size", bytes(400_000 + i)) for i in range(3)]
            third.set()
            assert [call.result() for call in calls] == [400_000, 400_001, 400_002]

        submitting = threading.Thread(target=submit)
        submitting.start()
        beside.run(beside.coordinator.wait_for_calls(2))
        assert not third.is_set()
        beside.run(beside.coordinator.resume())
        submitting.join()

    assert third.is_set()


def _submit_in_child(pool: shoal.Pool, pipe: Connection) -> None:
    try:
        pool.submit("some")
    except RuntimeError as error:
        pipe.send(str(error))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_forked_process_must_create_its_own_pool(beside: CoordinatorThread) -> None:
    parent_end, child_end = multiprocessing.Pipe()
    forking = multiprocessing.get_context("fork")

    with beside.pool() as pool:
        child = forking.Process(target=_submit_in_child, args=(pool, child_end))
        child.start()
        error_text = parent_end.recv()
        child.join()

    assert "create a shoal.Pool in each process" in error_text


def test_functions_of_the_workers_are_listed(beside: CoordinatorThread) -> None:
    beside.functions(add=lambda a, b: a + b)

    with beside.pool() as pool:
        listed = pool.tasks()

    assert [each.name for each in listed.tasks] == ["add"]
    assert listed.slots == 2


def test_error_in_the_block_cancels_open_calls(
    beside: CoordinatorThread,
) -> None:
    beside.functions(add=lambda: 1)
    beside.coordinator.paused = True

    pool = beside.pool()
    calls = [pool.submit("add") for _ in range(3)]
    beside.run(beside.coordinator.wait_for_calls(3))
    with pytest.raises(KeyboardInterrupt), pool:
        raise KeyboardInterrupt

    assert all(call.cancelled() for call in calls)
    assert sorted(beside.coordinator.cancelled) == [1, 2, 3]


def test_call_is_running_once_a_worker_has_it(beside: CoordinatorThread) -> None:
    beside.functions(add=lambda: 1)
    server = beside.coordinator
    server.paused = True

    with beside.pool() as pool:
        call = pool.submit("add")
        beside.run(server.wait_for_calls(1))
        before = call.running()
        beside.run(server.send([5, server.calls[0][1], 1]))
        beside.run(server.eventually(call.running))
        beside.run(server.resume())
        call.result()

    assert (before, call.running()) == (False, False)


def test_error_of_on_progress_is_logged(
    beside: CoordinatorThread, caplog: pytest.LogCaptureFixture
) -> None:
    beside.functions(add=lambda: 1)
    server = beside.coordinator
    server.paused = True

    def broken(share: float | None, remark: str) -> None:
        raise ValueError(remark)

    with beside.pool() as pool:
        call = pool.with_options(on_progress=broken).submit("add")
        beside.run(server.wait_for_calls(1))
        beside.run(server.send([4, server.calls[0][1], 0.5, "half"]))
        beside.run(server.resume())

        assert call.result() == 1
    assert "on_progress raised an error" in caplog.text


def test_unknown_function_error_names_its_module(
    beside: CoordinatorThread,
) -> None:
    with (
        beside.pool() as pool,
        pytest.raises(UnknownTask, match=f"--tasks {demo_tasks.__name__}"),
    ):
        pool.submit(demo_tasks.add, 1, 2).result()


def test_future_as_argument_error_has_a_remedy(
    beside: CoordinatorThread,
) -> None:
    beside.functions(add=lambda a, b: a + b)

    with beside.pool() as pool:
        first = pool.submit("add", 1, 2)
        with pytest.raises(InvalidRequest, match=r"pass its result\(\)"):
            pool.submit("add", first, 3)


def test_unreachable_coordinator_error_has_no_library_traceback() -> None:
    with (
        shoal.Pool("http://127.0.0.1:9", "sk") as pool,
        pytest.raises(shoal.ConnectionLost) as caught,
    ):
        pool.submit("some").result()

    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_repr_shows_the_url_and_not_the_key(beside: CoordinatorThread) -> None:
    with beside.pool() as pool:
        assert repr(pool) == f"<shoal.Pool of {beside.coordinator.url}>"


@pytest.fixture
def in_main(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Return a task of the program itself, which converts its argument."""

    def shouted(point: Point, text: str = "") -> str:
        return f"{type(point).__name__} {len(text)}"

    monkeypatch.setattr(shouted, "__module__", "__main__")
    monkeypatch.setattr(shouted, "__qualname__", "shouted")
    monkeypatch.setattr(registry, "main_module_name", lambda: "program")
    yield shoal.task(name="program.shouted")(shouted)
    del TASKS["program.shouted"]


def test_task_of_the_program_is_called_by_name_if_a_worker_has_it(
    beside: CoordinatorThread, in_main: Callable[..., str]
) -> None:
    beside.functions(**{"program.shouted": lambda point: "by name"})

    with beside.pool() as pool:
        assert pool.submit(in_main, Point(3)).result() == "by name"


@pytest.mark.parametrize("durable", [True, False])
def test_task_of_the_program_is_sent_if_no_worker_has_it(
    beside: CoordinatorThread, in_main: Callable[..., str], durable: bool
) -> None:
    large = "x" * 500_000
    with beside.pool(durable=durable) as pool:
        assert pool.submit(in_main, Point(3)).result() == "Point 0"
        lengths = [*pool.map(in_main, [Point(4)] * 2, ["four", large])]
    assert lengths == ["Point 4", f"Point {len(large)}"]


def test_task_of_the_program_that_no_worker_runs_says_what_to_do(
    beside: CoordinatorThread, in_main: Callable[..., str]
) -> None:
    beside.coordinator.trusts_code = False

    with (
        beside.pool() as pool,
        pytest.raises(UnknownTask, match=r"no worker has the task.*--trust-code"),
    ):
        pool.submit(in_main, Point(3)).result()


def test_task_of_a_notebook_is_sent(
    beside: CoordinatorThread,
    in_main: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "main_module_name", lambda: "__main__")
    monkeypatch.setitem(TASKS, "__main__.shouted", TASKS["program.shouted"])
    monkeypatch.setattr(in_main, "__shoal_task__", "__main__.shouted")

    with beside.pool() as pool:
        assert pool.submit(in_main, Point(3)).result() == "Point 0"
    assert len(beside.coordinator.calls) == 1


def test_items_of_unknown_number_are_read_little_by_little(
    beside: CoordinatorThread,
) -> None:
    beside.functions(double=lambda x: 2 * x)
    numbers = itertools.count()

    with beside.pool(durable=False) as pool:
        doubled = pool.map("double", numbers)
        first = next(numbers)
        for _ in range(10):
            next(doubled)
        later = next(numbers)
        doubled.close()

    assert first == AHEAD_FIRST
    assert later <= first + 21


@pytest.mark.parametrize("ordered", [True, False])
def test_buffersize_limits_the_calls_whose_results_are_not_taken(
    beside: CoordinatorThread, *, ordered: bool
) -> None:
    beside.functions(double=lambda x: 2 * x)
    numbers = iter(range(100))

    with beside.pool(durable=False) as pool:
        doubled = pool.map("double", numbers, buffersize=3, ordered=ordered)
        assert next(numbers) == 3
        next(doubled)
        next(doubled)
        assert next(numbers) == 5
        assert len([*doubled]) == 96


@pytest.mark.parametrize(
    ("buffersize", "error"), [(0, ValueError), (-1, ValueError), ("3", TypeError)]
)
def test_unusable_buffersize_is_refused(
    beside: CoordinatorThread, buffersize: Any, error: type[Exception]
) -> None:
    with beside.pool() as pool, pytest.raises(error, match="buffersize must be"):
        pool.map("double", [1], buffersize=buffersize)


def test_argument_beyond_the_limit_is_refused_before_its_upload(
    beside: CoordinatorThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "BLOB_MAX", 1 << 20)
    large = np.zeros(1 << 20)

    with beside.pool() as pool:
        with pytest.raises(TooLarge, match=r"^args\[1\]\.data has 8388608 bytes, more"):
            pool.submit("some", 1, {"data": large})
        with pytest.raises(TooLarge, match=r"^kwargs\.text has 2097152 bytes, more"):
            pool.submit("some", text=bytes(2 << 20))
    assert not beside.coordinator.put
