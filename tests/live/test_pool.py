"""``shoal.Pool`` with real coordinators and workers that are killed."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import numpy as np
import pytest

import shoal
from live.programs import KEY, PATIENCE, TESTS, Pool, Programs, eventually
from tasks.demo_tasks import add

LONG = "join-me-please"
FLAGS = ("--join-token", LONG)
FLEET = ("--macfleet-heartbeat-port", "0", "--macfleet-transport-port", "0")
CODE = ("--trust-code", "--tasks", "tasks.demo_tasks")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)


@pytest.fixture
def coordinator(programs: Programs) -> Pool:
    return programs.serve(*FLAGS, *FLEET)


@pytest.fixture(params=[True, False], ids=["durable", "in memory"])
def pool(request: pytest.FixtureRequest, coordinator: Pool) -> Iterator[shoal.Pool]:
    with shoal.Pool(coordinator.url, KEY, durable=request.param) as pool:
        yield pool


def slowly(value: int, seconds: float) -> int:
    time.sleep(seconds)
    return value


def test_thousands_of_calls_are_spread_over_workers(
    coordinator: Pool, pool: shoal.Pool
) -> None:
    for name in ("one", "two"):
        coordinator.join(name, *CODE, "--slots", "1", token=LONG).event("joined")

    sums = pool.map(add, range(3000), range(3000), timeout=2 * PATIENCE)

    assert list(sums) == [*range(0, 6000, 2)]


def test_values_round_trip(coordinator: Pool, pool: shoal.Pool) -> None:
    coordinator.join("one", *CODE, "--slots", "1", token=LONG).event("joined")
    array = np.arange(300_000, dtype=np.float32).reshape(3, -1)
    values = [array, array[:, :2], {1: "x"}, 1j, {1, 2}, 10**30, b"", None]

    got = pool.submit(lambda *values: list(values), *values).result(PATIENCE)

    np.testing.assert_array_equal(got[0], array)
    np.testing.assert_array_equal(got[1], array[:, :2])
    assert got[2:] == values[2:]
    ref = pool.put(array)
    totals = pool.map(lambda a, b: float((a + b).sum()), [ref] * 3, range(3))
    assert list(totals) == [float((array + x).sum()) for x in range(3)]


def test_cancellation_frees_the_worker(
    coordinator: Pool, pool: shoal.Pool, tmp_path: Path
) -> None:
    coordinator.join("one", *CODE, "--slots", "1", token=LONG).event("joined")
    begun = tmp_path / "begun"

    def endless_work() -> None:
        begun.touch()
        time.sleep(3600)

    endless = pool.submit(endless_work)
    eventually(begun.exists, "it runs")

    assert endless.cancel()

    assert pool.submit(add, 2).result(PATIENCE) == 2


def test_calls_of_a_killed_worker_are_requeued(
    coordinator: Pool, pool: shoal.Pool
) -> None:
    flags = (*CODE, "--slots", "1")
    doomed = coordinator.join("doomed", *flags, token=LONG)
    doomed.event("joined")
    calls = [pool.submit(slowly, x, 0.05) for x in range(20)]
    calls[0].result(PATIENCE)

    coordinator.join("heir", *flags, token=LONG).event("joined")
    doomed.kill()

    assert [call.result(PATIENCE) for call in calls] == [*range(20)]


def test_durable_calls_survive_the_coordinator(programs: Programs) -> None:
    coordinator = programs.serve(*FLAGS, *FLEET)
    ports = coordinator.ready["ports"]
    same = (
        *FLAGS,
        *("--macfleet-heartbeat-port", str(ports["macfleet_heartbeat"])),
        *("--macfleet-transport-port", str(ports["macfleet_transport"])),
    )
    coordinator.join("one", *CODE, "--slots", "1", token=LONG).event("joined")
    with shoal.Pool(coordinator.url, KEY) as pool:
        calls = [pool.submit(slowly, x, 0.1) for x in range(20)]
        calls[0].result(PATIENCE)

        coordinator.program.kill()
        programs.serve(*same, port=coordinator.port)

        assert [call.result(PATIENCE) for call in calls] == [*range(20)]


def test_same_key_runs_nothing_twice(coordinator: Pool) -> None:
    coordinator.join("one", *CODE, "--slots", "1", token=LONG).event("joined")
    draws = []

    for _ in range(2):
        with shoal.Pool(coordinator.url, KEY) as pool:
            named = pool.with_options(key="tonight")
            draws.append(named.submit(lambda: os.urandom(8)).result(PATIENCE))

    assert draws[0] == draws[1]


def test_progress_is_reported_during_a_call(coordinator: Pool) -> None:
    coordinator.join("one", *CODE, "--slots", "1", token=LONG).event("joined")
    reports: list[tuple[float | None, str]] = []
    halfway = threading.Event()

    def note(share: float | None, remark: str) -> None:
        reports.append((share, remark))
        halfway.set()

    def work() -> str:
        shoal.progress(0.5, "half")
        return "done"

    with shoal.Pool(coordinator.url, KEY) as pool:
        call = pool.with_options(on_progress=note).submit(work)

        assert halfway.wait(PATIENCE)
        assert call.result(PATIENCE) == "done"

    assert reports[0] == (0.5, "half")


def test_exited_program_frees_the_worker(coordinator: Pool) -> None:
    coordinator.join("one", *CODE, "--slots", "1", token=LONG).event("joined")
    with shoal.Pool(coordinator.url, KEY, durable=False) as leaving:
        endless = leaving.submit(lambda: time.sleep(3600))
        with pytest.raises(futures.TimeoutError):
            endless.result(0.5)
        leaving.shutdown(cancel_futures=True)

    with shoal.Pool(coordinator.url, KEY) as pool:
        assert pool.submit(add, 1).result(PATIENCE) == 1
    eventually(lambda: coordinator.workers()[0]["busy"] == 0, "its slot is free")
