"""Jobs over HTTP: results, failures, waiting, cancellation and lists."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.keys import CHAT, make_key, request
from gateway.providers import COMMIT, TASK, call, committed, provider, shown, to_json
from gateway.serving import KEY, Pool, eventually, serving
from gateway.shoal_worker import ONE_TASK, shoal_worker
from protocols.dispatch.recorded import SIGNERS
from shoal.domain.ids import JobId
from shoal.domain.job import Privacy, TimeLimits
from shoal.domain.moderation import Moderation
from shoal.gateway.jobs.endpoints import LISTED_MAX, WAIT_MAX
from shoal.gateway.jobs.webhooks import EgressPolicy
from shoal.pool.inputs import WorkerPaired
from shoal.pool.react import WORKERS_LOST_MAX
from shoal.protocols.dispatch import Config

pytestmark = pytest.mark.shared_pool

WIRES = {"dispatch": Config(open=True)}
HOOK = {"url": "https://example.org/hook", "secret": "0123456789abcdef"}


@pytest.fixture(scope="module")
def pool_options() -> dict[str, Any]:
    return {"wires": WIRES}


async def commit(pool: Pool, key: str = KEY, **fields: Any) -> tuple[int, Any]:
    """Commit a job under a key."""
    return await request(pool, "POST", "/v1/jobs/commit/cheap", COMMIT | fields, key)


# Results.


async def test_result_is_the_workers(pool: Pool) -> None:
    output = {"b": [1.5, None], "a": "日 \u2028", "1": {}}
    async with provider(pool) as worker:
        job_id = await committed(pool)
        await worker.complete((await worker.job())["job_id"], output)

        async with pool.session.get(f"{pool.url}/v1/jobs/{job_id}") as response:
            text = await response.text()

    assert json.loads(text)["status"] == "completed"
    # It was hashed and signed as it was sent; JavaScript puts numeric keys first.
    assert f'"result":{to_json(output)},' in text


async def test_job_shows_its_owner_and_receipt(
    pool: Pool,
) -> None:
    async with provider(pool) as worker:
        job_id = await committed(pool, user_id="ada", payment_ref="tx1")
        await worker.complete((await worker.job())["job_id"], {"ok": True})
        job = await shown(pool, job_id)

    assert job["user_id"] == "ada"
    assert job["job_type"] == "TASK"
    assert job["privacy_class"] == Privacy.PUBLIC.name
    assert job["attempts"] == 1
    assert job["receipt"]["verdict"] == "valid"
    receipt = json.loads(job["coordinator_receipt"]["body"])
    assert receipt["job_id"] == job_id
    assert receipt["price"] == 1000
    assert receipt["payment_ref"] == "tx1"


async def test_worker_receives_the_payload_unchanged(pool: Pool) -> None:
    payload = '{ "z":1.50, "a" : "\\u00e9", "10":1, "2":[] }'
    body = f'{{"job_type":"TASK","user_id":42,"payload":{payload}}}'
    async with provider(pool) as worker:
        async with pool.session.post(
            f"{pool.url}/v1/jobs/commit/fast",
            data=body,
            headers={"Content-Type": "application/json; charset=utf-8"},
        ) as response:
            assert response.status == 201
        await worker.job()

    assert f'"payload":{payload},"policy":"FAST"' in worker.texts[-1]
    assert worker.jobs[0]["user_id"] == "42"


async def test_ten_megabytes_round_trip(pool: Pool) -> None:
    text = "é," * 4_000_000
    async with provider(pool) as worker:
        job_id = await committed(pool, payload={"task_type": "x", "input": text})
        job = await worker.job()
        assert job["payload"]["input"] == text
        await worker.complete(job["job_id"], {"text": text[: 1 << 20]})

        done = await shown(pool, job_id)

    assert done["result"] == {"text": text[: 1 << 20]}
    assert done["receipt"]["verified"]


async def test_oversized_job_is_rejected(pool: Pool) -> None:
    status, answer = await call(
        pool, "POST", "/v1/jobs/commit/fast", COMMIT | {"payload": "x" * (17 << 20)}
    )

    assert status == 413
    assert "exceeds the limit of 16777216 bytes" in answer["error"]
    assert not pool.hub.pool.jobs


async def test_jobs_of_other_kinds_are_shown(pool: Pool) -> None:
    async with pool.node() as node:
        await pool.wait_joined()
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(
                request(pool, "POST", "/v1/chat/completions", CHAT)
            )
            await node.answer("there")
        job_id = asking.result()[1]["id"]

        status, job = await request(pool, "GET", f"/v1/jobs/{job_id}")

    assert status == 200
    assert job["job_type"] == "LLM_INFER"
    assert job["result"] == {"model": "m1", "text": "there"}
    assert job["receipt"] is None
    assert json.loads(job["coordinator_receipt"]["body"])["verdict"] == "unsigned"


async def test_inference_without_a_model_runs_anywhere(pool: Pool) -> None:
    async with pool.node() as node:
        await pool.wait_joined()
        job_id = await committed(pool, job_type="LLM_INFER", payload={"prompt": "hi"})
        await node.answer("there")

        job = await shown(pool, job_id, wait=WAIT_MAX)

    assert job["result"] == {"model": "m1", "text": "there"}


async def test_unknown_model_is_rejected(pool: Pool) -> None:
    payload = {"prompt": "hi", "model": "nope"}

    status, answer = await call(
        pool,
        "POST",
        "/v1/jobs/commit/fast",
        COMMIT | {"job_type": "LLM_INFER", "payload": payload},
    )

    assert status == 404
    assert "no worker has the model nope" in answer["error"]


# Failures.


async def test_job_without_a_worker_expires_with_the_reason(tmp_path: Path) -> None:
    limits = replace(TimeLimits(), queue=0.05)
    async with serving(tmp_path, limits=limits, wires=WIRES) as pool:
        job = await shown(pool, await committed(pool), wait=WAIT_MAX)

    assert job["status"] == "failed"
    assert job["result"] == {"error": "no_eligible_worker"}
    assert job["completed_at"] is None
    assert "no worker is connected" in job["detail"]


async def test_job_that_loses_its_workers_fails_with_the_reason(pool: Pool) -> None:
    job_id = await committed(pool)
    for _ in range(WORKERS_LOST_MAX):
        async with provider(pool) as worker:
            await worker.job()

    job = await shown(pool, job_id, wait=WAIT_MAX)

    assert job["result"] == {"error": "worker_disconnected"}
    assert job["attempts"] == WORKERS_LOST_MAX


async def test_job_cancelled_by_an_operator_names_it(pool: Pool) -> None:
    job_id = await committed(pool)

    pool.hub.cancel(JobId(job_id), "an operator said so")

    job = await shown(pool, job_id, wait=WAIT_MAX)
    assert job["result"] == {"error": "cancelled"}
    assert job["detail"] == "an operator said so"


# Private jobs.


async def test_private_job_goes_to_a_worker_with_a_proven_key(pool: Pool) -> None:
    key = SIGNERS["A"].public_key.hex()
    await pool.hub.process(WorkerPaired("open", "u1", key))
    async with (
        shoal_worker(pool, ONE_TASK, name="n2", signer=SIGNERS["B"]) as other,
        shoal_worker(pool, ONE_TASK, signer=SIGNERS["A"]) as worker,
    ):
        first = await committed(pool, privacy_class="PRIVATE")
        second = await committed(pool, privacy_class="PRIVATE")
        await worker.job()
        assert (await shown(pool, second))["status"] == "pending"  # because it is busy
        await worker.answer('{"n":1}')
        await worker.answer('{"n":2}', number=1)

        assert (await shown(pool, first, wait=WAIT_MAX))["result"] == {"n": 1}
        assert (await shown(pool, second, wait=WAIT_MAX))["result"] == {"n": 2}
        assert other.jobs == []


async def test_private_job_without_partners_fails_at_once(pool: Pool) -> None:
    key = SIGNERS["A"].public_key.hex()
    await pool.hub.process(WorkerPaired("open", "u1", key))
    async with provider(pool) as impostor:  # names the key without a proof
        status, answer = await call(
            pool, "POST", "/v1/jobs/commit/fast", COMMIT | {"privacy_class": "PRIVATE"}
        )
        job = await shown(pool, answer["job_id"])

    assert status == 422
    assert list(answer) == ["error", "job_id"]
    assert answer["error"].startswith("no_trusted_worker: ")
    assert "has not proved its key" in answer["error"]
    assert "--dispatch-trust-unproven" in answer["error"]
    assert job["result"] == {"error": "no_trusted_worker"}
    assert answer["error"].endswith(job["detail"])
    assert impostor.jobs == []


async def test_partners_are_separate_for_each_user(pool: Pool) -> None:
    await pool.hub.process(WorkerPaired("open", "u1", SIGNERS["A"].public_key.hex()))
    private = {"privacy_class": "PRIVATE"}
    async with shoal_worker(pool, ONE_TASK, signer=SIGNERS["A"]):
        assert (await commit(pool, **private))[0] == 422  # of another key
        path = "/v1/jobs/commit/fast"
        other = COMMIT | private | {"user_id": "u2"}
        assert (await call(pool, "POST", path, other))[0] == 422
        assert (await call(pool, "POST", path, COMMIT | private))[0] == 201


# Idempotency.


async def test_same_idempotency_key_gives_the_same_job(pool: Pool) -> None:
    path, name = "/v1/jobs/commit/fast", {"Idempotency_Key": "once"}
    first = await call(pool, "POST", path, COMMIT, **name)
    again = await call(pool, "POST", path, COMMIT, **name)
    assert first == again
    assert first[0] == 201

    async with provider(pool) as worker:
        await worker.complete((await worker.job())["job_id"], {"ok": 1})
        assert await call(pool, "POST", path, COMMIT, **name) == first
    assert len(worker.jobs) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"payload": {"task_type": "x"}},
        {"user_id": "u2"},
        {"privacy_class": "PRIVATE"},
        {"payment_ref": "tx1"},
    ],
)
async def test_idempotency_key_identifies_one_request(
    pool: Pool, other: dict[str, Any]
) -> None:
    path, name = "/v1/jobs/commit/fast", {"Idempotency_Key": "once"}
    await call(pool, "POST", path, COMMIT, **name)

    status, answer = await call(pool, "POST", path, COMMIT | other, **name)

    assert status == 422
    assert "was used for a different request" in answer["error"]


@pytest.mark.own_pool
async def test_concurrent_commits_of_one_key_are_one_job(pool: Pool) -> None:
    path, name = "/v1/jobs/commit/fast", {"Idempotency_Key": "once"}
    async with asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(call(pool, "POST", path, COMMIT, **name))
            for _ in range(8)
        ]

    assert len({each.result()[1]["job_id"] for each in asked}) == 1
    assert len(pool.hub.pool.jobs) == 1


# Waiting.


async def test_waiting_ends_with_the_job(pool: Pool) -> None:
    job_id = await committed(pool)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(shown(pool, job_id, wait=WAIT_MAX))
        async with provider(pool) as worker:
            await worker.complete((await worker.job())["job_id"], {"ok": 1})
            await waiting

    assert waiting.result()["result"] == {"ok": 1}


async def test_waiting_times_out(pool: Pool) -> None:
    job_id = await committed(pool)

    assert (await shown(pool, job_id, wait=0.01))["status"] == "pending"


async def test_disconnect_while_waiting_does_not_cancel_the_job(pool: Pool) -> None:
    job_id = await committed(pool)
    waiting = asyncio.create_task(shown(pool, job_id, wait=WAIT_MAX))
    answer = pool.hub._answers[JobId(job_id)]
    await eventually(lambda: bool(answer._readings))
    waiting.cancel()
    await eventually(lambda: not answer._readings)

    assert (await shown(pool, job_id))["status"] == "pending"


@pytest.mark.parametrize("wait", ["-1", "61", "x", "nan", "", "1&wait=2"])
async def test_wait_is_limited(pool: Pool, wait: str) -> None:
    status, answer = await call(pool, "GET", f"/v1/jobs/x?wait={wait}")

    assert status == 400
    assert answer["error"].startswith("wait: ")


# Cancelling.


async def test_owner_cancels_a_job(pool: Pool) -> None:
    job_id = await committed(pool)

    status, job = await call(pool, "DELETE", f"/v1/jobs/{job_id}")

    assert (status, job["status"]) == (200, "failed")
    assert job["result"] == {"error": "cancelled"}
    assert job["detail"] == "cancelled by its owner"
    assert not pool.hub.pool.jobs
    status, answer = await call(pool, "DELETE", f"/v1/jobs/{job_id}")
    assert status == 409
    assert "has ended already (failed)" in answer["error"]


async def test_owner_cancels_a_job_by_its_idempotency_key(pool: Pool) -> None:
    name = {"Idempotency_Key": "by its name"}
    _, committed = await call(pool, "POST", "/v1/jobs/commit/fast", COMMIT, **name)

    other = await make_key(pool, "another")
    path, headers = f"{pool.url}/v1/jobs", {"Idempotency-Key": "by its name"}
    async with pool.session.delete(
        path, headers=pool.headers(other) | headers
    ) as answer:
        assert answer.status == 404, "keys of others are not told"
    status, job = await call(pool, "DELETE", "/v1/jobs", **name)

    assert (status, job["id"]) == (200, committed["job_id"])
    assert job["result"] == {"error": "cancelled"}
    assert (await call(pool, "DELETE", "/v1/jobs", **name))[0] == 409
    assert (await call(pool, "DELETE", "/v1/jobs"))[0] == 400


async def test_completed_job_is_not_cancelled(pool: Pool) -> None:
    async with provider(pool) as worker:
        job_id = await committed(pool)
        await worker.complete((await worker.job())["job_id"], {"ok": 1})

        status, answer = await call(pool, "DELETE", f"/v1/jobs/{job_id}")

    assert status == 409
    assert "(completed)" in answer["error"]


async def test_read_scope_may_not_change_jobs(pool: Pool) -> None:
    await make_key(pool, "alice")
    reader = await make_key(pool, "bob", scope="read")

    assert (await commit(pool, reader))[0] == 403
    assert (await request(pool, "DELETE", "/v1/jobs/x", key=reader))[0] == 403
    assert (await request(pool, "GET", "/v1/jobs", key=reader))[0] == 200
    assert (await request(pool, "GET", "/v1/jobs/x", key=reader)) == (
        404,
        {"error": "Job not found"},
    )


# Lists.


async def listed(pool: Pool, query: str = "") -> list[str]:
    status, answer = await call(pool, "GET", f"/v1/jobs?{query}")
    assert status == 200, answer
    return [job["id"] for job in answer["jobs"]]


@pytest.mark.own_pool
async def test_jobs_are_listed_and_filtered(pool: Pool) -> None:
    async with provider(pool) as worker:
        done = await committed(pool)
        await worker.complete((await worker.job())["job_id"], {"ok": 1})
        given = await committed(pool, user_id="u2")
        await worker.job(1)
        waits = await committed(pool, job_type="LLM_INFER", payload={"prompt": "x"})
        gone = await committed(pool)
        await call(pool, "DELETE", f"/v1/jobs/{gone}")

        assert await listed(pool) == [gone, waits, given, done]
        assert await listed(pool, "status=completed") == [done]
        assert await listed(pool, "status=assigned") == [given]
        assert await listed(pool, "status=pending") == [waits]
        assert await listed(pool, "status=failed") == [gone]
        assert await listed(pool, "user_id=u2") == [given]
        assert await listed(pool, "job_type=LLM_INFER") == [waits]
        assert await listed(pool, "job_type=TASK&status=failed&user_id=u2") == []


@pytest.mark.own_pool
async def test_job_list_is_paginated(pool: Pool) -> None:
    jobs = [await committed(pool) for _ in range(5)][::-1]
    seen: list[str] = []
    query = "limit=2"
    while True:
        _, page = await call(pool, "GET", f"/v1/jobs?{query}")
        seen += [job["id"] for job in page["jobs"]]
        if page["next"] is None:
            break
        query = f"limit=2&before={page['next']}"

    assert seen == jobs


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("status=done", "status"),
        ("job_type=X", "job_type"),
        ("limit=0", "limit"),
        (f"limit={LISTED_MAX + 1}", "limit"),
        ("before=nope", "before: there is no job nope"),
        ("user=u1", "user"),
        ("limit=1&limit=2", "limit: given more than once"),
        ("user_id=" + "u" * 257, "user_id"),
    ],
)
async def test_invalid_filter_is_rejected(pool: Pool, query: str, said: str) -> None:
    status, answer = await call(pool, "GET", f"/v1/jobs?{query}")

    assert status == 400
    assert said in answer["error"]


# Webhooks, moderation, money.


async def test_webhook_is_stored_with_the_job(pool: Pool) -> None:
    status, answer = await commit(pool, webhook=HOOK)

    assert status == 201
    terms = pool.hub.pool.jobs[answer["job_id"]].job.terms
    assert terms.webhook is not None
    assert (terms.webhook.url, terms.webhook.secret) == (HOOK["url"], HOOK["secret"])
    _, job = await request(pool, "GET", f"/v1/jobs/{answer['job_id']}")
    assert HOOK["secret"] not in json.dumps(job)


async def test_webhook_requires_a_key(pool: Pool) -> None:
    status, answer = await call(
        pool, "POST", "/v1/jobs/commit/fast", COMMIT | {"webhook": HOOK}
    )

    assert status == 400
    assert "only for clients with a key" in answer["error"]


async def test_webhook_is_rejected_if_disabled(tmp_path: Path) -> None:
    async with serving(tmp_path, webhooks=EgressPolicy.OFF) as pool:
        status, answer = await commit(pool, webhook=HOOK)

    assert status == 400
    assert "--webhooks off" in answer["error"]


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "10.0.0.7:8080", "[fe80::1]"])
async def test_webhook_to_a_private_address_is_rejected(
    tmp_path: Path, host: str
) -> None:
    async with serving(tmp_path, webhooks=EgressPolicy.PUBLIC) as pool:
        status, answer = await commit(pool, webhook=HOOK | {"url": f"http://{host}/"})

    assert status == 400
    assert "not a public address" in answer["error"]


async def test_payload_and_result_are_moderated(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, wires=WIRES, moderation=Moderation("forbidden")) as pool,
        provider(pool) as worker,
    ):
        for fields in (
            {"payload": TASK | {"input": "something Forbidden"}},
            {"payload": [{"deep": ["\u0066orbidden"]}]},
            {"job_type": "LLM_INFER", "payload": {"prompt": "forbidden"}},
        ):
            path = "/v1/jobs/commit/fast"
            status, answer = await call(pool, "POST", path, COMMIT | fields)
            assert status == 400
            assert "moderation list" in answer["error"]
        job_id = await committed(pool)
        await worker.complete((await worker.job())["job_id"], {"x": "forbidden"})

        job = await shown(pool, job_id)

    assert job["result"] == {"error": "content_filter"}
    assert "moderation list" in job["detail"]


async def test_detached_jobs_count_against_the_budget(pool: Pool) -> None:
    # About 256 tokens for an answer, and a few for the prompt.
    key = await make_key(pool, budget=600)

    assert (await commit(pool, key))[0] == 201
    status, answer = await commit(pool, key)
    assert status == 201
    status, answer = await commit(pool, key)
    assert status == 429
    assert "of its 600 tokens left" in answer["error"]

    # Ended jobs count their actual usage, so that there is room again.
    async with provider(pool) as worker:
        for number in range(2):
            job = await worker.job(number)
            await worker.complete(job["job_id"], {"ok": 1})
        assert (await commit(pool, key))[0] == 201


@pytest.mark.own_pool
async def test_job_above_the_balance_is_rejected(pool: Pool) -> None:
    account = "/admin/accounts/user:alice/budget"
    key = await make_key(pool)
    status, _ = await request(pool, "PUT", account, {"budget": 1500})
    assert status == 200

    assert (await commit(pool, key))[0] == 201
    status, answer = await commit(pool, key)

    assert status == 429
    assert "left to spend" in answer["error"]
    assert len(pool.hub.pool.jobs) == 1


async def test_bodies_of_other_types_count_as_empty(pool: Pool) -> None:
    for headers in ({"Content-Type": "text/plain"}, {}):
        async with pool.session.post(
            f"{pool.url}/v1/jobs/commit/fast",
            data=json.dumps(COMMIT),
            headers=headers,
            skip_auto_headers=["Content-Type"],
        ) as response:
            assert response.status == 400
            assert "Missing required fields" in (await response.json())["error"]
    assert not pool.hub.pool.jobs


async def test_any_job_id_is_answered(pool: Pool) -> None:
    # A response has the job's id in a header, which allows only some characters.
    for job_id in ("%12", "%0d%0aX-Evil:1", "%C3%A9", "%00", "a" * 4000):
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/events")):
            answer = await call(pool, method, f"/v1/jobs/{job_id}{path}")

            assert answer == (404, {"error": "Job not found"})


async def test_committed_jobs_survive_a_restart(tmp_path: Path) -> None:
    name = {"Idempotency_Key": "once"}
    async with serving(tmp_path, wires=WIRES) as pool:
        path = "/v1/jobs/commit/fast"
        first = await call(pool, "POST", path, COMMIT, **name)
    async with serving(tmp_path, wires=WIRES) as pool:
        await pool.hub.restore()
        assert await call(pool, "POST", path, COMMIT, **name) == first
        async with provider(pool) as worker:
            job = await worker.job()
            await worker.complete(job["job_id"], {"ok": 1})

            done = await shown(pool, first[1]["job_id"], wait=WAIT_MAX)

    assert job["payload"] == TASK
    assert done["result"] == {"ok": 1}
