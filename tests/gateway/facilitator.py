"""A facilitator of x402 payments: a scripted real HTTP server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

SOLANA = "solana:EtWTRABZaYq6iMfeYKouRu166VU2xqa1"
FEE_PAYER = "1" * 32


@dataclass(slots=True)
class Facilitator:
    """The requests, and scripted responses: by default success."""

    url: str = ""
    calls: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    network: str = SOLANA
    refuses: str = ""
    settlement: dict[str, Any] = field(default_factory=dict)
    transaction: str = "TX"
    statuses: dict[str, int] = field(default_factory=dict)  # by path, if not 200
    settling: asyncio.Event = field(default_factory=asyncio.Event)
    holds: bool = False  # whether settling waits for ``settling``

    async def supported(self, request: web.Request) -> web.Response:
        extra = {"feePayer": FEE_PAYER} if self.network == SOLANA else None
        kind = {"x402Version": 2, "scheme": "exact", "network": self.network}
        return self._answer(request, {"kinds": [kind | {"extra": extra}]})

    async def verify(self, request: web.Request) -> web.Response:
        await self._note(request)
        if self.refuses:
            refusal = {"isValid": False, "invalidReason": self.refuses}
            return self._answer(request, refusal | {"payer": "PAYER"})
        return self._answer(request, {"isValid": True, "payer": "PAYER"})

    async def settle(self, request: web.Request) -> web.Response:
        await self._note(request)
        if self.holds:
            await self.settling.wait()
        good = {
            "success": True,
            "transaction": self.transaction,
            "network": self.network,
            "payer": "PAYER",
        }
        return self._answer(request, good | self.settlement)

    async def _note(self, request: web.Request) -> None:
        self.calls.append(request.path)
        self.bodies.append(await request.json())

    def _answer(self, request: web.Request, body: object) -> web.Response:
        return web.json_response(body, status=self.statuses.get(request.path, 200))


@asynccontextmanager
async def run_facilitator() -> AsyncIterator[Facilitator]:
    """Run a facilitator on 127.0.0.1 within the block."""
    its = Facilitator()
    app = web.Application()
    app.router.add_get("/supported", its.supported)
    app.router.add_post("/verify", its.verify)
    app.router.add_post("/settle", its.settle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        its.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield its
    finally:
        await runner.cleanup()
