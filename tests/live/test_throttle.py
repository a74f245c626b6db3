"""``shoal throttle`` and ``shoal join --throttle``, with real processes."""

import os

import pytest

import shoal
from live.programs import (
    KEY,
    PATIENCE,
    TESTS,
    TINY,
    GatedModel,
    Pool,
    Program,
    Programs,
    answer_to,
    eventually,
    text_in,
)
from models.tiny_answers import ANSWERS
from tasks.demo_tasks import add

STORY = "Tell me a story."
MODEL = ("--model", f"tiny={TINY}")
TASKS = ("--tasks", "tasks.demo_tasks")


@pytest.fixture
def pool(programs: Programs) -> Pool:
    ports = ("--macfleet-heartbeat-port", "0", "--macfleet-transport-port", "0")
    model = ("--dispatch-model", "tiny")
    let_in = ("--join-token", "join-me-please", "--tealenet-open", "--relay-open")
    return programs.serve(*let_in, *ports, *model)


def join(pool: Pool, *flags: str) -> Program:
    worker = pool.join("one", *flags, token="join-me-please")
    worker.event("joined")
    return worker


def set_throttle(programs: Programs, percent: int) -> None:
    assert programs.run("throttle", str(percent)).wait() == 0


def lends(pool: Pool) -> bool:
    """Say whether a worker may get jobs."""
    workers = pool.workers()
    return any(not each["unfit"] and not each["draining"] for each in workers)


def shows(pool: Pool, **fields: object) -> bool:
    """Say what the coordinator knows of the worker, whose messages have parts of it."""
    return any(fields.items() <= each.items() for each in pool.workers())


def tell_story(pool: Pool) -> str:
    with pool.client() as client, answer_to(client, STORY) as stream:
        return "".join(text_in(stream))


@pytest.mark.parametrize("wire", ["shoal", "tealenet", "grandsage", "dispatch"])
def test_a_worker_pauses_and_resumes_without_a_restart(
    programs: Programs, pool: Pool, wire: str
) -> None:
    worker = join(pool, "--wire", wire, *MODEL)

    set_throttle(programs, 0)
    assert worker.event("paused")["throttle"] == 0
    eventually(lambda: not lends(pool), "the worker gets no jobs")

    set_throttle(programs, 100)
    assert worker.event("resumed")["throttle"] == 100
    eventually(lambda: lends(pool), "the worker gets jobs")
    assert tell_story(pool) == ANSWERS[STORY]


def test_a_paused_worker_finishes_its_answer(
    programs: Programs, pool: Pool, slow_model: GatedModel
) -> None:
    worker = join(pool, *slow_model.flags)
    with pool.client() as client, answer_to(client, STORY) as stream:
        pieces = text_in(stream)
        first = next(pieces)

        set_throttle(programs, 0)
        worker.event("paused")
        eventually(lambda: not lends(pool), "the worker gets no jobs")
        slow_model.go_on.set()

        assert first + "".join(pieces) == ANSWERS[STORY]
    eventually(
        lambda: shows(pool, unfit="paused by its owner", throttle=0),
        "the coordinator knows why",
    )


def test_functions_pause_and_resume(
    programs: Programs, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    worker = join(pool, *TASKS, "--slots", "4")
    with shoal.Pool(pool.url, KEY) as client:
        assert client.submit(add, 1, 2).result(PATIENCE) == 3
        set_throttle(programs, 0)
        worker.event("paused")
        eventually(lambda: not lends(pool), "the worker gets no calls")
        waiting = client.submit(add, 20, 22)

        set_throttle(programs, 50)
        worker.event("throttled")

        assert waiting.result(PATIENCE) == 42
    eventually(lambda: shows(pool, slots=2, throttle=50), "half of the slots are lent")


def test_a_start_with_a_share_counts_until_it_is_changed(
    programs: Programs, pool: Pool
) -> None:
    set_throttle(programs, 100)

    worker = join(pool, "--throttle", "25", "--slots", "4", *MODEL)

    eventually(
        lambda: shows(pool, throttle=25, slots=1, speed=0.25), "it lends a quarter"
    )
    set_throttle(programs, 75)
    worker.event("throttled")
    eventually(lambda: shows(pool, slots=3), "it lends three quarters")


def test_the_last_share_holds_after_a_restart(programs: Programs, pool: Pool) -> None:
    set_throttle(programs, 0)

    worker = pool.join("one", *MODEL, token="join-me-please")
    worker.event("paused")
    worker.event("joined")

    eventually(lambda: bool(pool.workers()), "the worker is connected")
    eventually(lambda: not lends(pool), "the worker gets no jobs")


def test_an_impossible_share_is_an_error(programs: Programs) -> None:
    worker = programs.run("join", "http://127.0.0.1:1", "--throttle", "101")

    assert worker.wait() == 1
    assert "throttle 101: expected 0 to 100 percent" in worker.errors
