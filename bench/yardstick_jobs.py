"""The least that a relay of jobs to Dispatch workers can do, on bare aiohttp.

No records, no keys, no prices, no receipts looked at: a job goes to the next idle
worker, and its result is kept in a dictionary.  What Shoal costs beyond this is what it
does beyond this.
"""

import asyncio
import itertools
import json
from collections import deque
from typing import Any

from aiohttp import WSMsgType, web


class Relay:
    def __init__(self) -> None:
        self._idle: deque[web.WebSocketResponse] = deque()
        self._waiting: deque[str] = deque()
        self._jobs: dict[str, Any] = {}
        self._done: dict[str, asyncio.Event] = {}
        self._ended = 0
        self._ids = itertools.count(1)

    async def worker(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() != "websocket":
            raise web.HTTPNotFound
        socket = web.WebSocketResponse(compress=False)
        await socket.prepare(request)
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                break
            content = json.loads(message.data)
            if content["type"] == "register":
                await socket.send_str('{"type":"register_ack","status":"ok"}')
            else:
                self._jobs[content["job_id"]] = content["output"]
                self._done[content["job_id"]].set()
                self._ended += 1
            self._idle.append(socket)
            await self._give()
        if socket in self._idle:
            self._idle.remove(socket)
        return socket

    async def commit(self, request: web.Request) -> web.Response:
        body = await request.json()
        id_ = f"job{next(self._ids)}"
        self._jobs[id_] = body["payload"]
        self._done[id_] = asyncio.Event()
        self._waiting.append(id_)
        await self._give()
        return web.json_response({"job_id": id_}, status=201)

    async def job(self, request: web.Request) -> web.Response:
        id_ = request.match_info["id"]
        await self._done[id_].wait()
        return web.json_response({"status": "completed", "result": self._jobs[id_]})

    async def ended(self, request: web.Request) -> web.Response:
        return web.json_response({"size": self._ended})

    async def _give(self) -> None:
        while self._idle and self._waiting:
            id_ = self._waiting.popleft()
            message = {
                "type": "job_assign",
                "job_id": id_,
                "job_type": "TASK",
                "payload": self._jobs[id_],
            }
            await self._idle.popleft().send_str(json.dumps(message))


async def main() -> None:
    relay = Relay()
    app = web.Application()
    app.add_routes(
        [
            web.get("/", relay.worker),
            web.get("/v1/log", relay.ended),
            web.get("/v1/jobs/{id}", relay.job),
            web.post("/v1/jobs/commit/{tier}", relay.commit),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(main())
