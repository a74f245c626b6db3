"""What the tests of all documents need: a server, a client, and tasks beside them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from aiohttp import ClientSession, web

from live.programs import KEY, Pool

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def beside(running: Coroutine[Any, Any, Any]) -> AsyncIterator[asyncio.Task[Any]]:
    """Run a peer beside the block, and end it with the block."""
    task = asyncio.create_task(running)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds; the caller has a limit."""
    while not condition():  # noqa: ASYNC110  # there is no event to wait for
        await asyncio.sleep(0.05)


async def workers_of(pool: Pool, workers: int = 1) -> None:
    """Wait until the pool has that many workers."""
    while len(await asyncio.to_thread(pool.workers)) != workers:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


@asynccontextmanager
async def at_any_path(handler: Handler) -> AsyncIterator[str]:
    """Serve WebSocket connections; yield the host and port."""
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def chat(pool: Pool, model: str, question: str, **more: Any) -> str:
    """Ask the pool as a client does; return the answer's text."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        **more,
    }
    answer = await post(pool, "/v1/chat/completions", body)
    text: str = answer["choices"][0]["message"]["content"]
    return text


async def post(pool: Pool, path: str, body: Any) -> Any:
    """Post JSON to the pool; return its JSON."""
    return await _request(pool, "POST", path, body)


async def get(pool: Pool, path: str) -> Any:
    """Get JSON from the pool."""
    return await _request(pool, "GET", path)


async def _request(pool: Pool, method: str, path: str, body: Any = None) -> Any:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        ClientSession(headers=headers) as session,
        session.request(method, pool.url + path, json=body) as response,
    ):
        answer = await response.json()
        assert response.status < 300, answer
        return answer
