"""A node and an API server written from GrandSage's document alone."""

import asyncio
from typing import Any

import pytest
from aiohttp import ClientSession, WSMsgType

from documents.grandsage import ApiServer, Node
from documents.serving import at_any_path, beside, chat, workers_of
from live.programs import PATIENCE, TINY, TOKEN, Programs
from models.tiny_answers import ANSWERS

STORY = "Tell me a story."


def numbered(task: dict[str, Any]) -> list[str]:
    """Answer with what the task is about."""
    return ["The answer ", f"to {len(task['messages'])} messages."]


@pytest.mark.short
async def test_a_node_joins_and_answers_chats(programs: Programs) -> None:
    pool = programs.serve()
    node = Node(pool.url, TOKEN, numbered)

    async with asyncio.timeout(PATIENCE), beside(node.run()):
        await workers_of(pool)
        said = [await chat(pool, "model_name", "hello") for _ in range(3)]

    assert said == ["The answer to 1 messages."] * 3
    assert node.warnings == []


async def test_a_node_without_work_stays(programs: Programs) -> None:
    pool = programs.serve("--grandsage-silence", "5")
    node = Node(pool.url, TOKEN, numbered)

    async with asyncio.timeout(PATIENCE), beside(node.run()) as running:
        await asyncio.sleep(11)
        assert not running.done()
        assert await chat(pool, "model_name", "hello") == "The answer to 1 messages."


async def test_a_node_that_answers_no_pings_is_lost(programs: Programs) -> None:
    pool = programs.serve("--grandsage-silence", "0.5")
    query = f"token={TOKEN}&model=m&max_concurrency=1&name=n"

    async with (
        asyncio.timeout(PATIENCE),
        ClientSession() as session,
        session.ws_connect(f"{pool.url}?{query}", autoping=False) as socket,
    ):
        assert (await socket.receive()).type is WSMsgType.PING
        await workers_of(pool, 0)


async def test_a_task_at_which_a_node_fails_is_answered_by_another(
    programs: Programs,
) -> None:
    pool = programs.serve()

    def fail(task: dict[str, Any]) -> list[str]:
        raise MemoryError

    failing = Node(pool.url, TOKEN, fail, name="one")
    async with asyncio.timeout(PATIENCE), beside(failing.run()) as running:
        await workers_of(pool)
        asking = asyncio.create_task(chat(pool, "model_name", "hello"))
        await running
        async with beside(Node(pool.url, TOKEN, numbered, name="other").run()):
            assert await asking == "The answer to 1 messages."


async def test_a_worker_serves_an_api_server(programs: Programs) -> None:
    server = ApiServer()
    task = {
        "state": 0,
        "id": 123,
        "system": "",
        "messages": ["ping"],
        "max_new_tokens": 400,
        "temperature": 0,
        "created_at": 1633028302,
    }

    async with asyncio.timeout(PATIENCE), at_any_path(server.handle) as address:
        programs.run(
            *("join", f"ws://{address}", "--wire", "grandsage", "--json"),
            *("--token", "token_value", "--name", "node_name"),
            *("--model", f"tiny={TINY}"),
        )
        await server.connected.wait()
        assert await server.ask(**task) == ANSWERS["ping"]
        said = await asyncio.gather(
            server.ask(**task | {"id": 0}),
            server.ask(**task | {"id": 124, "messages": [STORY]}),
        )

    assert list(said) == [ANSWERS["ping"], ANSWERS[STORY]]
    assert server.warnings == []
    (node,) = server.nodes
    assert node.pop("max_concurrency").isdigit()
    assert node == {"token": "token_value", "model": "tiny", "name": "node_name"}
