"""Workers, programs and commands that know two coordinators, one of which is killed.

Each has a database of its own here, and both have the same token and key.
"""

import os
from pathlib import Path

import pytest

import shoal
from live.programs import KEY, TESTS, TOKEN, GatedModel, Program, Programs, eventually
from shoal.client.coordinator import CoordinatorApi
from tasks.demo_tasks import add


def joined(programs: Programs, urls: str, *flags: str) -> Program:
    worker = programs.run(
        "join", urls, "--json", "--name", "w", "--token", TOKEN, *flags
    )
    worker.event("joined")
    return worker


def test_everybody_goes_to_the_coordinator_that_is_left(
    programs: Programs,
    tmp_path: Path,
    slow_model: GatedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    first = programs.serve("--no-discovery")
    second = programs.serve("--no-discovery", "--data-dir", str(tmp_path / "second"))
    urls = f"{first.url},{second.url}"
    worker = joined(programs, urls, *slow_model.flags, "--tasks", "tasks.demo_tasks")
    api = CoordinatorApi(urls, KEY, tmp_path)
    assert api.base_url == first.url

    with shoal.Pool(urls, KEY, durable=False) as pool:
        assert list(pool.map(add, [1, 2], [3, 4])) == [4, 6]
        first.program.kill()
        lost = worker.event("lost")
        assert second.url.removeprefix("http://") in str(lost["reason"])
        worker.event("joined")

        assert list(pool.map(add, [5, 6], [7, 8])) == [12, 14]
    assert [each["id"] for each in api.request("/v1/models")["data"]] == ["tiny"]
    assert api.base_url == second.url
    # Also a request that begins with the one that is gone.
    assert api.at_once.request("/v1/models")["data"]
    slow_model.go_on.set()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "ping"}]}
    fresh = CoordinatorApi(urls, KEY, tmp_path)
    stream = fresh.stream_events("/v1/chat/completions", {**body, "stream": True})
    with stream as (_, events):
        assert any(each["choices"] for each in events)
    eventually(lambda: second.workers(), "the worker is there")
