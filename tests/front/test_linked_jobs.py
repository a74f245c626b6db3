"""What a front does with open streams when its hub is gone."""

import asyncio
import re
import sys
from pathlib import Path

import pytest
from aiohttp import ClientResponse

from gateway.chat.test_alike import DIALECTS, Dialect
from gateway.serving import Node, Pool, eventually, serving
from shoal.front.linked_jobs import NO_HUB, STREAM_PATIENCE
from shoal.gateway.metrics.requests import CountedRequests
from transports.manual_clock import ManualClock

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="fronts need Unix sockets"
)


async def asked(pool: Pool, dialect: Dialect) -> ClientResponse:
    """Ask for a stream, and return what is answered."""
    body = dialect.request(stream=True)
    url, headers = pool.url + dialect.path, pool.headers()
    return await pool.session.post(url, json=body, headers=headers)


async def begun(pool: Pool, node: Node, dialect: Dialect) -> ClientResponse:
    """Return a stream whose first text has come."""
    number = len(node.tasks)
    asking = asyncio.create_task(asked(pool, dialect))
    await node.write((await node.task(number))["id"], "Once")
    response = await asking
    seen = b""
    while b"Once" not in seen:
        seen += await response.content.readany()
    return response


@pytest.fixture
def front_clock() -> ManualClock:
    return ManualClock()


async def test_streams_without_a_hub_end_with_an_error(
    tmp_path: Path, front_clock: ManualClock, subtests: pytest.Subtests
) -> None:
    async with (
        serving(tmp_path, front=True, front_clock=front_clock) as pool,
        pool.node() as node,
    ):
        await pool.wait_joined()
        assert pool.front is not None
        streams = {
            name: await begun(pool, node, each) for name, each in DIALECTS.items()
        }
        rests = {
            name: asyncio.create_task(each.read()) for name, each in streams.items()
        }

        waiting = asyncio.create_task(asked(pool, DIALECTS["chat"]))
        await node.task(len(streams))

        pool.front.links.hand_over()
        await eventually(lambda: bool(front_clock.calls))
        await front_clock.advance(STREAM_PATIENCE - 0.1)
        assert not any(each.done() for each in rests.values())
        await front_clock.advance(0.1)

        for name, rest in rests.items():
            with subtests.test(name):
                told = [x for x in (await rest).decode().splitlines() if NO_HUB in x]
                assert len(told) == 1
                assert '"error":' in told[0]
        refused = await waiting
        assert refused.status == 503
        assert NO_HUB in await refused.text()


async def test_a_front_that_stops_serves_until_its_hub_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, front=True) as pool, pool.node() as node:
        await pool.wait_joined()
        assert pool.front is not None
        stream = await begun(pool, node, DIALECTS["chat"])

        pool.front.jobs.stop()
        task = (await node.task())["id"]
        await node.write(task, " more")
        await node.end(task)
        assert b"[DONE]" in await stream.read()
        assert not pool.front.linking.done()
        pool.front.links.hand_over()
        await pool.front.linking

    assert "lost the hub" not in caplog.text


async def test_a_front_that_leaves_says_what_it_counted(tmp_path: Path) -> None:
    async with serving(tmp_path, front=True) as pool:
        front = pool.front
        assert front is not None
        counted: list[CountedRequests] = []
        front.links.on_counted = counted.append

        url, headers = f"{pool.url}/v1/chat/completions", pool.headers()
        async with pool.session.post(url, data=b"{", headers=headers) as response:
            assert response.status == 400
        await front.jobs.leave()
        await eventually(lambda: bool(counted))

        ((values,),) = (each.values for each in counted)
        assert values.labels[-1] == "400"


@pytest.mark.parametrize("soon", [True, False])
async def test_a_front_that_reads_slowly_gets_all_later(
    tmp_path: Path, soon: bool
) -> None:
    """Before the answer ends, or with its end."""
    async with serving(tmp_path, front=True) as pool, pool.node() as node:
        await pool.wait_joined()
        assert pool.front is not None
        stream = await begun(pool, node, DIALECTS["chat"])
        task = (await node.task())["id"]
        (to_front,) = pool.front.links._links
        (answer,) = pool.hub.answers.values()

        to_front.pause_writing()
        await node.write(task, " upon")
        await node.write(task, " a time")
        await eventually(lambda: answer.text == "Once upon a time")
        if soon:
            to_front.resume_writing()
        await node.end(task)
        read = (await stream.read()).decode()
        to_front.resume_writing()

        rest = "".join(re.findall('"content":"([^"]*)"', read))
        assert rest == " upon a time"
        assert "[DONE]" in read
