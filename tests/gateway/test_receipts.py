"""Receipts, the log and accounts over HTTP, of a complete coordinator."""

import json
from typing import Any

import pytest

from gateway.keys import make_key, request
from gateway.providers import COMMIT, committed, provider
from gateway.serving import KEY, Pool
from protocols.contexts import SIGNER
from protocols.dispatch.recorded import SIGNERS
from shoal.ledger import bundle, consistency
from shoal.ledger.verification import VerificationStep
from shoal.protocols.dispatch import Config

OUTPUT = {"sentiment": "positive", "confidence": 0.5}
WORKER = SIGNERS["A"].public_key.hex()


@pytest.fixture(scope="module")
def pool_options() -> dict[str, Any]:
    """Admit workers without a token, and jobs without a key."""
    return {"wires": {"dispatch": Config(open=True)}}


async def fetched(pool: Pool, path: str, key: str = KEY) -> bytes:
    async with pool.session.get(pool.url + path, headers=pool.headers(key)) as response:
        assert response.status == 200, await response.text()
        return await response.read()


async def done(pool: Pool, **fields: Any) -> str:
    """Run a job; return its id."""
    async with provider(pool) as worker:
        number = len(worker.jobs)
        job_id = await committed(pool, **fields)
        await worker.job(number)
        await worker.complete(job_id, OUTPUT)
    return job_id


async def test_exported_receipt_verifies_with_the_public_key_alone(pool: Pool) -> None:
    job_id = await done(pool)

    log = json.loads(await fetched(pool, "/v1/log"))
    assert log["public_key"] == SIGNER.public_key.hex()
    assert log["size"] == 1
    data = await fetched(pool, f"/v1/receipts/{job_id}")
    checks = bundle.verify(data, bytes.fromhex(log["public_key"]))
    assert all(check.ok for check in checks)
    assert {VerificationStep.OUTPUT, VerificationStep.WORKER} <= {
        check.step for check in checks
    }


async def test_receipts_are_listed_newest_first(pool: Pool) -> None:
    jobs = [await done(pool) for _ in range(3)]

    _, listed = await request(pool, "GET", "/v1/receipts?limit=2")
    assert [each["job_id"] for each in listed["data"]] == jobs[:0:-1]
    first = listed["data"][0]
    assert (first["index"], first["verdict"], first["price"]) == (2, "valid", 1_000)
    assert first["worker_key"] == WORKER


async def test_consistency_of_the_log_is_proved(pool: Pool) -> None:
    for _ in range(3):
        await done(pool)

    data = await fetched(pool, "/v1/log/growth?since=1&to=3")
    assert all(check.ok for check in consistency.verify(data, SIGNER.public_key))
    assert data == await fetched(pool, "/v1/log/growth?since=1")


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/v1/receipts/nope", 404, "no receipt"),
        ("/v1/log/growth?since=7", 404, "no checkpoint yet"),
        ("/v1/log/growth", 400, "since"),
        (f"/v1/log/growth?since={2**63}", 400, "since"),
        (f"/v1/log/growth?since=0&to={10**30}", 400, "to"),
        ("/v1/receipts?limit=0", 400, "limit"),
        ("/v1/receipts?limit=1&limit=2", 400, "more than once"),
    ],
)
async def test_missing_and_invalid_receipts_are_errors(
    pool: Pool, path: str, status: int, says: str
) -> None:
    found, answer = await request(pool, "GET", path)

    assert found == status
    assert says in answer["error"]["message"]


async def test_receipts_are_visible_to_their_owner_only(pool: Pool) -> None:
    job_id = await done(pool)  # of an unknown key
    other = await make_key(pool, "al")

    assert (await request(pool, "GET", f"/v1/receipts/{job_id}", key=other))[0] == 403
    _, listed = await request(pool, "GET", "/v1/receipts", key=other)
    assert listed["data"] == []


async def test_receipt_outlives_its_job(pool: Pool) -> None:
    key, other = await make_key(pool, "bo"), await make_key(pool, "al")
    async with provider(pool) as worker:
        status, answer = await request(
            pool, "POST", "/v1/jobs/commit/cheap", COMMIT, key=key
        )
        assert status == 201
        job_id = answer["job_id"]
        await worker.job(0)
        await worker.complete(job_id, OUTPUT)
    assert pool.gateway is not None

    assert await pool.gateway.store.prune(pool.gateway.clock.wall() + 1) == 1

    _, listed = await request(pool, "GET", "/v1/receipts", key=key)
    assert [each["job_id"] for each in listed["data"]] == [job_id]
    data = await fetched(pool, f"/v1/receipts/{job_id}", key=key)
    assert all(check.ok for check in bundle.verify(data, SIGNER.public_key))
    assert (await request(pool, "GET", f"/v1/receipts/{job_id}", key=other))[0] == 403


async def test_accounts_show_transfers_of_jobs(pool: Pool) -> None:
    job_id = await done(pool)

    _, listed = await request(pool, "GET", "/admin/accounts")
    balances = {each["name"]: each["balance"] for each in listed["data"]}
    assert balances["user:open/u1"] == -1_000
    assert balances[f"worker:{WORKER}"] == 1_000
    assert listed["total"] == 0
    _, user = await request(pool, "GET", "/admin/accounts/user:open%2Fu1")
    (moved,) = user["transfers"]
    assert (moved["why"], moved["job_id"]) == ("reserved", job_id)
    _, key = await request(pool, "GET", "/admin/accounts/open")
    assert (key["balance"], key["standing"]) == (0, -1_000)


async def test_account_can_be_credited_and_limited(pool: Pool) -> None:
    _, topped = await request(
        pool, "POST", "/admin/accounts/open/credit", {"amount": 1_500}
    )
    _, bounded = await request(
        pool, "PUT", "/admin/accounts/open/budget", {"budget": 0}
    )
    await done(pool)

    assert topped["balance"] == 1_500
    assert bounded["budget"] == 0
    async with pool.session.post(
        f"{pool.url}/v1/jobs/commit/cheap",
        json={"job_type": "TASK", "user_id": "u2", "payload": {"input": "a"}},
    ) as response:
        assert response.status == 429
        assert "$0.0005 left to spend" in (await response.json())["error"]


@pytest.mark.parametrize(
    ("method", "path", "body", "says"),
    [
        ("POST", "credit", {"amount": 0}, "amount"),
        ("POST", "credit", {"amount": -1}, "amount"),
        ("POST", "credit", {"amount": 1.5}, "amount"),
        ("POST", "credit", {"amount": 10**18}, "amount"),
        ("POST", "credit", {}, "amount"),
        ("PUT", "budget", {"budget": -1}, "budget"),
        ("PUT", "budget", {"budget": "5"}, "budget"),
    ],
)
async def test_invalid_amounts_are_rejected(
    pool: Pool, method: str, path: str, body: Any, says: str
) -> None:
    status, answer = await request(pool, method, f"/admin/accounts/al/{path}", body)

    assert status == 400
    assert says in answer["error"]["message"]
    assert pool.hub.books.account_names() == []


@pytest.mark.parametrize("name", ["pool:fees", "worker:w", "world", "other:x"])
async def test_only_accounts_of_keys_can_be_credited(pool: Pool, name: str) -> None:
    path = f"/admin/accounts/{name}/credit"
    status, answer = await request(pool, "POST", path, {"amount": 1})

    assert status == 400
    assert "only accounts of keys" in answer["error"]["message"]


async def test_foreign_accounts_require_the_admin_scope(pool: Pool) -> None:
    await done(pool)
    other = await make_key(pool, "al")

    assert (await request(pool, "GET", "/admin/accounts/open", key=other))[0] == 403
    _, listed = await request(pool, "GET", "/admin/accounts", key=other)
    assert listed == {"data": [], "total": 0, "next": None}
    path = "/admin/accounts/al/credit"
    assert (await request(pool, "POST", path, {"amount": 1}, key=other))[0] == 403
    assert (await request(pool, "GET", "/admin/accounts/bo"))[0] == 404


async def test_explanation_of_a_queued_job_lists_ineligible_workers(pool: Pool) -> None:
    async with provider(pool):
        job_id = await committed(pool)
        other = await committed(pool, payload={"task_type": "fly"})
        _, told = await request(pool, "GET", f"/admin/jobs/{other}/explain")
        _, given = await request(pool, "GET", f"/admin/jobs/{job_id}/explain")

    assert told["lines"][-1] == (
        "still waiting: no worker for the task 'fly': 1 worker has it but is full"
    )
    assert not any("still waiting" in line for line in given["lines"])


async def test_status_shows_the_health_of_a_worker(pool: Pool) -> None:
    async with provider(pool) as worker:
        metrics = {"cpu_pct": 45.2, "mem_pct": 62.1, "active_jobs": 1}
        heartbeat = {"type": "heartbeat", "provider_pubkey": WORKER, "metrics": metrics}
        await worker.send(json.dumps(heartbeat))
        _, status = await request(pool, "GET", "/admin/status")

    (shown,) = status["workers"]
    assert (shown["cpu"], shown["memory"]) == (45.2, 62.1)
    assert (shown["public_key"], shown["proven"]) == (WORKER, False)
    assert shown["device"] == "desktop"
