"""Jobs over HTTP with real processes, killed at the worst of times."""

import json
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from live.programs import PATIENCE, GatedModel, Pool, Programs, eventually
from models.tiny_answers import ANSWERS

STORY = "Tell me a story."
COMMIT = {
    "job_type": "LLM_INFER",
    "user_id": "ada",
    "payload": {"job_type": "LLM_INFER", "prompt": STORY, "max_tokens": 64},
}


def ask(
    pool: Pool, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    """Send a request without a key; return the status and the JSON of the answer."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    data = None if body is None else json.dumps(body).encode()
    request = Request(
        pool.url + path, data, {"Content-Type": "application/json"} | sent
    )
    request.method = method
    try:
        with urlopen(request, timeout=PATIENCE) as response:
            return response.status, json.load(response)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.parametrize(
    "also_worker", [pytest.param(False, marks=pytest.mark.short), True]
)
def test_committed_job_survives_a_killed_coordinator(
    programs: Programs, slow_model: GatedModel, also_worker: bool
) -> None:
    pool = programs.serve("--dispatch-open")
    once = {"Idempotency_Key": "once"}
    status, answer = ask(pool, "POST", "/v1/jobs/commit/fast", COMMIT, **once)
    assert status == 201
    path = f"/v1/jobs/{answer['job_id']}"
    assert ask(pool, "GET", path)[1]["status"] == "pending"

    pool.program.kill()
    pool = programs.serve("--dispatch-open", port=pool.port)
    assert ask(pool, "POST", "/v1/jobs/commit/fast", COMMIT, **once) == (201, answer)

    if also_worker:
        first = pool.joined("one", *slow_model.flags)
        eventually(lambda: slow_model.requests == 1, "the model is asked")
        assert ask(pool, "GET", path)[1]["status"] == "assigned"
        first.kill()
    slow_model.go_on.set()
    pool.joined("two", *slow_model.flags)

    eventually(
        lambda: ask(pool, "GET", f"{path}?wait=10")[1]["status"] == "completed",
        "it ends",
    )
    status, job = ask(pool, "GET", path)
    assert (status, job["status"]) == (200, "completed")
    assert job["attempts"] == 1 + also_worker
    assert job["result"] == {"model": "tiny", "text": "".join(ANSWERS[STORY])}
    assert job["user_id"] == "ada"


def test_events_are_streamed_by_a_real_coordinator(
    programs: Programs, slow_model: GatedModel
) -> None:
    pool = programs.serve("--dispatch-open")
    slow_model.go_on.set()
    pool.joined("one", *slow_model.flags)
    _, answer = ask(pool, "POST", "/v1/jobs/commit/fast", COMMIT)

    url = f"{pool.url}/v1/jobs/{answer['job_id']}/events"
    with urlopen(url, timeout=PATIENCE) as response:
        lines = [line.decode().rstrip("\n") for line in response]

    names = [line.removeprefix("event: ") for line in lines if "event: " in line]
    assert names[0] == "queued"
    assert names[-1] == "completed"


def test_key_is_required_without_the_flag(programs: Programs) -> None:
    pool = programs.serve()

    status, answer = ask(pool, "POST", "/v1/jobs/commit/fast", COMMIT)

    assert status == 401
    assert "shoal serve --dispatch-open" in answer["error"]
