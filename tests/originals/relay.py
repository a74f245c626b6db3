"""The original relay: forwards every message to its receiver, without any checks."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import WSMsgType, web

REFERENCE_DATE = 978_307_200
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
    """A relay; ``forwarded`` has the messages that it could read."""

    def __init__(self) -> None:
        self.nodes: dict[str, tuple[web.WebSocketResponse, dict[str, Any]]] = {}
        self.forwarded: list[tuple[str, dict[str, Any]]] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve within the block; yields the URL."""
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
        node_id = ""
        async for message in socket:
            if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                continue
            try:
                message_object = json.loads(message.data)
            except ValueError:
                await _error(socket, "invalid_json", "Could not decode relay message")
                continue
            kind, payload = next(iter(message_object.items()))
            payload = payload.get("_0", payload)
            node_id = await self._receive(socket, node_id, kind, payload)
        if node_id and self.nodes.get(node_id, (None,))[0] is socket:
            _, registered = self.nodes.pop(node_id)
            await self._announce(node_id, "peerLeft", registered)
        return socket

    async def _receive(
        self,
        socket: web.WebSocketResponse,
        node_id: str,
        kind: str,
        payload: dict[str, Any],
    ) -> str:
        if kind == "register":
            node_id = payload["nodeID"]
            older, _ = self.nodes.get(node_id, (None, {}))
            self.nodes[node_id] = (socket, payload)
            if older is not None and older is not socket:
                await older.close(code=1012, message=b"Replaced by newer session")
            ack = {
                "nodeID": node_id,
                "registeredAt": time.time() - REFERENCE_DATE,
                "ttlSeconds": 300,
            }
            await socket.send_json({"registerAck": ack})
            await self._announce(node_id, "peerJoined", payload)
        elif kind == "discover":
            peers = [
                {
                    "nodeID": node_id,
                    "publicKey": registered["publicKey"],
                    "wgPublicKey": registered.get("wgPublicKey"),
                    "displayName": registered["displayName"],
                    "capabilities": registered["capabilities"],
                    "lastSeen": time.time() - REFERENCE_DATE,
                    "natType": "unknown",
                    "endpoints": [],
                }
                for node_id, (_, registered) in self.nodes.items()
                if node_id != payload["requestingNodeID"]
            ]
            await socket.send_json({"discoverResponse": {"peers": peers}})
        elif kind in FORWARDED:
            self.forwarded.append((kind, payload))
            target = self.nodes.get(payload["toNodeID"])
            if target is None:
                text = f"Peer {payload['toNodeID']} is not connected"
                await _error(socket, "peer_not_found", text)
            else:
                await target[0].send_json({kind: payload})
        else:
            await _error(
                socket, "unsupported_message", f"Unsupported relay message: {kind}"
            )
        return node_id

    async def _announce(
        self, node_id: str, kind: str, registered: dict[str, Any]
    ) -> None:
        payload = {"nodeID": node_id, "displayName": registered["displayName"]}
        for other, (socket, _) in list(self.nodes.items()):
            if other != node_id:
                await socket.send_json({kind: payload})


async def _error(socket: web.WebSocketResponse, code: str, text: str) -> None:
    await socket.send_json({"error": {"code": code, "message": text}})
