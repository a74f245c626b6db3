"""The least that a relay between TealeNet's nodes can do, on bare aiohttp.

No signatures, no sessions, no limits: whoever registers is there, and what is for a
node is sent on as it came.  What Shoal costs beyond this is what it does beyond this.
"""

import asyncio
import json
from contextlib import suppress

from aiohttp import WSMsgType, web

nodes: dict[str, web.WebSocketResponse] = {}


async def node(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse(compress=False, max_msg_size=16 << 20)
    await socket.prepare(request)
    node_id = ""
    async for message in socket:
        if message.type is not WSMsgType.TEXT:
            continue
        ((kind, payload),) = json.loads(message.data).items()
        if kind == "register":
            node_id = payload["nodeID"]
            await register(payload, socket)
        elif (target := nodes.get(payload["toNodeID"])) is not None:
            await target.send_str(message.data)
    nodes.pop(node_id, None)
    return socket


async def register(payload: dict, socket: web.WebSocketResponse) -> None:
    node_id = payload["nodeID"]
    joined = {"nodeID": node_id, "displayName": payload["displayName"]}
    text = json.dumps({"peerJoined": joined})
    others = list(nodes.values())
    nodes[node_id] = socket
    ack = {"nodeID": node_id, "registeredAt": 0, "ttlSeconds": 300}
    await socket.send_str(json.dumps({"registerAck": ack}))
    for other in others:
        with suppress(ConnectionError):
            await other.send_str(text)


async def main() -> None:
    app = web.Application()
    app.add_routes([web.get("/ws", node)])
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
