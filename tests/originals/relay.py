"""The original relay: forwards to whom a message names, and believes everything."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import WSMsgType, web

APPLE = 978_307_200
FORWARDED = frozenset(
    {
        "offer",
        "answer",
        "iceCandidate",
        "relayOpen",
        "relayReady",
        "relayData",
        "relayClose",
    }
)


class OriginalRelay:
    """Keeps who registered; ``crossed`` is what it forwarded, for it could read it."""

    def __init__(self) -> None:
        self.nodes: dict[str, tuple[web.WebSocketResponse, dict[str, Any]]] = {}
        self.crossed: list[tuple[str, dict[str, Any]]] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve for the length of the block; gives the URL."""
        app = web.Application()
        app.router.add_get("/ws", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"ws://127.0.0.1:{runner.addresses[0][1]}/ws"
        finally:
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=16 << 20, compress=False)
        await socket.prepare(request)
        own = ""
        async for message in socket:
            if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                continue
            try:
                whole = json.loads(message.data)
            except ValueError:
                await _error(socket, "invalid_json", "Could not decode relay message")
                continue
            kind, payload = next(iter(whole.items()))
            payload = payload.get("_0", payload)
            own = await self._take(socket, own, kind, payload)
        if own and self.nodes.get(own, (None,))[0] is socket:
            _, registered = self.nodes.pop(own)
            await self._tell_others(own, "peerLeft", registered)
        return socket

    async def _take(
        self,
        socket: web.WebSocketResponse,
        own: str,
        kind: str,
        payload: dict[str, Any],
    ) -> str:
        if kind == "register":
            own = payload["nodeID"]
            older, _ = self.nodes.get(own, (None, {}))
            self.nodes[own] = (socket, payload)
            if older is not None and older is not socket:
                await older.close(code=1012, message=b"Replaced by newer session")
            ack = {
                "nodeID": own,
                "registeredAt": time.time() - APPLE,
                "ttlSeconds": 300,
            }
            await socket.send_json({"registerAck": ack})
            await self._tell_others(own, "peerJoined", payload)
        elif kind == "discover":
            peers = [
                {
                    "nodeID": node_id,
                    "publicKey": registered["publicKey"],
                    "wgPublicKey": registered.get("wgPublicKey"),
                    "displayName": registered["displayName"],
                    "capabilities": registered["capabilities"],
                    "lastSeen": time.time() - APPLE,
                    "natType": "unknown",
                    "endpoints": [],
                }
                for node_id, (_, registered) in self.nodes.items()
                if node_id != payload["requestingNodeID"]
            ]
            await socket.send_json({"discoverResponse": {"peers": peers}})
        elif kind in FORWARDED:
            self.crossed.append((kind, payload))
            target = self.nodes.get(payload["toNodeID"])
            if target is None:
                why = f"Peer {payload['toNodeID']} is not connected"
                await _error(socket, "peer_not_found", why)
            else:
                await target[0].send_json({kind: payload})
        else:
            await _error(
                socket, "unsupported_message", f"Unsupported relay message: {kind}"
            )
        return own

    async def _tell_others(
        self, node_id: str, kind: str, registered: dict[str, Any]
    ) -> None:
        said = {"nodeID": node_id, "displayName": registered["displayName"]}
        for other, (socket, _) in list(self.nodes.items()):
            if other != node_id:
                await socket.send_json({kind: said})


async def _error(socket: web.WebSocketResponse, code: str, why: str) -> None:
    await socket.send_json({"error": {"code": code, "message": why}})
