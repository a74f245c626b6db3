"""WebSockets of a coordinator that ends."""

import asyncio
from typing import NoReturn

import pytest
from aiohttp import ClientSession, WSMsgType, web

from protocols.contexts import protocol_context
from shoal.app.websocket_router import STOPPING, WebSocketRouter
from shoal.domain.errors import Fenced
from shoal.protocols import discover
from shoal.protocols.seam.admission import AdmissionGrant
from shoal.protocols.seam.session import CloseCode
from shoal.protocols.shoal import WORKER_PATH
from shoal.transports.clock import LoopClock
from shoal.transports.strangers import Strangers


class Anyone:
    """Admits whoever comes."""

    def check(self, address: str) -> None:
        pass

    async def record_use(self, grant: AdmissionGrant) -> None:
        pass


async def never(*_: object) -> NoReturn:
    raise AssertionError("no session is served")


async def test_a_worker_that_comes_to_a_fenced_coordinator_is_sent_away() -> None:
    shoal = discover()["shoal"]
    endpoints = shoal.endpoints(shoal.config(), protocol_context(0.0))
    named = [("shoal", each) for each in endpoints]
    router = WebSocketRouter(LoopClock(), Anyone(), named, never, Strangers())
    app = web.Application()
    app.router.add_get(WORKER_PATH, router.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}{WORKER_PATH}"

    async def fail() -> None:
        raise Fenced("another node has taken over")

    with pytest.RaisesGroup(Fenced):
        async with asyncio.TaskGroup() as tasks:
            router.open(tasks)
            tasks.create_task(fail())
            with pytest.raises(asyncio.CancelledError):
                await asyncio.Event().wait()
            async with ClientSession() as session, session.ws_connect(url) as socket:
                end = await socket.receive()

    assert end.type is WSMsgType.CLOSE
    assert (end.data, end.extra) == (CloseCode.GOING_AWAY, STOPPING)
    await runner.cleanup()
