"""Calls that tasks make themselves."""

from collections.abc import Callable, Iterator
from threading import Timer

import pytest

import shoal
from client.coordinator_thread import CoordinatorThread
from shoal.client import ambient_pool
from shoal.domain.errors import ConfigError
from shoal.tasks.running_call import set_lending_handler


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Make this process one that runs tasks; return what it reports of its slot."""
    reports: list[bool] = []
    monkeypatch.setattr(ambient_pool, "_pools", {})
    set_lending_handler(reports.append)
    yield reports
    set_lending_handler(None)


@pytest.fixture
def ambient(
    reports: list[bool], beside: CoordinatorThread, monkeypatch: pytest.MonkeyPatch
) -> Iterator[shoal.Pool]:
    monkeypatch.setenv("SHOAL_URL", beside.coordinator.url)
    monkeypatch.setenv("SHOAL_API_KEY", "sk-test")
    beside.functions(double=lambda x: 2 * x)
    pool = shoal.current_pool()
    yield pool
    pool.shutdown()


def test_outside_of_tasks_there_is_none() -> None:
    with pytest.raises(RuntimeError, match=r"elsewhere use shoal\.Pool"):
        shoal.current_pool()


def test_all_tasks_of_a_process_share_one(
    ambient: shoal.Pool, beside: CoordinatorThread
) -> None:
    assert shoal.current_pool() is ambient
    assert ambient.submit("double", 4).result() == 8
    options = beside.coordinator.calls[0][5]
    assert (options["kept"], options["priority"]) == (False, "high")


def test_worker_without_a_key_says_what_to_do(
    reports: list[bool], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("SHOAL_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("SHOAL_API_KEY", raising=False)

    with pytest.raises(ConfigError, match="worker with SHOAL_URL and SHOAL_API"):
        shoal.current_pool()


@pytest.mark.parametrize("how", ["result", "exception", "map", "unordered", "done"])
def test_waiting_for_results_lends_the_slot(
    ambient: shoal.Pool, beside: CoordinatorThread, reports: list[bool], how: str
) -> None:
    beside.coordinator.paused = True
    waits: dict[str, Callable[[], object]] = {
        "result": lambda: ambient.submit("double", 1).result(),
        "exception": lambda: ambient.submit("double", 1).exception(),
        "map": lambda: [*ambient.map("double", [1])],
        "unordered": lambda: [*ambient.map("double", [1], ordered=False)],
        "done": lambda: [*ambient.as_completed([ambient.submit("double", 1)])],
    }
    resume = Timer(0.2, lambda: beside.run(beside.coordinator.resume()))
    resume.start()

    waits[how]()

    resume.join()
    assert reports == [True, False]


def test_wait_that_times_out_ends_the_loan(
    ambient: shoal.Pool, beside: CoordinatorThread, reports: list[bool]
) -> None:
    beside.coordinator.paused = True
    call = ambient.submit("double", 1)

    with pytest.raises(TimeoutError):
        call.result(0.1)
    assert reports == [True, False]
    call.cancel()


def test_results_that_are_there_lend_nothing(
    ambient: shoal.Pool, reports: list[bool]
) -> None:
    call = ambient.submit("double", 1)
    while not call.done():
        pass

    assert call.result() == 2
    assert reports == []
