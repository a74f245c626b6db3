"""Workers that listen: coordinators connect to them over Shoal's own protocol."""

import os

import pytest

import shoal
from harness.ports import free_port
from harness.slow_imports import openai
from live.programs import (
    KEY,
    PATIENCE,
    TESTS,
    TINY,
    TOKEN,
    Program,
    Programs,
    answer_to,
    eventually,
    text_in,
)
from models.tiny_answers import ANSWERS
from tasks.demo_tasks import add


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)


def listen(
    programs: Programs, *flags: str, token: str = TOKEN, port: int = 0
) -> tuple[Program, int]:
    """Start a worker that listens; return its port, too."""
    where = ("--listen-host", "127.0.0.1", "--listen-port", str(port))
    worker = programs.run(
        *("join", "--listen", *where, "--json", "--name", "gpu", "--token", token),
        *flags,
    )
    return worker, worker.event("listening")["ports"]["http"]


def wait_listed(client: "openai.OpenAI") -> None:
    """Wait until the worker has offered its model."""
    eventually(lambda: "tiny" in {each.id for each in client.models.list()}, "listed")


@pytest.mark.short
def test_coordinator_connects_to_a_worker_with_models_and_functions(
    programs: Programs,
) -> None:
    functions = ("--trust-code", "--tasks", "tasks.demo_tasks")
    model = ("--model", f"tiny={TINY}")
    worker, port = listen(programs, *model, *functions)
    address = f"http://127.0.0.1:{port}"
    question, answer = next(iter(ANSWERS.items()))

    coordinator = programs.serve("--shoal-workers", address)
    worker.event("joined")

    with coordinator.client() as client:
        wait_listed(client)
        with answer_to(client, question) as chunks:
            assert "".join(text_in(chunks)) == "".join(answer)
        path = f"{coordinator.url}/v1/receipts"
        eventually(
            lambda: len(client.get(path, cast_to=dict)["data"]) == 1, "a receipt"
        )
    with shoal.Pool(coordinator.url, KEY) as pool:
        assert pool.submit(add, 1, 2).result(PATIENCE) == 3
        assert pool.submit(lambda: 6 * 7).result(PATIENCE) == 42
    assert {each["id"].partition("/")[0] for each in coordinator.workers()} == {
        "shoal:gpu"
    }
    assert worker.terminate() == 0


def test_both_ends_come_back(programs: Programs) -> None:
    model = ("--model", f"tiny={TINY}")
    port = free_port()
    worker, _ = listen(programs, *model, port=port)
    flags = ("--shoal-workers", f"127.0.0.1:{port}")
    coordinator = programs.serve(*flags)
    worker.event("joined")

    coordinator.program.kill()
    worker.event("lost")
    coordinator = programs.serve(*flags)
    worker.event("joined")
    worker.kill()
    worker, _ = listen(programs, *model, port=port)
    worker.event("joined")

    question, answer = next(iter(ANSWERS.items()))
    with coordinator.client() as client:
        wait_listed(client)
        with answer_to(client, question) as chunks:
            assert "".join(text_in(chunks)) == "".join(answer)


def test_a_worker_with_another_token_is_not_used(programs: Programs) -> None:
    worker, port = listen(programs, "--model", f"tiny={TINY}", token=TOKEN[::-1])

    coordinator = programs.serve(
        *("--shoal-workers", f"127.0.0.1:{port}", "--log-level", "info")
    )

    eventually(lambda: "Invalid token" in coordinator.program.errors, "refused")
    assert coordinator.workers() == []
    assert worker.process.poll() is None
