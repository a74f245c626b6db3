"""A receiver of webhooks."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from standardwebhooks import Webhook, WebhookVerificationError


@dataclass(slots=True)
class Receiver:
    """A real HTTP server that records its requests.

    It answers with ``statuses`` in turn and then repeats the last one; ``None`` is no
    answer at all.
    """

    url: str = ""
    statuses: list[int | None] = field(default_factory=lambda: [200])
    requests: list[tuple[Mapping[str, str], bytes]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)  # as they were sent
    open: int = 0
    open_most: int = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append((dict(request.headers), await request.read()))
        self.paths.append(request.raw_path)
        self.open += 1
        self.open_most = max(self.open_most, self.open)
        try:
            status = self.statuses[0]
            if len(self.statuses) > 1:
                self.statuses.pop(0)
            if status is None:
                await asyncio.Event().wait()
            assert status is not None
            headers = {"Location": self.url} if 300 <= status < 400 else {}
            return web.Response(status=status, headers=headers)
        finally:
            self.open -= 1

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.requests]


@asynccontextmanager
async def run_receiver(*statuses: int | None) -> AsyncIterator[Receiver]:
    """Receive on 127.0.0.1 within the block."""
    receiver = Receiver(statuses=[*statuses] or [200])
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", receiver.answer)
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook?token=t0p"
        yield receiver
    finally:
        await runner.cleanup()


def verify(headers: Mapping[str, str], body: bytes, key: bytes) -> bool:
    """Check a signature as a receiver does, with the library of the specification.

    It also refuses a message that was signed more than five minutes ago.
    """
    try:
        Webhook(key).verify(body, dict(headers), json_parse=False)
    except WebhookVerificationError:
        return False
    return True
