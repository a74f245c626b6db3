"""The live stream: a snapshot, changes, facts, and its ends."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.browser import browsing
from gateway.keys import CHAT, make_key, request
from gateway.operators.live_client import live
from gateway.serving import KEY, Pool, eventually, serving
from shoal.gateway.operators import live_feed
from shoal.gateway.operators import live_feed as live_endpoint

WORKER = "grandsage:n1/m1"


@pytest.fixture
async def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pool]:
    monkeypatch.setattr(live_feed, "INTERVAL", 0.01)
    async with serving(tmp_path) as running:
        yield running


async def test_first_event_is_the_status_as_operators_read_it(pool: Pool) -> None:
    async with pool.node():
        await pool.wait_joined()
        await request(pool, "POST", "/admin/workers/grandsage%3An1%2Fm1/pause")

        async with live(pool) as page:
            await eventually(lambda: bool(page.heard))

            name, snapshot = page.heard[0]
            _, status = await request(pool, "GET", "/admin/status")
            (worker,) = snapshot["status"]["workers"]
            (now,) = status["workers"]
            assert worker["connected_at"] == pytest.approx(now.pop("connected_at"))
            assert worker == worker | now
            assert name == "snapshot"
            assert snapshot["status"] == status | {"workers": [worker]}
            assert page.response.content_type == "text/event-stream"


async def test_page_follows_a_worker_and_its_job(pool: Pool) -> None:
    async with live(pool) as page, asyncio.TaskGroup() as tasks:
        await eventually(lambda: "snapshot" in page.names)
        async with pool.node() as node:
            await eventually(lambda: WORKER in page.workers)
            assert page.status["models"] == ["m1"]

            chat = request(pool, "POST", "/v1/chat/completions", CHAT)
            asking = tasks.create_task(chat)
            task = await node.task()
            await eventually(lambda: page.workers[WORKER]["busy"] == 1)
            assert page.activity[WORKER]["jobs"] == ["job1"]
            await node.write(task["id"], "some text " * 40)
            await eventually(lambda: page.rate["tokens_per_second"] > 0)
            await node.end(task["id"])
            await asking
            await eventually(lambda: WORKER not in page.activity)
            assert page.workers[WORKER]["busy"] == 0
        await eventually(lambda: not page.workers)
        assert page.status["models"] == []

        assert page.names.count("snapshot") == 1
        await eventually(lambda: page.facts[-1]["fact"] == "WorkerLost")
        facts = [(each["fact"], each["job"], each["worker"]) for each in page.facts]
        assert facts == [
            ("WorkerJoined", None, WORKER),
            ("JobSubmitted", "job1", None),
            ("JobLeased", "job1", WORKER),
            ("JobCompleted", "job1", WORKER),
            ("WorkerLost", None, WORKER),
        ]
        numbers = [each["number"] for each in page.facts]
        assert numbers == sorted(set(numbers))
        assert page.facts[1]["text"] == "submitted by default for m1"


async def test_operators_order_reaches_the_page(pool: Pool) -> None:
    async with pool.node():
        await pool.wait_joined()
        async with live(pool) as page:
            await eventually(lambda: "snapshot" in page.names)

            await request(pool, "POST", "/admin/workers/grandsage%3An1%2Fm1/pause")

            await eventually(lambda: bool(page.status["orders"]))
            assert page.workers[WORKER]["suspension"] == "paused"
            (order,) = page.status["orders"]
            assert (order["state"], order["by"]) == ("paused", "default")


async def test_silence_is_kept_alive(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_endpoint, "KEEPALIVE_EVERY", 0.01)
    async with pool.session.get(
        f"{pool.url}/admin/live", headers=pool.headers()
    ) as response:
        text = b""
        async for data in response.content.iter_any():
            text += data
            if text.count(b"\n\n: keep-alive\n\n") > 1:
                break

    assert text.startswith(b"retry: 2000\n\nevent: snapshot\ndata: {")
    assert b"event: changes" not in text  # nothing changed


@pytest.mark.parametrize("end", ["revoked", "expired"])
async def test_stream_ends_with_its_key(pool: Pool, end: str) -> None:
    wanted = {"expires_in": 0.5} if end == "expired" else {}
    key = await make_key(pool, "eve", scope="admin", **wanted)
    async with live(pool, key) as page, live(pool) as other:
        await eventually(lambda: bool(page.heard and other.heard))

        if end == "revoked":
            await request(pool, "DELETE", "/admin/keys/eve")

        await eventually(lambda: page.ended)
        assert page.names == ["snapshot", "error"]
        assert page.heard[-1][1]["error"]["code"] == f"{end}_api_key"
        assert not other.ended


async def test_stream_ends_when_its_browser_signs_out(pool: Pool) -> None:
    async with browsing(pool.url) as browser:
        await browser.sign_in()
        browsed = replace(pool, session=browser.session)
        async with live(browsed, key="") as page:
            await eventually(lambda: bool(page.heard))

            await browser.sign_out()

            await eventually(lambda: page.ended)
            assert page.names == ["snapshot", "error"]


async def test_closing_the_port_ends_streams_cleanly(pool: Pool) -> None:
    async with live(pool) as page:
        await eventually(lambda: bool(page.heard))

        assert pool.close is not None
        await pool.close()

        await eventually(lambda: page.ended)  # without a ClientPayloadError


@pytest.mark.parametrize("scope", ["read", "use"])
async def test_stream_takes_a_key_that_may_see_all(pool: Pool, scope: str) -> None:
    key = await make_key(pool, scope=scope)

    assert (await request(pool, "GET", "/admin/live", key=key))[0] == 403


async def test_number_of_clients_is_limited(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_feed, "CLIENTS_MAX", 1)
    async with live(pool) as page:
        await eventually(lambda: bool(page.heard))

        assert (await request(pool, "GET", "/admin/live", key=KEY))[0] == 429
