"""Keys under attack: revoked in flight, in thousands, and never logged."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientResponse

from attacks.siege import ANSWER, CHAT, OLD_CHAT, besieged, body, join
from gateway.keys import client, make_key, request
from gateway.serving import KEY, Node, Pool, eventually
from harness.slow_imports import openai
from shoal.domain.credentials import Key, Scope, digest_of
from shoal.store.sqlite.database import SqliteStore

pytestmark = pytest.mark.asyncio(loop_scope="module")

MANY = 2000


async def revoke(pool: Pool, name: str = "alice") -> None:
    status, _ = await request(pool, "DELETE", f"/admin/keys/{name}")
    assert status == 200


async def post(pool: Pool, key: str, **more: Any) -> ClientResponse:
    async with pool.session.post(
        pool.url + CHAT, json=body(**more), headers=pool.headers(key)
    ) as response:
        await response.read()
        return response


@pytest.fixture
def pool(shared_pool: Pool) -> Pool:
    return shared_pool


@pytest_asyncio.fixture(loop_scope="module")
async def node(pool: Pool) -> AsyncIterator[Node]:
    async with join(pool) as each:
        await pool.wait_joined()
        yield each


async def test_revoked_key_ends_a_streamed_answer(pool: Pool, node: Node) -> None:
    key = await make_key(pool)
    async with client(pool, key) as client_:
        pending = asyncio.create_task(
            client_.chat.completions.create(**body(), stream=True)
        )
        task = await node.task()
        await node.write(task["id"], ANSWER)
        pieces = aiter(await pending)
        while not (await anext(pieces)).choices[0].delta.content:
            pass

        await revoke(pool)

        with pytest.raises(openai.APIError, match="the key was revoked") as caught:
            await anext(pieces)
    assert caught.value.code == "revoked_api_key"
    await node.wait_stopped(task["id"])
    await eventually(lambda: not pool.hub.pool.jobs)


async def test_revoked_key_ends_an_awaited_answer(pool: Pool, node: Node) -> None:
    key = await make_key(pool)
    async with client(pool, key) as client_:
        pending = asyncio.create_task(client_.chat.completions.create(**body()))
        task = await node.task()

        await revoke(pool)

        with pytest.raises(openai.AuthenticationError, match="the key was revoked"):
            await pending
    await node.wait_stopped(task["id"])


async def test_revoked_key_dequeues_its_jobs(pool: Pool) -> None:
    async with join(pool, slots="1") as node:
        await pool.wait_joined()
        key = await make_key(pool)
        first = asyncio.create_task(post(pool, KEY))
        await node.task()
        waiting = [asyncio.create_task(post(pool, key)) for _ in range(5)]
        await eventually(lambda: pool.hub.pool.queued == 5)

        await revoke(pool)

        answers = [await each for each in waiting]
        assert {each.status for each in answers} == {401}
        assert pool.hub.pool.queued == 0
        await node.answer(ANSWER)
        assert (await first).status == 200
        assert len(node.tasks) == 1


async def test_revoked_key_ends_streams_of_other_apis(pool: Pool, node: Node) -> None:
    key = await make_key(pool)
    async with pool.session.post(
        pool.url + OLD_CHAT, json=body(), headers=pool.headers(key)
    ) as response:
        await node.task()

        await revoke(pool)

        assert '{"err":"unauthorized"}\n' in await response.text()


async def test_key_revoked_during_its_upload_gets_no_job(
    pool: Pool, node: Node
) -> None:
    key = await make_key(pool)
    half, rest = asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b'{"model": "m1", "messages": '
        half.set()
        await rest.wait()
        yield b'[{"role": "user", "content": "hi"}]}'

    async def send() -> tuple[int, Any]:
        async with pool.session.post(
            pool.url + CHAT, data=slowly(), headers=pool.headers(key)
        ) as response:
            return response.status, await response.json()

    sending = asyncio.create_task(send())
    await half.wait()
    await eventually(lambda: True)
    # The request is known to be let in once a later one has been answered.
    assert (await request(pool, "GET", "/v1/models", key=key))[0] == 200

    await revoke(pool)
    rest.set()

    status, answer = await sending
    assert (status, answer["error"]["code"]) == (401, "revoked_api_key")
    await eventually(lambda: not pool.hub.pool.jobs)


async def test_revoked_key_ends_a_detached_job(pool: Pool, node: Node) -> None:
    key = await make_key(pool)
    headers = pool.headers(key) | {"Idempotency-Key": "once"}
    pending = asyncio.create_task(
        pool.session.post(pool.url + CHAT, json=body(), headers=headers)
    )
    task = await node.task()
    pending.cancel()

    await revoke(pool)

    await node.wait_stopped(task["id"])
    await eventually(lambda: not pool.hub.pool.jobs)


async def test_revocation_under_load_leaks_nothing(pool: Pool) -> None:
    async with join(pool, slots="4") as node:
        await pool.wait_joined()
        answering = asyncio.create_task(_answer_all(node))
        for number in range(8):
            key = await make_key(
                pool, f"k{number}", requests_per_minute=50, budget=10**6
            )
            requests = [asyncio.create_task(post(pool, key)) for _ in range(10)]
            await asyncio.sleep(0)
            await revoke(pool, f"k{number}")
            statuses = {(await each).status for each in requests}
            assert statuses <= {200, 401}
        answering.cancel()
        await eventually(lambda: not pool.hub.pool.jobs)


async def _answer_all(node: Node) -> None:
    number = 0
    while True:
        await node.answer(ANSWER, number=number)
        number += 1


async def test_revoked_and_expired_keys_stay_so_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with besieged(tmp_path, caplog) as pool:
        keys = [await make_key(pool, name) for name in ("a", "b")]
        keys.append(await make_key(pool, "c", expires_in=1e-6))
        await revoke(pool, "a")

    async with besieged(tmp_path, caplog) as pool:
        answers = [await request(pool, "GET", "/v1/models", key=key) for key in keys]

    codes = [answer.get("error", {}).get("code") for _, answer in answers]
    assert codes == ["revoked_api_key", None, "expired_api_key"]


async def test_budget_survives_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with besieged(tmp_path, caplog) as pool, join(pool) as node:
        await pool.wait_joined()
        key = await make_key(pool, budget=100)
        pending = asyncio.create_task(post(pool, key, max_tokens=10))
        await node.answer("x" * 400)
        assert (await pending).status == 200

    async with besieged(tmp_path, caplog) as pool, join(pool):
        await pool.wait_joined()
        assert (await post(pool, key, max_tokens=1)).status == 429
        _, shown = await request(pool, "GET", "/admin/keys/alice")
        assert shown["requests"] == 1


async def test_disconnecting_early_still_spends_the_budget(
    pool: Pool, node: Node
) -> None:
    key = await make_key(pool, "leaving", budget=150)
    pending = asyncio.create_task(
        pool.session.post(
            pool.url + CHAT,
            json=body(stream=True, max_tokens=20),
            headers=pool.headers(key),
        )
    )
    task = await node.task()
    await node.write(task["id"], "x" * 400)
    response = await pending
    await response.content.readany()

    response.close()
    await eventually(lambda: not pool.hub.pool.jobs)

    assert (await post(pool, key, max_tokens=50)).status == 429
    _, shown = await request(pool, "GET", "/admin/keys/leaving")
    assert (shown["requests"], shown["completion_tokens"]) == (1, 100)


async def test_thousands_of_keys_are_as_fast_as_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = SqliteStore(tmp_path / "shoal.db")
    await store.open()

    def fill(sql: Any) -> None:
        rows = [
            (f"key_{n}", f"n{n}", digest_of(f"sk-{n}"), "", "use", float(n))
            for n in range(MANY)
        ]
        sql.executemany(
            "INSERT INTO keys (id, name, digest, start, scope, created_at)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            rows,
        )

    await store.database.transact(fill)
    await store.keys.keys.add(
        Key("key_last", "last", digest_of("sk-last"), "", Scope.USE, 1e6)
    )
    await store.close()

    async with besieged(tmp_path, caplog) as pool:
        for key in ("sk-0", f"sk-{MANY - 1}", "sk-last"):
            assert (await request(pool, "GET", "/v1/models", key=key))[0] == 200
        assert (await request(pool, "GET", "/v1/models", key=f"sk-{MANY}"))[0] == 401
        await revoke(pool, "n500")
        assert (await request(pool, "GET", "/v1/models", key="sk-500"))[0] == 401
        names, after = set(), ""
        while after is not None:
            query = f"limit=1000&after={after}" if after else "limit=1000"
            _, listed = await request(pool, "GET", f"/admin/keys?{query}")
            names |= {each["name"] for each in listed["data"]}
            after = listed["next"]
        assert len(names) == MANY + 2  # the coordinator's own, and the last


async def test_keys_and_tokens_are_in_no_log_and_in_no_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with besieged(tmp_path, caplog) as pool:
        key = await make_key(pool)
        _, token = await request(pool, "POST", "/admin/tokens", {"name": "lab"})
        await request(pool, "GET", "/v1/models", key=key)
        await request(pool, "GET", "/v1/models", key=key + "x")
        async with join(pool, token=token["token"]):
            await pool.wait_joined()
            await request(pool, "DELETE", "/admin/tokens/lab")
            await pool.wait_joined(0)
        await revoke(pool)

    files = b"".join(each.read_bytes() for each in tmp_path.glob("shoal.db*"))  # noqa: ASYNC240  # nothing runs
    for secret in (key, token["token"]):
        assert secret not in caplog.text
        assert secret.encode() not in files


HIGH = {"x-shoal-priority": "high"}
COMMIT = {
    "job_type": "LLM_INFER",
    "user_id": "ada",
    "payload": {"prompt": "hi", "model": "m1"},
}
SUBMISSIONS: dict[str, dict[str, Any]] = {
    CHAT: body(),
    OLD_CHAT: body(),
    "/v1/jobs/commit/fast": COMMIT,
    "/v1/jobs/commit/cheap": COMMIT,
}


async def test_key_cannot_overtake_others_beyond_its_priority(
    pool: Pool, node: Node, subtests: pytest.Subtests
) -> None:
    limited = await make_key(pool, "limited", priority_max="normal")
    free = await make_key(pool, "free")

    for path in SUBMISSIONS:
        with subtests.test(path=path):
            refused = await submitted(pool, limited, path, HIGH)
            # 200 is the only status of one of them.
            assert refused == (200 if path == OLD_CHAT else 403, "")
            assert not pool.hub.pool.jobs

            for key, headers, priority in (
                (limited, {}, "normal"),
                (limited, {"x-shoal-priority": "low"}, "low"),
                (free, HIGH, "high"),
            ):
                assert await submitted(pool, key, path, headers) == (200, priority)


async def submitted(
    pool: Pool, key: str, path: str, headers: dict[str, str]
) -> tuple[int, str]:
    """Submit a job; return the status if it is refused, or 200 and its priority."""
    pending = asyncio.create_task(
        pool.session.post(
            pool.url + path,
            json=SUBMISSIONS[path],
            headers=pool.headers(key) | headers,
        )
    )
    await eventually(lambda: bool(pool.hub.pool.jobs) or pending.done())
    if not pool.hub.pool.jobs:
        return (await pending).status, ""
    (job,) = (each.job for each in pool.hub.pool.jobs.values())
    pool.hub.cancel(job.id, "enough seen")
    await pending
    await eventually(lambda: not pool.hub.pool.jobs)
    return 200, job.priority.name.lower()
