"""The promises of ``docs/promises.md`` on workers, with real processes killed.

A sample of the cases; ``pytest tests/live/test_promises.py --every`` runs all of them.
"""

import json
import threading
from collections.abc import Iterator
from urllib.error import HTTPError

import pytest

from live.programs import GatedModel, Pool, Program, Programs, eventually

QUESTION = "Count."
PIECES = [f"{number} " for number in range(200)]
TEXT = "".join(PIECES)
MIDDLE = 99
SAMPLE = (0, 1, 2, MIDDLE, 198, 199, 200)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "at" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every")
        cases = range(len(PIECES) + 1) if every else SAMPLE
        # One case is enough for `make test`; tests/gateway has the other promise.
        is_short = metafunc.function is test_killed_worker_leaves_no_trace_in_the_answer
        short = pytest.param(MIDDLE, marks=pytest.mark.short if is_short else ())
        metafunc.parametrize("at", [short if at == MIDDLE else at for at in cases])


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A coordinator for all cases; each brings its own workers."""
    programs = Programs(tmp_path_factory.mktemp("promises"))
    yield programs.serve("--queue-wait", "2")
    programs.close()


@pytest.fixture
def model(at: int) -> Iterator[GatedModel]:
    """A model that pauses after ``at`` pieces."""
    model = GatedModel(at, {QUESTION: PIECES})
    yield model
    model.close()


def test_killed_worker_leaves_no_trace_in_the_answer(
    pool: Pool, model: GatedModel, at: int
) -> None:
    workers = {name: pool.joined(name, *model.flags) for name in ("one", "two")}
    try:
        events = _start_answer(pool, model, workers, at)
    finally:
        _wait_removed(pool, workers)

    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    usage = chunks.pop()["usage"]
    choices = [chunk["choices"][0] for chunk in chunks]
    roles = [c["delta"]["role"] for c in choices if "role" in c["delta"]]
    assert _text(events) == TEXT
    assert roles == ["assistant"]
    reasons = [choice["finish_reason"] for choice in choices]
    assert [reason for reason in reasons if reason] == ["stop"]
    assert usage["completion_tokens"] == len(PIECES)


def test_without_a_survivor_the_stream_ends_with_an_error(
    pool: Pool, model: GatedModel, at: int
) -> None:
    workers = {"one": pool.joined("one", *model.flags)}
    try:
        events = _start_answer(pool, model, workers, at)
    finally:
        _wait_removed(pool, workers)

    assert "[DONE]" not in events
    assert json.loads(events[-1])["error"]["code"] == "no_worker"


def _start_answer(
    pool: Pool, model: GatedModel, workers: dict[str, Program], at: int
) -> list[str]:
    """Send a chat, kill its worker after ``at`` pieces, and read to the end."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": QUESTION}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }
    events: list[str] = []

    def ask() -> None:
        try:
            with pool.posting("/v1/chat/completions", body) as lines:
                for line in lines:
                    if line.startswith("data: "):
                        events.append(line.removeprefix("data: "))
        except HTTPError as refusal:  # nothing had come that would have to be ended
            events.append(refusal.read().decode())
            refusal.close()

    thread = threading.Thread(target=ask)
    thread.start()
    begun = "".join(PIECES[:at])
    eventually(lambda: model.requests and _text(events) == begun, f"{at} pieces came")
    _kill_busy(pool, workers)
    model.go_on.set()
    thread.join()
    return events


def _text(events: list[str]) -> str:
    """Return the text in the chunks among the events."""
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def _kill_busy(pool: Pool, workers: dict[str, Program]) -> None:
    """Kill the worker that has the job, as ``kill -9`` does."""
    (busy,) = [each["id"] for each in pool.workers() if each["busy"]]
    (victim,) = [each for name, each in workers.items() if f":{name}/" in busy]
    victim.kill()


def _wait_removed(pool: Pool, workers: dict[str, Program]) -> None:
    for worker in workers.values():
        worker.close()
    eventually(lambda: not pool.workers(), "all workers have gone")
