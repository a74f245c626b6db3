"""Limits on slow bodies and on many bodies."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any

import pytest

from gateway.keys import CHAT, make_key, request
from gateway.serving import Pool, eventually
from shoal.domain.ids import JobId

pytestmark = pytest.mark.shared_pool

PATH = "/v1/chat/completions"
MEGABYTE = 1 << 20


class SlowBody:
    """A body that arrives byte by byte, on demand, and never ends."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._rest = asyncio.Event()
        self.begun = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at in range(len(self._data) - 1):
            yield self._data[at : at + 1]
        self.begun.set()
        await self._rest.wait()
        yield self._data[-1:]

    def finish(self) -> None:
        self._rest.set()


async def post(pool: Pool, path: str, body: Any, key: str = "") -> tuple[int, Any]:
    headers = pool.headers(key) if key else pool.headers()
    if isinstance(body, bytes):
        body = BytesIO(body)
    async with pool.session.post(pool.url + path, data=body, headers=headers) as got:
        return got.status, await got.json(content_type=None)


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        (PATH, 408, {"code": "request_timeout", "type": "invalid_request_error"}),
        ("/v1/embeddings", 408, {"code": "request_timeout"}),
        ("/admin/keys", 408, {"code": "request_timeout"}),
    ],
)
async def test_slow_body_times_out(
    pool: Pool,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    status: int,
    said: dict[str, str],
) -> None:
    monkeypatch.setattr("shoal.gateway.http.body.BODY_TIMEOUT", 0.1)
    assert pool.gateway is not None

    got, answer = await post(pool, path, SlowBody(b'{"model": "m1"'))

    assert got == status
    assert answer["error"].items() >= said.items()
    assert "did not arrive within 0.1 s" in answer["error"]["message"]
    await eventually(lambda: pool.gateway.bodies.held_bytes == 0)  # type: ignore[union-attr]  # see above


async def test_form_in_memory_times_out_however_often_a_byte_comes(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.gateway.http.body.BODY_TIMEOUT", 0.1)
    assert pool.gateway is not None
    bodies = pool.gateway.bodies
    body = SlowBody(
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="x.mp3"\r\n'
        b"\r\nsound\r\n--b--\r\n"
    )
    form = pool.headers() | {"Content-Type": "multipart/form-data; boundary=b"}

    async with pool.session.post(
        f"{pool.url}/v1/audio/transcriptions", data=body, headers=form
    ) as got:
        answer = await got.json()

    assert got.status == 408
    assert "did not arrive within 0.1 s" in answer["error"]["message"]
    await eventually(lambda: bodies.held_bytes == 0)


async def test_grandsage_api_reports_a_slow_body_in_a_line(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.gateway.http.body.BODY_TIMEOUT", 0.1)

    answer = await post(pool, "/api/chat", SlowBody(b'{"model": "m1"'))

    assert answer == (200, {"err": "request timeout"})


async def test_grandsage_api_accepts_small_bodies_only(pool: Pool) -> None:
    answer = await post(pool, "/api/chat", b"[" + b"[]," * MEGABYTE + b"1]")

    assert answer == (200, {"err": "request too large"})


async def test_total_size_of_bodies_is_limited(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.gateway.http.body.BODIES_MAX", 3 * MEGABYTE)
    assert pool.gateway is not None
    bodies = pool.gateway.bodies
    large = json.dumps(CHAT | {"metadata": "x" * 2 * MEGABYTE}).encode()
    async with pool.node() as node:
        await pool.wait_joined()
        # It counts until it is answered, although it was decoded long before.
        first = asyncio.create_task(post(pool, PATH, large))
        await node.task()
        assert bodies.held_bytes == len(large)

        status, answer = await post(pool, PATH, large)
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        small = asyncio.create_task(post(pool, PATH, json.dumps(CHAT)))
        await node.answer("small", number=1)
        assert (await small)[0] == 200

        await node.answer("large")
        assert (await first)[0] == 200
        await eventually(lambda: bodies.held_bytes == 0)
        again = asyncio.create_task(post(pool, PATH, large))
        await node.answer("again", number=2)
        assert (await again)[0] == 200


async def test_one_key_may_hold_a_part_of_all_bodies(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.gateway.http.body.BODIES_OF_KEY_MAX", 3 * MEGABYTE)
    other = await make_key(pool, "other")
    large = json.dumps(CHAT | {"metadata": "x" * 2 * MEGABYTE}).encode()
    async with pool.node() as node:
        await pool.wait_joined()
        first = asyncio.create_task(post(pool, PATH, large))
        await node.task()

        status, answer = await post(pool, PATH, large)
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert "of this key" in answer["error"]["message"]
        theirs = asyncio.create_task(post(pool, PATH, large, key=other))
        await node.answer("theirs", number=1)
        assert (await theirs)[0] == 200

        await node.answer("large")
        assert (await first)[0] == 200


async def test_body_of_a_disconnected_client_is_released(pool: Pool) -> None:
    assert pool.gateway is not None
    bodies = pool.gateway.bodies
    trickle = SlowBody(b"x" * 1000)
    asking = asyncio.create_task(post(pool, PATH, trickle))
    await trickle.begun.wait()
    await eventually(lambda: bodies.held_bytes > 0)

    asking.cancel()

    await eventually(lambda: bodies.held_bytes == 0)


@pytest.mark.parametrize("path", ["/admin/keys", "/admin/tokens"])
async def test_slow_body_does_not_outlive_its_key(pool: Pool, path: str) -> None:
    key = await make_key(pool, "chief", scope="admin")
    trickle = SlowBody(b'{"name": "heir"}')
    sending = asyncio.create_task(post(pool, path, trickle, key))
    await trickle.begun.wait()
    # It is authenticated by now, as are later requests.
    assert (await request(pool, "GET", "/v1/models", key=key))[0] == 200

    assert (await request(pool, "DELETE", "/admin/keys/chief"))[0] == 200
    trickle.finish()

    status, answer = await sending
    assert (status, answer["error"]["code"]) == (401, "revoked_api_key")
    _, listed = await request(pool, "GET", path)
    assert "heir" not in {each["name"] for each in listed["data"]}


@pytest.mark.own_pool
async def test_awaited_result_is_not_sent_to_a_revoked_key(
    pool: Pool,
) -> None:
    key = await make_key(pool, "chief", scope="admin")
    async with pool.node() as node:
        await pool.wait_joined()
        asking = asyncio.create_task(post(pool, PATH, json.dumps(CHAT)))
        await node.task()
        waiting = asyncio.create_task(request(pool, "GET", f"{PATH}/job1", key=key))
        answer = pool.hub._answers[JobId("job1")]
        await eventually(lambda: len(answer._readings) == 2)

        assert (await request(pool, "DELETE", "/admin/keys/chief"))[0] == 200
        await node.answer("a")

        assert (await asking)[0] == 200
        status, refused = await waiting
        assert (status, refused["error"]["code"]) == (401, "revoked_api_key")


async def test_repeated_revocation_does_not_affect_the_next_key(pool: Pool) -> None:
    await make_key(pool, "alice")
    _, old = await request(pool, "DELETE", "/admin/keys/alice")
    key = await make_key(pool, "alice")
    async with pool.node() as node:
        await pool.wait_joined()
        asking = asyncio.create_task(post(pool, PATH, json.dumps(CHAT), key))
        await node.task()

        assert (await request(pool, "DELETE", f"/admin/keys/{old['id']}"))[0] == 200
        await node.answer("a")

        assert (await asking)[0] == 200


async def test_compressed_body_is_read_to_its_end(pool: Pool) -> None:
    body = json.dumps(CHAT | {"metadata": "x" * 2 * MEGABYTE}).encode()
    data = gzip.compress(b"") + gzip.compress(body, 1)
    headers = pool.headers() | {"Content-Encoding": "gzip"}
    async with pool.node() as node:
        await pool.wait_joined()
        asking = asyncio.create_task(
            pool.session.post(pool.url + PATH, data=data, headers=headers)
        )
        await node.answer("whole")

        async with await asking as answer:
            assert answer.status == 200
