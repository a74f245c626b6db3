"""A real coordinator under attack, and its invariants afterwards."""

import asyncio
import gc
import json
import logging
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import CoroutineType
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from aiohttp import ClientSession
from yarl import URL

from gateway.serving import KEY, Node, Pool, eventually
from harness.databases import put_new_database
from shoal.app.server import run_coordinator
from shoal.config import ServeConfig
from shoal.protocols.grandsage import Config

TOKEN = "join-token-that-no-log-may-hold"
PROMPT = "prompt-that-no-log-may-hold"
ANSWER = "answer-that-no-log-may-hold"
SECRETS = (KEY, TOKEN, PROMPT, ANSWER)

CHAT = "/v1/chat/completions"
OLD_CHAT = "/api/chat"
HONEST = "honest"  # a model that no attacker has


@asynccontextmanager
async def besieged(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    *,
    silence: float = 30.0,
    drain: float = 5.0,
    wires: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Pool]:
    """Run a coordinator within the block; check it at the end.

    Whatever the block did, honest people are served, nothing is held for nothing, and
    the log has neither errors nor secrets.  ``wires`` holds protocols' configurations
    by name.
    """
    caplog.set_level(logging.DEBUG)
    async with standing(
        folder, silence=silence, drain=drain, wires=wires, **settings
    ) as pool:
        yield pool
    check_log(caplog)


@asynccontextmanager
async def standing(
    folder: Path,
    *,
    silence: float = 30.0,
    drain: float = 5.0,
    wires: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Pool]:
    """Run a coordinator within the block, and check what `besieged` does but the log.

    Several tests may attack it one after the other, each within `attacked`.
    """
    put_new_database(folder / "shoal.db")
    config = ServeConfig(
        port=0,
        data_dir=folder,
        api_key=KEY,
        join_token=TOKEN,
        drain=drain,
        **settings,
    )
    wires = {"grandsage": Config(silence=silence)} | dict(wires or {})
    others = set(tasks_of_the_program())
    with pytest.MonkeyPatch.context() as patch:
        # Hardly any attacker answers a farewell.
        patch.setattr("shoal.transports.websocket.CLOSE_TIMEOUT", 0.1)
        async with run_coordinator(config, wires) as running:
            async with ClientSession() as session:
                pool = Pool(running.url, running.hub, session, ports=running.ports)
                yield pool
                await check_service(pool)
            await check_rest(pool)
    await eventually(lambda: others.issuperset(tasks_of_the_program()))


@asynccontextmanager
async def attacked(pool: Pool, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Pool]:
    """Attack a coordinator within the block, which other tests attack as well.

    Afterwards nothing is held for nothing, and the log has neither errors nor secrets.
    That honest people are served is checked after the last attack.
    """
    caplog.set_level(logging.DEBUG)
    yield pool
    await check_rest(pool)
    check_log(caplog)


@contextmanager
def little_room() -> Iterator[None]:
    """Let the system buffer little between peers and coordinators that start here.

    Otherwise it keeps megabytes for those that do not read, before anything shows.
    """
    create = socket.create_server

    def create_small(*args: Any, **options: Any) -> socket.socket:
        listener = create(*args, **options)
        # Connections have it from the socket that accepts them.
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            listener.setsockopt(socket.SOL_SOCKET, buffer, 4096)
        return listener

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.transports.acceptor.socket.create_server", create_small)
        yield


async def check_service(pool: Pool) -> None:
    """Check that an honest node and its clients find each other."""
    async with join(pool, HONEST, HONEST) as node:
        await eventually(lambda: HONEST in pool.hub.pool.roster.with_model)
        for number, path in enumerate((CHAT, OLD_CHAT)):
            pending = asyncio.create_task(ask(pool, path, HONEST))
            await node.answer(ANSWER[:3], ANSWER[3:], number=number)
            assert ANSWER in (await pending).replace('"}\n{"o":"', "")


async def check_rest(pool: Pool) -> None:
    """Check that no state of jobs and workers remains after all disconnect."""
    hub = pool.hub
    await eventually(lambda: not hub.pool.jobs)
    await eventually(lambda: not hub.pool.workers)
    assert not hub.pool.queued
    assert not hub.pool.queues
    assert not hub.pool.roster.with_model
    assert not hub.pool.roster.available
    await eventually(
        lambda: not (hub._answers or hub._answers._accepting or hub._deadlines._timers)
    )
    await eventually(
        lambda: not (hub._connections._newest or hub._connections._in_pool)
    )


def tasks_of_the_program() -> list[asyncio.Task[Any]]:
    """Return the tasks that no test has started."""
    return [
        task
        for task in asyncio.all_tasks()
        if isinstance(coroutine := task.get_coro(), CoroutineType)
        and "tests" not in Path(coroutine.cr_code.co_filename).parts
        and "pytest_asyncio" not in coroutine.cr_code.co_filename
    ]


def check_log(caplog: pytest.LogCaptureFixture) -> None:
    """Check that the log has no errors and no secrets."""
    gc.collect()  # tasks that failed unseen say so when they are collected
    formatter = logging.Formatter()
    before = [*caplog.get_records("setup"), *caplog.get_records("call")]
    for record in before + caplog.get_records("teardown"):
        line = formatter.format(record)
        assert record.levelno < logging.ERROR, line
        assert not [secret for secret in SECRETS if secret in line], line
        if record.name.startswith("shoal"):
            assert line.isprintable(), line


def port_of(pool: Pool) -> int:
    port = urlsplit(pool.url).port
    assert port is not None
    return port


def address(
    name: str = "n1",
    model: str = "m1",
    slots: str = "8",
    token: str = TOKEN,
    path: str = "/ws",
) -> str:
    """Return the request of a connecting node."""
    given = {"name": name, "model": model, "token": token, "max_concurrency": slots}
    return f"{path}?" + "&".join(f"{k}={quote(v, safe='')}" for k, v in given.items())


@asynccontextmanager
async def join(
    pool: Pool,
    name: str = "n1",
    model: str = "m1",
    slots: str = "8",
    token: str = TOKEN,
) -> AsyncIterator[Node]:
    """Join as a node, and leave when the block ends."""
    # Encoded, for else a question mark in a name would not stay as it was written.
    url = URL(pool.url + address(name, model, slots, token), encoded=True)
    socket = await pool.session.ws_connect(url, max_msg_size=0)
    node = Node(socket)
    reading = asyncio.create_task(node.read())
    try:
        yield node
    finally:
        await socket.close()
        await reading


def body(model: str = "m1", **more: Any) -> dict[str, Any]:
    """Return a request that both APIs accept."""
    return {"model": model, "messages": [{"role": "user", "content": PROMPT}], **more}


async def ask(
    pool: Pool,
    path: str = CHAT,
    model: str = "m1",
    headers: Mapping[str, str] | None = None,
    **more: Any,
) -> str:
    """Send a request as an honest client; return the raw answer."""
    async with pool.session.post(
        pool.url + path,
        data=json.dumps(body(model, **more)),
        headers=pool.headers() | dict(headers or {}),
    ) as response:
        return await response.text()
