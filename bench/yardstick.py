"""The least that a relay from GrandSage nodes to HTTP clients can do, on bare aiohttp.

No queue, no records, no keys: one node, tasks sent as they come, a line for each frame.
What Shoal costs beyond this is what it does beyond this.
"""

import asyncio
import itertools
import json

from aiohttp import WSMsgType, web


class Relay:
    def __init__(self) -> None:
        self._node: web.WebSocketResponse | None = None
        self._waiting: dict[int, tuple[list[bytes], asyncio.Event]] = {}
        self._ids = itertools.count(1)

    async def node(self, request: web.Request) -> web.WebSocketResponse:
        self._node = socket = web.WebSocketResponse(compress=False)
        await socket.prepare(request)
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                id_ = int.from_bytes(message.data[:4])
                lines, wake = self._waiting[id_]
                lines.append(message.data[4:])
                wake.set()
        return socket

    async def chat(self, request: web.Request) -> web.StreamResponse:
        await request.json()
        id_ = next(self._ids)
        lines: list[bytes] = []
        wake = asyncio.Event()
        self._waiting[id_] = (lines, wake)
        response = web.StreamResponse()
        await response.prepare(request)
        assert self._node is not None
        await self._node.send_str(json.dumps({"id": id_}))
        while True:
            await wake.wait()
            wake.clear()
            batch = lines[:]
            lines.clear()
            texts = [json.dumps({"o": text.decode()}) for text in batch if text]
            if texts:
                await response.write(("\n".join(texts) + "\n").encode())
            if not batch[-1]:
                del self._waiting[id_]
                await response.write(b'{"done":true}\n')
                return response


async def main() -> None:
    relay = Relay()
    app = web.Application()
    app.add_routes([web.get("/ws", relay.node), web.post("/api/chat", relay.chat)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
    await site.start()
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(main())
