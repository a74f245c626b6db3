"""What requests without a credential cost, on real connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import ClientSession, web
from yarl import URL

from shoal.transports import http_server
from shoal.transports.loop_share import LoopShare
from shoal.transports.strangers import Strangers
from transports.manual_clock import ManualClock, settle

COST = 2.0  # seconds of an answer


class Site:
    """A server of requests, whose share is 0.1, with 1 s at once."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.share = LoopShare(self.clock, 0.1, 1.0, self.clock.cpu)
        self.strangers = Strangers(share=self.share)
        self.answered = 0
        self.admits = self.releases = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        async def respond() -> web.StreamResponse:
            if self.releases:
                http_server.release(request)
                await asyncio.sleep(0)
            self.clock.used += COST
            await asyncio.sleep(0)
            if self.admits:
                http_server.admit(request.clone(remote="192.0.2.1"))
            self.answered += 1
            return web.Response()

        return await http_server.answer_stranger(
            request, "192.0.2.1", self.strangers, respond
        )

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/", self.answer)
        listener = http_server.http_listener(app, "127.0.0.1", 0, None, self.strangers)
        async with listener as bound:
            yield f"http://127.0.0.1:{bound.port}/"


async def test_requests_without_a_credential_wait_for_their_turn() -> None:
    site = Site()
    async with site.open() as url, ClientSession() as session:
        async with session.get(url):
            pass
        second = asyncio.create_task(session.get(url))
        while not site.share.is_waited_for:  # for the socket
            await settle()
        assert site.answered == 1

        await site.clock.advance(20.0)
        (await second).release()

    assert site.answered == 2


async def test_requests_that_admit_are_paid_back() -> None:
    site = Site()
    site.admits = True
    async with site.open() as url, ClientSession() as session:
        for _ in range(5):
            async with session.get(url):
                pass

    assert site.answered == 5
    assert not site.share.is_spent


async def test_requests_that_another_process_counts_are_not_charged() -> None:
    site = Site()
    site.releases = True
    async with site.open() as url, ClientSession() as session:
        for _ in range(5):
            async with session.get(url):
                pass

    assert site.answered == 5
    assert not site.share.is_spent


async def test_responses_name_no_version() -> None:
    async with Site().open() as url, ClientSession() as session:
        address = URL(url)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"GET / HTTP/1.1\r\nno header\r\n\r\n")
        refused = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        async with session.get(url) as response:
            assert response.headers["Server"] == "shoal"

    assert b" 400 " in refused
    assert b"\r\nServer: shoal\r\n" in refused
