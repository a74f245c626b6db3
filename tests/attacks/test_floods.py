"""Nodes that send endlessly, or read nothing."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from attacks.raw import BINARY, PING, TEXT, frame, upgraded
from attacks.siege import (
    CHAT,
    OLD_CHAT,
    TOKEN,
    address,
    ask,
    besieged,
    join,
    little_room,
    standing,
)
from gateway.serving import Pool, eventually
from gateway.shoal_worker import shoal_worker
from harness.speed import scaled
from shoal.domain.vocabulary import Draining

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEAF = "the deaf one"
PING_FLOOD = frame(PING, bytes(125)) * 5000  # more than is kept for who does not read


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing_pool(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Pool]:
    with little_room():
        async with standing(tmp_path_factory.mktemp("coordinator")) as running:
            yield running


@pytest.fixture
def pool(shared_pool: Pool) -> Pool:
    return shared_pool


@pytest_asyncio.fixture(loop_scope="module")
async def impatient(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Pool]:
    """A coordinator with short timeouts for silent nodes."""
    with little_room():
        async with besieged(tmp_path, caplog, silence=scaled(1.0)) as running:
            yield running


@pytest.mark.usefixtures("small_outbox")
async def test_node_with_unread_stops_is_disconnected(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    strays = b"".join(
        frame(BINARY, number.to_bytes(4, "big") + b"x") for number in range(20_000)
    )
    async with upgraded(pool, address(DEAF), deaf=True) as deaf, join(pool) as other:
        await pool.wait_joined(2)
        sending = asyncio.create_task(_send_until(deaf.send, strays))

        await pool.wait_joined(1)
        pending = asyncio.create_task(ask(pool))
        await other.answer("mine")

        assert "mine" in await pending
        deaf.abort()
        await sending

    assert "reason='peer stopped reading'" in caplog.text


async def test_jobs_of_a_node_that_reads_nothing_are_requeued(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Less than the deaf node is given at once, and more than the other one is.
    monkeypatch.setattr("shoal.transports.outbox.OUTBOX_MAX", 1 << 16)
    monkeypatch.setattr("shoal.transports.driver.FLUSH_TIMEOUT", 0.1)
    async with upgraded(pool, address(DEAF, slots="1024"), deaf=True):
        await pool.wait_joined()
        pending = [
            asyncio.create_task(ask(pool, OLD_CHAT, system="x" * 100_000))
            for _ in range(20)
        ]
        await pool.wait_joined(0)
        async with join(pool, slots="4") as other:
            for number in range(20):
                await other.answer("mine", number=number)
            for each in pending:
                assert "mine" in await each


async def test_node_that_reads_nothing_times_out(
    impatient: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.transports.driver.FLUSH_TIMEOUT", 0.1)
    pool = impatient
    async with upgraded(pool, address(DEAF, slots="1024"), deaf=True) as deaf:
        await pool.wait_joined()
        await deaf.send(frame(TEXT, b""))  # a keepalive, so that it owes others
        pinging = asyncio.create_task(_send_until(deaf.send, PING_FLOOD))
        pending = [
            asyncio.create_task(ask(pool, OLD_CHAT, system="x" * 100_000))
            for _ in range(10)
        ]
        await pool.wait_joined(0)
        async with join(pool) as other:
            for number in range(10):
                await other.answer("mine", number=number)
            for each in pending:
                assert "mine" in await each
        deaf.abort()
        await pinging


async def test_node_that_leaves_amid_its_pings_takes_nobody_with_it(pool: Pool) -> None:
    async with upgraded(pool, address(DEAF), deaf=True) as deaf:
        await pool.wait_joined()
        pinging = asyncio.create_task(_send_until(deaf.send, PING_FLOOD))
        await deaf.until_stuck()  # as long as the next pong cannot be written
        deaf.abort()
        await pinging
    await pool.wait_joined(0)

    async with join(pool) as other:
        asking = asyncio.create_task(ask(pool, OLD_CHAT))
        await other.answer("mine")

        assert "mine" in await asking


async def test_pings_do_not_renew_the_lease(impatient: Pool) -> None:
    async with upgraded(impatient) as node:
        await impatient.wait_joined()
        await node.send(frame(TEXT, b""))  # a keepalive, so that it owes others
        while impatient.hub.pool.workers:
            await node.send(frame(PING, b"ping"))
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                await node.reader.readuntil(b"\x8a\x04ping")
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "more"),
    [(CHAT, {"stream": True}), (CHAT, {"stream": False}), (OLD_CHAT, {})],
)
async def test_endless_answer_is_truncated(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, path: str, more: dict[str, Any]
) -> None:
    monkeypatch.setattr("shoal.coordinator.answer.ANSWER_MAX", 200_000)
    async with join(pool) as node:
        await pool.wait_joined()
        pending = asyncio.create_task(ask(pool, path, **more))
        task = await node.task()

        await node.write(task["id"], *["x" * 10_000] * 100)

        answer = await pending
        assert "done" not in answer[-100:]
        assert "DONE" not in answer[-100:]
        assert '"err' in answer
        assert len(answer) < 250_000
        await node.wait_stopped(task["id"])
        again = asyncio.create_task(ask(pool))
        await node.answer("short", number=1)
        assert "short" in await again


async def test_frame_limit_is_one_megabyte(
    pool: Pool,
) -> None:
    async with join(pool) as node, join(pool, "n2") as other:
        await pool.wait_joined(2)
        pending = asyncio.create_task(ask(pool))
        await eventually(lambda: bool(node.tasks or other.tasks))
        first, second = (node, other) if node.tasks else (other, node)
        task = first.tasks[0]

        await first.write(task["id"], "x" * ((1 << 20) - 5))
        await first.write(task["id"], "x" * (1 << 20))
        await second.answer("mine")

        assert "mine" in await pending
        assert first.closed is not None
        assert first.closed[0] == 1009


async def test_arbitrary_bytes_are_valid_json_output(pool: Pool) -> None:
    odd = b"\x00\x1b[2J\xff\xed\xa0\x80\xe2\x80\xa8\xf4\x90\x80\x80"
    odd += b'"\\</script>\r\n\xf0\x9f'
    async with join(pool) as node:
        await pool.wait_joined()
        asked: list[tuple[str, dict[str, Any]]] = [
            (CHAT, {}),
            (OLD_CHAT, {}),
            (CHAT, {"stream": True}),
        ]
        for number, (path, more) in enumerate(asked):
            pending = asyncio.create_task(ask(pool, path, **more))
            task = await node.task(number)
            await node.send(task["id"].to_bytes(4, "big") + odd)
            await node.end(task["id"])

            answer = await pending
            assert "\0" not in answer
            assert "\x1b" not in answer
            for line in filter(None, answer.split("\n")):
                if line != "data: [DONE]":
                    json.loads(line.removeprefix("data: "))


async def test_thousands_of_empty_texts_are_harmless(pool: Pool) -> None:
    async with upgraded(pool) as node, join(pool, "n2", "m2") as other:
        await pool.wait_joined(2)
        await node.send(frame(TEXT) * 5000)
        pending = asyncio.create_task(ask(pool, model="m2"))
        await other.answer("mine")

        assert "mine" in await pending
        assert len(pool.hub.pool.workers) == 2


async def test_stray_ends_affect_nothing_else(pool: Pool) -> None:
    async with join(pool) as node:
        await pool.wait_joined()
        pending = asyncio.create_task(ask(pool))
        task = await node.task()
        for number in range(500):
            if number != task["id"]:
                await node.end(number)
                await node.write(number, "stray")
        await node.answer("mine")
        await node.end(task["id"])
        await node.end(task["id"])

        answer = await pending
        assert "mine" in answer
        assert "stray" not in answer


async def test_one_name_for_many_connections_is_one_worker(pool: Pool) -> None:
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(join(pool)) for _ in range(30)]
        *older, newest = nodes
        await eventually(lambda: all(node.closed for node in older))

        assert {node.closed for node in older} == {(4000, "Bye")}
        assert len(pool.hub.pool.workers) == 1
        pending = asyncio.create_task(ask(pool))
        await newest.answer("mine")
        assert "mine" in await pending
        assert not any(node.tasks for node in older)


async def test_hundreds_of_models_are_forgotten(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.pool.roster.MODEL_MEMORY", 0.0)
    for batch in range(3):
        async with AsyncExitStack() as stack:
            for number in range(20):
                model = f"model {batch} {number} {'x' * 200}"
                await stack.enter_async_context(join(pool, "n", model))
            await pool.wait_joined(20)
            assert "no worker has the model" in await ask(pool, model="model 1 1")
        await pool.wait_joined(0)

    # Those that went in the same moment as the last one are forgotten with the next.
    assert len(pool.hub.pool.roster.models_last_seen) <= 20


async def test_repeated_draining_is_idempotent(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    async with shoal_worker(pool, token=TOKEN) as worker:
        for _ in range(200):
            worker.send(Draining("x" * 900))
        (known,) = pool.hub.pool.workers.values()
        await eventually(lambda: bool(known.draining))
    await pool.wait_joined(0)

    records = [record for record in caplog.records if "Draining" in record.getMessage()]
    assert len(records) == 1


async def _send_until(send: object, data: bytes) -> None:
    assert callable(send)
    for at in range(0, len(data), 1 << 16):
        await send(data[at : at + (1 << 16)])
