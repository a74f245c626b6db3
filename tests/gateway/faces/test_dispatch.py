"""Dispatch's HTTP API against exchanges recorded with the original coordinator.

Every difference from the recordings is in a table here, with its reason.
"""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.keys import make_key, request
from gateway.providers import COMMIT, call, committed, provider, shown
from gateway.replay_jobs import Replay, matches
from gateway.serving import Pool, serving
from protocols.dispatch.recorded import CASES, Case, of_kind
from shoal.protocols.dispatch import Config

pytestmark = pytest.mark.shared_pool


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference from the recording: the status, and the fields.

    ``heard`` has the fields that the worker receives instead, if any.
    """

    reason: str
    status: int = 0  # as recorded
    body: Mapping[str, Any] = field(default_factory=dict)
    heard: Mapping[str, Any] | None = None


NO_PAGE = Difference("errors are JSON", 404)
NOT_ADMITTED = Difference("a bad register is refused", heard={"status": "error"})
POLICY = Difference("an unknown policy is an error", 400)
NO_DEMO = Difference("there is no demonstration that anybody may start", 404)
NO_DASHBOARD = Difference("the dashboard is none of this interface's", 404)
NO_PARTNERS = Difference("nobody was paired", 0, {"providers": []})
BAD_KEY = Difference("a key that is none cannot be paired", 400)
ASSIGNED = {"status": "assigned", "result": None, "completed_at": None}
PENDING = {"status": "pending", "result": None, "receipt": None, "completed_at": None}

DIFFERENCES: dict[str, dict[int, Difference]] = {
    "poison-worker-no-capabilities": {
        1: NOT_ADMITTED,
        2: Difference("nobody else suffers from it", 201),
        3: Difference("and it is no worker", 0, {"workers_online": 0}),
    },
    "ws-double-register": {
        3: Difference("one connection is one worker", 0, {"workers_online": 1}),
        5: Difference("and leaves no ghost", 0, {"workers_online": 0}),
    },
    "ghost-worker-job": {5: Difference("there is no ghost to take it", 0, PENDING)},
    "life-output-swapped": {
        4: Difference("the output is not what was signed", 0, {"verified": False})
    },
    "life-forged-completion": {
        5: Difference("only who has a job can complete it", 0, ASSIGNED)
    },
    "life-forged-reject": {
        5: Difference("only who has a job can reject it", 0, ASSIGNED)
    },
    "life-disconnect": {4: Difference("another worker may do it", 0, PENDING)},
    "life-busy-second-job": {
        6: Difference("jobs that wait have no timers", 0, {"status": "assigned"})
    },
    "life-receipt-squat": {
        6: Difference("only the job's worker can sign for it", 0, {"receipt": None})
    },
    "life-complete-no-output": {
        4: Difference("nothing is no answer", 0, PENDING),
    },
    "life-private": {
        0: Difference(
            "the SDK shows this field alone",
            body={
                "error": "no_trusted_worker: only paired workers may run a private "
                "job, and no worker is paired with the user"
            },
        ),
        8: Difference("a trusted worker that is busy will be free", 201),
    },
    "life-private-lowercase": {2: Difference("it is no privacy class", 400)},
    "life-impersonated-trust": {
        4: Difference("to name a key is no proof of it", 422),
    },
    "rest-quote-bad": {3: POLICY, 4: POLICY, 5: POLICY, 6: NO_PAGE},
    "rest-commit-bad": {7: NO_PAGE, 8: NO_PAGE},
    "rest-commit-malformed": {
        0: Difference("errors are JSON", 400),
        1: Difference("errors are JSON", 400),
        2: Difference("a job may have 16 MiB", 201),
        3: Difference("it is no fault of the coordinator's", 400),
    },
    "rest-jobs-404": {
        1: NO_PAGE,
        2: Difference("receipts have a path, for which there are keys", 401),
        3: NO_PAGE,
        4: NO_PAGE,
    },
    "rest-trust": {4: BAD_KEY, 5: BAD_KEY, 7: NO_PARTNERS},
    "rest-demo": dict.fromkeys(range(5), NO_DEMO),
    "rest-dashboard": {0: NO_DASHBOARD},
    "rest-dashboard-injection": {
        1: NOT_ADMITTED,
        2: Difference("so there is nobody to do it", 201),
        3: NO_DASHBOARD,
    },
}
METHODS = 405  # for a path that exists for another method only

HTTP_CASES = [
    case
    for case in CASES.values()
    if case["kind"] == "live" and any("http" in step for step in case["transcript"])
]
BELIEVED = {"life-private"}  # cases whose workers need not prove their keys


@pytest_asyncio.fixture(loop_scope="module")
async def open_pool(tmp_path: Path) -> AsyncIterator[Pool]:
    wires = {"dispatch": Config(open=True)}
    async with serving(tmp_path, wires=wires) as running:
        yield running


@pytest.mark.parametrize("case", HTTP_CASES, ids=lambda case: case["id"])
async def test_exchanges_match_the_recordings(tmp_path: Path, case: Case) -> None:
    config = Config(open=True, trust_unproven=case["id"] in BELIEVED)
    differences = DIFFERENCES.get(case["id"], {})
    async with (
        serving(tmp_path, wires={"dispatch": config}) as pool,
        AsyncExitStack() as stack,
    ):
        replay = Replay(pool, stack)
        for number, step in enumerate(case["transcript"]):
            difference = differences.get(number)
            if difference is None:
                await replay.play(step)
            else:
                await replay.play({**step, "received": {}})
                _check_heard(replay, step, difference)
            if "http" in step:
                _check_answer(replay, difference or Difference(""))


def _check_heard(replay: Replay, step: Mapping[str, Any], other: Difference) -> None:
    if other.heard is not None:
        heard = json.loads(replay.providers[step["conn"]].texts[-1])
        assert heard == heard | other.heard


def _check_answer(replay: Replay, other: Difference) -> None:
    exchange = replay.exchanges[-1]
    ours = json.loads(exchange.our_body)
    status = other.status or exchange.status
    assert exchange.our_status in (status, METHODS if status == 404 else status)
    if exchange.our_status >= 400 and other.status:
        assert ours["error"]  # the original's text is not reproduced
        return
    if other.status:
        return
    expected = json.loads(exchange.body)
    if other.body.keys() == {"verified"}:
        expected["receipt"] |= other.body
    else:
        expected |= other.body
    assert matches(expected, ours), exchange


def test_every_difference_names_a_recorded_step() -> None:
    recorded = {case["id"]: case["transcript"] for case in HTTP_CASES}

    assert all(
        number < len(recorded[name])
        for name, numbers in DIFFERENCES.items()
        for number in numbers
    )


@of_kind("price")
async def test_prices_match_the_recordings(open_pool: Pool, case: Case) -> None:
    path = f"/v1/quote?job_type={case['job_type']}&policy={case['policy']}"

    status, quote = await call(open_pool, "GET", path)

    assert status == 200
    assert (quote["price"], quote["policy_resolved"]) == (
        case["price"],
        case["resolved"],
    )
    assert quote["endpoint"] == f"/v1/jobs/commit/{case['resolved'].lower()}"


@of_kind("price")
async def test_job_costs_its_quote(open_pool: Pool, case: Case) -> None:
    fields = {"job_type": case["job_type"], "payload": {"prompt": "hi"}}

    job_id = await committed(open_pool, case["resolved"].lower(), **fields)

    job = await shown(open_pool, job_id)
    assert (job["price"], job["policy"]) == (case["price"], case["resolved"])


async def test_anonymous_clients_are_told_how_to_authenticate(pool: Pool) -> None:
    for method, path in (
        ("GET", "/v1/quote?job_type=TASK"),
        ("POST", "/v1/jobs/commit/fast"),
        ("GET", "/v1/jobs"),
        ("GET", "/v1/jobs/x"),
        ("DELETE", "/v1/jobs/x"),
        ("GET", "/v1/jobs/x/events"),
        ("POST", "/v1/trust/create"),
        ("GET", "/v1/trust/list?user_id=u1"),
    ):
        status, answer = await call(pool, method, path, COMMIT)

        assert status == 401, path
        assert answer.keys() == {"error"}
        assert "--dispatch-open" in answer["error"]


async def test_health_is_public(pool: Pool) -> None:
    status, answer = await call(pool, "GET", "/v1/health")

    assert status == 200
    assert list(answer) == ["status", "workers_online", "network", "timestamp"]
    assert (answer["status"], answer["workers_online"]) == ("ok", 0)


async def test_wrong_key_is_not_anonymous(open_pool: Pool) -> None:
    headers = {"Authorization": "Bearer sk-wrong"}

    status, answer = await call(
        open_pool, "POST", "/v1/jobs/commit/fast", {}, **headers
    )

    assert status == 401
    assert "incorrect API key" in answer["error"]


async def test_anonymous_access_is_limited_to_the_open_api(open_pool: Pool) -> None:
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/admin/jobs"),
        ("GET", "/v1/receipts"),
    ):
        assert (await call(open_pool, method, path, {}))[0] == 401


async def test_anonymous_clients_see_anonymous_jobs_only(open_pool: Pool) -> None:
    key = await make_key(open_pool)
    status, answer = await request(
        open_pool, "POST", "/v1/jobs/commit/fast", COMMIT, key=key
    )
    assert status == 201
    theirs = answer["job_id"]
    ours = await committed(open_pool)

    for path in (f"/v1/jobs/{theirs}", f"/v1/jobs/{theirs}/events"):
        assert await call(open_pool, "GET", path) == (404, {"error": "Job not found"})
    assert (await call(open_pool, "DELETE", f"/v1/jobs/{theirs}"))[0] == 404
    assert (await request(open_pool, "GET", f"/v1/jobs/{ours}", key=key))[0] == 404
    _, listed = await call(open_pool, "GET", "/v1/jobs")
    assert [job["id"] for job in listed["jobs"]] == [ours]
    assert open_pool.hub.pool.jobs.keys() == {ours, theirs}


async def test_anonymous_owner_name_is_reserved(open_pool: Pool) -> None:
    status, answer = await request(open_pool, "POST", "/admin/keys", {"name": "open"})

    assert status == 400
    assert "open" in answer["error"]["message"]


async def test_keys_work_beside_anonymous_access(open_pool: Pool) -> None:
    async with provider(open_pool) as worker:
        _, answer = await request(open_pool, "POST", "/v1/jobs/commit/cheap", COMMIT)
        job = await worker.job()
        await worker.complete(job["job_id"], {"ok": 1})

        status, job = await request(
            open_pool, "GET", f"/v1/jobs/{answer['job_id']}?wait=60"
        )

    assert (status, job["status"], job["result"]) == (200, "completed", {"ok": 1})
