"""Permissions and limits of keys, over HTTP and with the official client."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestServer, make_mocked_request

from gateway.keys import CHAT, client, make_key, request
from gateway.serving import EPOCH, KEY, Node, Pool, eventually, serving
from harness.slow_imports import openai
from harness.speed import PATIENCE
from shoal.coordinator.auth_throttle import BLOCK_AFTER
from shoal.domain.credentials import (
    Key,
    KeyUsage,
    Scope,
    day_of,
    with_fingerprint,
)
from shoal.domain.errors import KeyExpired, KeyRevoked, RateLimited, UnknownModel
from shoal.domain.facts import Fact, JobCancelled, JobSubmitted
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.work import JSON, Call, Chat
from shoal.gateway.http.access import LOOPBACK_KEY, ApiCaller
from shoal.gateway.http.job_quotas import ANSWER_GUESS
from shoal.gateway.http.list_limits import LISTS_PER_MINUTE
from shoal.transports.clock import LoopClock

TEXT = "12345678"  # estimated as two tokens


@pytest.fixture
async def node(pool: Pool) -> AsyncIterator[Node]:
    async with pool.node() as each:
        await pool.wait_joined()
        yield each


async def answered(
    pool: Pool, node: Node, key: str, number: int, **more: Any
) -> ClientResponse:
    """Submit with a key, and answer the node's task of that number."""
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(post(pool, key, **more))
        tasks.create_task(node.answer(TEXT, number=number))
    return asking.result()


async def post(
    pool: Pool, key: str, headers: dict[str, str] | None = None, **more: Any
) -> ClientResponse:
    async with pool.session.post(
        f"{pool.url}/v1/chat/completions",
        json=CHAT | more,
        headers=pool.headers(key) | (headers or {}),
    ) as response:
        await response.read()
        return response


def a_browser() -> web.Request:
    """A request with the cookie of the session ``value``."""
    headers = {"Host": "pool.example", "Cookie": "shoal-session=value"}
    return make_mocked_request("GET", "/", headers)


async def test_read_scope_may_not_submit(pool: Pool, node: Node) -> None:
    key = await make_key(pool, scope="read")
    async with client(pool, key) as reader:
        assert [model.id for model in (await reader.models.list()).data] == ["m1"]
        assert (await request(pool, "GET", "/admin/status", key=key))[0] == 200

        with pytest.raises(openai.PermissionDeniedError) as caught:
            await reader.chat.completions.create(**CHAT)

    assert caught.value.code == "insufficient_permissions"
    assert caught.value.type == "invalid_request_error"
    assert "alice has the scope read" in caught.value.message
    assert "the scope use" in caught.value.message
    assert not pool.hub.pool.jobs


async def test_use_scope_may_not_create_keys(pool: Pool, node: Node) -> None:
    key = await make_key(pool)

    assert (await answered(pool, node, key, 0)).status == 200

    for method, path in (
        ("GET", "/admin/keys"),
        ("POST", "/admin/keys"),
        ("GET", "/admin/keys/alice"),
        ("DELETE", "/admin/keys/alice"),
        ("GET", "/admin/tokens"),
        ("POST", "/admin/tokens"),
        ("DELETE", "/admin/tokens/x"),
    ):
        status, answer = await request(pool, method, path, {"name": "x"}, key=key)
        assert (status, answer["error"]["code"]) == (403, "insufficient_permissions")


async def test_jobs_are_visible_to_their_owner_only(pool: Pool, node: Node) -> None:
    alice, bob = await make_key(pool, "alice"), await make_key(pool, "bob", scope="use")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(post(pool, alice))
        await node.task()
        (job_id,) = pool.hub.pool.jobs
        for method, path in (
            ("GET", f"/admin/jobs/{job_id}"),
            ("GET", f"/admin/jobs/{job_id}/explain"),
            ("DELETE", f"/admin/jobs/{job_id}"),
        ):
            assert (await request(pool, method, path, key=bob))[0] == 403
        assert (await request(pool, "GET", f"/admin/jobs/{job_id}", key=alice))[
            0
        ] == 200
        assert (await request(pool, "GET", f"/admin/jobs/{job_id}", key=KEY))[0] == 200

        status, _ = await request(pool, "DELETE", f"/admin/jobs/{job_id}", key=alice)

    assert status == 200


async def test_read_scope_may_not_cancel_its_jobs(pool: Pool, node: Node) -> None:
    reader = await make_key(pool, scope="read")

    status, _ = await request(pool, "DELETE", "/admin/jobs/x", key=reader)

    assert status == 403


async def test_rate_limit_is_counted_and_returned(pool: Pool, node: Node) -> None:
    key = await make_key(pool, requests_per_minute=2)

    first = await answered(pool, node, key, 0)
    second = await answered(pool, node, key, 1)
    third = await post(pool, key)

    assert [each.status for each in (first, second, third)] == [200, 200, 429]
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert second.headers["x-ratelimit-remaining-requests"] == "0"
    assert second.headers["x-ratelimit-reset-requests"].endswith("s")
    assert "x-ratelimit-limit-tokens" not in first.headers
    assert 0 < int(third.headers["Retry-After"]) <= 30
    assert (await third.json())["error"]["code"] == "rate_limit_exceeded"
    # Other keys see nothing of it.
    assert (await answered(pool, node, KEY, 2)).status == 200


async def test_stream_has_rate_limit_headers(pool: Pool, node: Node) -> None:
    key = await make_key(pool, requests_per_minute=2, tokens_per_minute=1000)

    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(post(pool, key, stream=True))
        tasks.create_task(node.answer(TEXT))

    headers = asking.result().headers
    assert headers["x-ratelimit-remaining-requests"] == "1"
    assert headers["x-ratelimit-limit-tokens"] == "1000"
    assert int(headers["x-ratelimit-remaining-tokens"]) == 1000 - 50 - 1


async def test_official_client_sees_a_rate_limit(pool: Pool, node: Node) -> None:
    key = await make_key(pool, tokens_per_minute=60)
    assert (await answered(pool, node, key, 0)).status == 200
    # A second one fits, because the first used less than it reserved.
    assert (await answered(pool, node, key, 1)).status == 200

    async with client(pool, key) as limited:
        with pytest.raises(openai.RateLimitError) as caught:
            await limited.chat.completions.create(**{**CHAT, "max_tokens": 59})

    assert caught.value.code == "rate_limit_exceeded"
    assert caught.value.response.headers["x-ratelimit-limit-tokens"] == "60"


async def test_request_above_the_limit_is_not_retryable(pool: Pool, node: Node) -> None:
    key = await make_key(pool, tokens_per_minute=60)
    async with client(pool, key) as limited:
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await limited.chat.completions.create(**{**CHAT, "max_tokens": 61})


async def test_budget_does_not_renew(pool: Pool, node: Node) -> None:
    key = await make_key(pool, budget=55)
    # Each reserves 51, and uses 3.
    assert (await answered(pool, node, key, 0)).status == 200
    assert (await answered(pool, node, key, 1)).status == 200
    assert (await post(pool, key)).status == 429

    # A new key of the same name continues the usage of the old one.
    await request(pool, "DELETE", "/admin/keys/alice")
    assert (await post(pool, await make_key(pool, budget=56))).status == 429
    await request(pool, "DELETE", "/admin/keys/alice")
    assert (
        await answered(pool, node, await make_key(pool, budget=57), 2)
    ).status == 200


async def test_official_client_sees_a_spent_budget(pool: Pool, node: Node) -> None:
    key = await make_key(pool, budget=50)
    async with client(pool, key) as limited:
        with pytest.raises(openai.RateLimitError) as caught:
            await limited.chat.completions.create(**CHAT)

    assert caught.value.code == "insufficient_quota"
    assert caught.value.type == "insufficient_quota"
    assert "has 50 of its 50 tokens left" in caught.value.message
    headers = caught.value.response.headers
    assert headers["x-should-retry"] == "false"
    assert "retry-after" not in headers


async def test_spent_budget_leaves_the_tokens_of_the_minute(pool: Pool) -> None:
    key = await make_key(pool, budget=50, tokens_per_minute=60)

    # Each would take 51 of the 60.
    for _ in range(12):
        response = await post(pool, key)
        assert (await response.json())["error"]["code"] == "insufficient_quota"


async def test_daily_budget_renews_at_midnight(pool: Pool, node: Node) -> None:
    key = await make_key(pool, tokens_per_day=50)

    response = await post(pool, key)

    assert response.status == 429
    assert 0 < int(response.headers["Retry-After"]) <= 86_400
    error = (await response.json())["error"]
    assert error["code"] == "insufficient_quota"
    assert "midnight UTC" in error["message"]


async def test_concurrent_requests_do_not_exceed_the_budget(tmp_path: Path) -> None:
    clock = LoopClock(lambda: EPOCH)
    async with (
        serving(tmp_path, clock=clock) as pool,
        pool.node(slots="200") as node,
    ):
        await pool.wait_joined()
        key = await make_key(pool, budget=510)
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(post(pool, key)) for _ in range(100)]
            await eventually(lambda: sum(each.done() for each in asked) == 90)
            await eventually(lambda: len(node.tasks) == 10)
            for number in range(10):
                await node.answer("x" * 200, number=number)

        statuses = [each.result().status for each in asked]
        assert sorted(statuses) == [200] * 10 + [429] * 90
        assert pool.gateway is not None
        today = day_of(EPOCH)
        used = await pool.gateway.store.keys.usage_of("alice", today)
        assert used == KeyUsage(10, 10, 500, 510)
        assert (await post(pool, key)).status == 429


async def test_open_job_reserves_its_tokens_after_a_restart(tmp_path: Path) -> None:
    named = {"Idempotency-Key": "k1"}
    async with serving(tmp_path) as pool, pool.node() as node:
        await pool.wait_joined()
        # An open job reserves 51.
        key = await make_key(pool, budget=60, tokens_per_minute=60)
        first = asyncio.create_task(post(pool, key, headers=named))
        await node.task(0)
        first.cancel()
        await asyncio.wait([first])
    async with serving(tmp_path, restarted=True) as pool, pool.node() as node:
        await pool.wait_joined()
        await node.task(0)

        refused = await post(pool, key)
        # Its own request gets it all the same, and reserves no more.
        attached = asyncio.create_task(post(pool, key, headers=named))
        await node.answer(TEXT)

        assert (await attached).status == 200
        assert refused.status == 429
        assert (
            "has 9 of its 60 tokens left" in (await refused.json())["error"]["message"]
        )
        left = (await attached).headers["x-ratelimit-remaining-tokens"]
        assert left == "60"  # those of a minute start afresh
        assert (await answered(pool, node, key, 1)).status == 200


async def test_failed_request_uses_no_tokens(pool: Pool, node: Node) -> None:
    key = await make_key(pool, tokens_per_minute=51)
    for _ in range(3):
        assert (await post(pool, key, model="none")).status == 404

    assert (await answered(pool, node, key, 0)).status == 200


async def test_limits_apply_to_the_grandsage_api(pool: Pool, node: Node) -> None:
    key = await make_key(pool, requests_per_minute=1)
    assert (await answered(pool, node, key, 0)).status == 200

    async with pool.session.post(
        f"{pool.url}/api/chat", json=CHAT, headers=pool.headers(key)
    ) as response:
        assert response.status == 200  # as usual in that API
        line = await response.json(content_type=None)

    assert line == {"err": "too many requests"}


async def test_scopes_apply_to_the_grandsage_api(pool: Pool, node: Node) -> None:
    key = await make_key(pool, scope="read")

    async with pool.session.post(
        f"{pool.url}/api/chat", json=CHAT, headers=pool.headers(key)
    ) as response:
        assert await response.json(content_type=None) == {"err": "unauthorized"}


async def test_unlimited_answer_reserves_a_default(pool: Pool, node: Node) -> None:
    key = await make_key(pool, tokens_per_minute=ANSWER_GUESS)

    response = await post(pool, key, max_tokens=None)

    assert response.status == 400
    assert f"about {ANSWER_GUESS + 1} tokens" in await response.text()


async def test_tokens_that_an_answer_did_not_use_are_returned(
    pool: Pool, node: Node
) -> None:
    # Enough for one reservation at a time, and for many such answers.
    key = await make_key(pool, tokens_per_minute=ANSWER_GUESS + 20)

    for number in range(3):
        answer = await answered(pool, node, key, number, max_tokens=None)
        assert answer.status == 200


async def test_scheme_of_a_key_may_be_in_any_case(pool: Pool) -> None:
    for scheme in ("Bearer", "bearer", "BEARER"):
        async with pool.session.get(
            f"{pool.url}/v1/models", headers={"Authorization": f"{scheme} {KEY}"}
        ) as response:
            assert response.status == 200


async def test_wrong_keys_are_delayed_and_then_banned(tmp_path: Path) -> None:
    keys = {"default": KEY, "weak": "sk-weak"}
    async with serving(tmp_path, keys=keys) as pool:
        for number in range(BLOCK_AFTER):
            status, _ = await request(pool, "GET", "/v1/models", key=f"sk-{number}")
            assert status == 401

        async with pool.session.get(
            f"{pool.url}/v1/models", headers=pool.headers("sk-again")
        ) as response:
            assert response.status == 429
            assert 0 < int(response.headers["Retry-After"]) <= 60
            error = (await response.json())["error"]
        assert error["code"] == "too_many_failures"
        # From loopback, only keys that can be guessed are refused.
        assert (await request(pool, "GET", "/v1/models", key=KEY))[0] == 200
        assert (await request(pool, "GET", "/v1/models", key="sk-weak"))[0] == 429
        async with pool.session.get(f"{pool.url}/v1/models") as response:
            assert response.status == 401


async def test_wrong_bare_keys_are_counted_like_others(tmp_path: Path) -> None:
    async with serving(tmp_path, keys={"default": KEY, "weak": "sk-weak"}) as pool:
        url = f"{pool.url}/v1/models"
        statuses = []
        for key in (KEY, *(f"sk-{number}" for number in range(BLOCK_AFTER)), "sk-weak"):
            async with pool.session.get(url, headers={"x-api-key": key}) as response:
                statuses.append(response.status)

    assert statuses == [200, *[401] * BLOCK_AFTER, 429]


async def test_fingerprint_does_not_make_a_weak_key_strong(tmp_path: Path) -> None:
    padded = with_fingerprint("sk-weak", bytes(32))
    async with serving(tmp_path, keys={"default": KEY, "weak": "sk-weak"}) as pool:
        assert (await request(pool, "GET", "/v1/models", key=padded))[0] == 200
        for number in range(BLOCK_AFTER):
            await request(pool, "GET", "/v1/models", key=f"sk-{number}")

        assert (await request(pool, "GET", "/v1/models", key=padded))[0] == 429


async def test_old_and_missing_keys_are_not_guesses(pool: Pool) -> None:
    key = await make_key(pool)
    await request(pool, "DELETE", "/admin/keys/alice")

    for _ in range(2 * BLOCK_AFTER):
        status, answer = await request(pool, "GET", "/v1/models", key=key)
        assert (status, answer["error"]["code"]) == (401, "revoked_api_key")
        async with pool.session.get(f"{pool.url}/v1/models") as response:
            assert response.status == 401


async def test_old_keys_are_forgotten_in_the_end(pool: Pool) -> None:
    key = await make_key(pool)
    await request(pool, "DELETE", "/admin/keys/alice")

    pool.access.forget_ended(0.0)
    assert (await request(pool, "GET", "/v1/models", key=key))[1]["error"]["code"] == (
        "revoked_api_key"
    )
    pool.access.forget_ended(1e12)
    assert (await request(pool, "GET", "/v1/models", key=key))[1]["error"]["code"] == (
        "invalid_api_key"
    )


async def test_new_key_does_not_wait_for_the_lists_of_a_forgotten_one(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # These read nothing: they need no turns in the share of all keys.
    monkeypatch.setattr("shoal.gateway.http.list_limits.REQUEST_COST", 0.0)
    await make_key(pool)
    older = pool.access.keyring.cache.find("alice")
    with pytest.raises(RateLimited):
        await read_lists(pool, older)
    await pool.access.revoke(older)

    pool.access.forget_ended(1e12)

    await make_key(pool)
    newer = pool.access.keyring.cache.find("alice")
    await read_lists(pool, newer, 1)


async def read_lists(pool: Pool, key: Key, lists: int = 2 * LISTS_PER_MINUTE) -> None:
    for _ in range(lists):
        async with pool.access.reading_list(ApiCaller(key)):
            pass


async def test_job_of_a_key_that_was_revoked_meanwhile_is_not_submitted(
    pool: Pool,
) -> None:
    await make_key(pool)
    key = pool.access.keyring.cache.find("alice")
    await pool.access.revoke(key)
    facts: list[Fact] = []
    pool.hub.subscribe(facts.extend)

    with pytest.raises(KeyRevoked):
        async with pool.access.submit(
            Job(JobId("late"), Chat("m1", ())), ApiCaller(key)
        ):
            pass

    assert facts == []


async def test_jobs_of_a_key_end_when_it_is_revoked(pool: Pool, node: Node) -> None:
    secret = await make_key(pool)
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(pool, secret))
        await node.task()

        await pool.access.revoke(pool.access.keyring.cache.find("alice"))

    assert asked.result().status == 401
    assert not pool.hub.pool.jobs


async def test_job_ends_when_its_key_expires(pool: Pool, node: Node) -> None:
    await make_key(pool)
    key = pool.access.keyring.cache.find("alice")
    assert pool.gateway is not None
    at = pool.gateway.clock.wall()
    job = Job(JobId("j"), Chat("m1", ({"role": "user", "content": "hi"},)))

    with pytest.raises(KeyExpired, match="the API key alice has expired"):
        async with (
            asyncio.timeout(PATIENCE),
            pool.access.submit(
                job, ApiCaller(replace(key, expires_at=at + 0.1))
            ) as its,
        ):
            await its.outcome()

    await eventually(lambda: not pool.hub.pool.jobs)


async def test_jobs_without_a_request_run_for_owners_with_a_valid_key(
    pool: Pool,
) -> None:
    await make_key(pool)
    key = pool.access.keyring.cache.find("alice")
    keyring = pool.access.keyring
    expired = replace(key, expires_at=1000.0)

    assert pool.access.caller_of("alice").key == key
    assert pool.access.caller_of("default").name == "default"
    keyring.cache.update(expired)
    assert keyring.of_owner("alice", 999.0) == expired
    with pytest.raises(KeyExpired):
        keyring.of_owner("alice", 1000.0)
    await pool.access.revoke(key)
    for owner in ("alice", "nobody", "loopback"):
        with pytest.raises(KeyRevoked):
            pool.access.caller_of(owner)


async def test_loopback_needs_a_key_by_default(pool: Pool) -> None:
    async with pool.session.get(f"{pool.url}/v1/models") as response:
        assert response.status == 401


async def test_loopback_needs_no_key_if_configured(tmp_path: Path) -> None:
    async with serving(tmp_path, open_loopback=True) as pool, pool.node() as node:
        await pool.wait_joined()
        async with asyncio.TaskGroup() as tasks:
            url = f"{pool.url}/v1/chat/completions"
            asking = tasks.create_task(pool.session.post(url, json=CHAT))
            await node.answer(TEXT)
        assert asking.result().status == 200

        status, shown = await request(pool, "GET", "/admin/jobs/job1")
        assert (status, shown["owner"]) == (200, "loopback")
        assert pool.access.caller_of("loopback").key is LOOPBACK_KEY
        with pytest.raises(KeyRevoked):
            pool.access.caller_of("nobody")
        for headers, status in (
            ({"Authorization": "Bearer sk-wrong"}, 401),
            ({"Authorization": ""}, 401),
            ({"x-api-key": "sk-wrong"}, 401),
            ({"x-api-key": ""}, 401),
            ({"Host": "evil.example"}, 401),
            ({"Origin": "https://evil.example"}, 401),
            ({"X-Forwarded-For": "192.0.2.7"}, 401),
            ({}, 200),
        ):
            async with pool.session.get(
                f"{pool.url}/v1/models", headers=headers
            ) as response:
                assert response.status == status, headers
        async with pool.session.get(f"{pool.url}/admin/keys") as response:
            assert response.status == 403


@pytest.mark.parametrize("open_loopback", [False, True])
async def test_who_is_recognized(tmp_path: Path, open_loopback: bool) -> None:
    async with serving(tmp_path, open_loopback=open_loopback) as pool:

        async def recognize(request: web.Request) -> web.Response:
            return web.json_response(
                pool.access.recognizes(
                    request.headers, request.remote or "", secure=False
                )
            )

        app = web.Application()
        app.router.add_get("/", recognize)
        async with TestServer(app) as server:
            for headers, recognized in (
                ({}, open_loopback),
                ({"X-Forwarded-For": "192.0.2.7"}, False),
                ({"Origin": "https://evil.example"}, False),
                ({"Authorization": f"Bearer {KEY}"}, True),
                ({"Authorization": "Bearer sk-wrong"}, False),
                ({"Authorization": f"Bearer {KEY}", "x-api-key": "sk-other"}, False),
            ):
                url = server.make_url("/")
                async with pool.session.get(url, headers=headers) as response:
                    assert await response.json() is recognized, headers


async def test_revocation_ends_the_sessions_of_a_key(pool: Pool) -> None:
    await make_key(pool, "ada")
    access, browser, at = pool.access, a_browser(), LoopClock().wall()
    key = access.keyring.cache.find("ada")
    session = await access.sessions.begin("value", key, at)
    assert access.recognizes(browser.headers, "", secure=False)

    await access.revoke(key)

    assert not access.sessions.is_open(session, at)
    assert not access.recognizes(browser.headers, "", secure=False)


async def test_revocation_ends_all_sessions_of_a_key_and_no_others(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as pool:
        keys, at = [], LoopClock().wall()
        for name in ("ada", "bob"):
            await make_key(pool, name)
            keys.append(pool.access.keyring.cache.find(name))
        sessions = pool.access.sessions
        first, others, second = [
            await sessions.begin(str(number), key, at)
            for number, key in enumerate((keys[0], keys[1], keys[0]))
        ]

        await pool.access.revoke(keys[0])

        opened = [sessions.is_open(each, at) for each in (first, others, second)]
        assert opened == [False, True, False]


async def test_session_of_a_key_that_is_unknown_now_is_not_recognized(
    pool: Pool,
) -> None:
    at = LoopClock().wall()
    key = Key("", "before", b"before the restart", "", Scope.USE, at)
    await pool.access.sessions.begin("value", key, at)

    assert not pool.access.recognizes(a_browser().headers, "", secure=False)


async def test_job_whose_key_is_revoked_while_it_is_paid_for_is_cancelled(
    pool: Pool, node: Node
) -> None:
    await make_key(pool)
    key = pool.access.keyring.cache.find("alice")
    facts: list[Fact] = []
    pool.hub.subscribe(facts.extend)

    async def pay(job: Job) -> Job:
        await pool.access.revoke(key)
        return job

    hi = Chat("m1", ({"role": "user", "content": "hi"},))
    with pytest.raises(KeyRevoked):
        async with pool.access.submit(Job(JobId("late"), hi), ApiCaller(key), pay):
            pytest.fail("its answer was read")

    cancelled = JobCancelled(JobId("late"), "the key was revoked")
    await eventually(lambda: any(isinstance(each, JobCancelled) for each in facts))
    assert isinstance(facts[0], JobSubmitted)
    assert cancelled in facts


@pytest.mark.parametrize(
    ("choices", "answers"), [(None, 1), (3, 3), (0, 1), (-3, 1), ("3", 1)]
)
async def test_tokens_of_each_choice_are_reserved(
    pool: Pool, choices: JSON, answers: int
) -> None:
    await make_key(pool, tokens_per_minute=1000)
    caller = ApiCaller(pool.access.keyring.cache.find("alice"))
    work = Chat("m1", (), 100, options={"n": choices})

    with pytest.raises(UnknownModel):  # before which they are reserved
        async with pool.access.submit(Job(JobId("j"), work), caller):
            pass

    left = int(caller.headers["x-ratelimit-remaining-tokens"])
    assert left == 1000 - answers * 100


async def test_calls_count_as_requests_without_tokens(pool: Pool) -> None:
    await make_key(pool, requests_per_minute=4, tokens_per_minute=1000)
    caller = ApiCaller(pool.access.keyring.cache.find("alice"))

    for _ in range(3):
        pool.access.count_call(caller)
    with pytest.raises(UnknownModel):
        async with pool.access.submit(Job(JobId("j"), Chat("m1", (), 100)), caller):
            pass
    with pytest.raises(RateLimited, match="4 requests a minute"):
        pool.access.count_call(caller)

    assert caller.headers["x-ratelimit-remaining-tokens"] == "900"


async def test_calls_reserve_no_tokens(pool: Pool) -> None:
    await make_key(pool, tokens_per_minute=1000)
    caller = ApiCaller(pool.access.keyring.cache.find("alice"))
    call = Call("f", b"\x90", b"\x80")

    async with pool.access.submit(Job(JobId("j"), call), caller):
        assert caller.headers["x-ratelimit-remaining-tokens"] == "1000"
