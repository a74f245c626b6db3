"""An engine that costs next to nothing: OpenAI's API over prepared bytes.

The question says how the answer comes: ``burst`` in one write, ``paced`` in a write for
each chunk, ``held`` as one chunk and then nothing until the client leaves.  What begins
with ``again`` is paced since it was first asked: whoever asks once more gets at once
what is due.  Others, as a worker asks to try its engine, are as ``burst``.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

CHUNKS = 64  # of an answer
PACE = 0.04  # seconds between the chunks of a paced answer
TEXT = " token"  # of each chunk

_asked: dict[str, float] = {}  # when each question of ``again`` came first
_SSE = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_HEAD = {"id": "chatcmpl-1", "created": 1, "model": "m"}
_USAGE = {"prompt_tokens": 9, "completion_tokens": CHUNKS, "total_tokens": 9 + CHUNKS}


def _event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    chunk = _HEAD | {"object": "chat.completion.chunk", "choices": [choice]}
    return f"data: {json.dumps(chunk)}\n\n".encode()


def _whole() -> bytes:
    message = {"role": "assistant", "content": TEXT * CHUNKS}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    answer = {"object": "chat.completion", "choices": [choice], "usage": _USAGE}
    return json.dumps(_HEAD | answer).encode()


FIRST = _event({"role": "assistant", "content": TEXT})
NEXT = _event({"content": TEXT})
USAGE = json.dumps(
    _HEAD | {"object": "chat.completion.chunk", "choices": [], "usage": _USAGE}
).encode()
LAST = _event({}, "stop") + b"data: " + USAGE + b"\n\ndata: [DONE]\n\n"
BURST = FIRST + NEXT * (CHUNKS - 1) + LAST
WHOLE = _whole()
MODELS = {"object": "list", "data": [{"id": "m", "object": "model"}]}


async def chat(request: web.Request) -> web.StreamResponse:
    asked = await request.json()
    if not asked.get("stream"):
        return web.Response(body=WHOLE, content_type="application/json")
    response = web.StreamResponse(headers=_SSE)
    await response.prepare(request)
    question = asked["messages"][-1]["content"]
    if question.startswith("again"):
        now = asyncio.get_running_loop().time()
        await _paced(response, _asked.setdefault(question, now))
    else:
        await WAYS.get(question, _burst)(response)
    return response


async def _burst(response: web.StreamResponse) -> None:
    # With its end: whoever has read the last event may hang up at once.
    await response.write_eof(BURST)


async def _paced(response: web.StreamResponse, began: float | None = None) -> None:
    loop = asyncio.get_running_loop()
    if began is None:
        began = loop.time()
    for number, chunk in enumerate([FIRST, *[NEXT] * (CHUNKS - 1)], 1):
        await response.write(chunk)
        # By the clock, so that an engine that is late does not slow down for good.
        await asyncio.sleep(began + number * PACE - loop.time())
    await response.write(LAST)


async def _held(response: web.StreamResponse) -> None:
    await response.write(FIRST)
    await asyncio.Event().wait()  # cancelled when the client leaves


WAYS = {"burst": _burst, "paced": _paced, "held": _held}


async def models(request: web.Request) -> web.Response:
    return web.json_response(MODELS)


@asynccontextmanager
async def serving() -> AsyncIterator[int]:
    """Serve within the block; yield the port."""
    app = web.Application()
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat),
            web.get("/v1/models", models),
            web.get("/health", models),
        ]
    )
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def main() -> None:
    async with serving() as port:
        print(json.dumps({"port": port}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(main())
