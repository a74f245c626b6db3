"""Forms with a file: how slowly they may come, and whose errors are the client's."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from aiohttp import FormData, web
from aiohttp.test_utils import TestClient, TestServer

from shoal.domain.errors import TooSlow
from shoal.gateway.http import forms
from shoal.gateway.http.forms import (
    PIECE,
    PIECE_TIMEOUT,
    RATE_MIN,
    SendingPace,
    receive_form,
)


class BrokenWriter:
    """Raises an error that is no fault of the client."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def write(self, data: bytes) -> None:
        raise self._error


@pytest.mark.parametrize("error", [ValueError(), AssertionError(), RuntimeError()])
async def test_errors_of_the_writer_are_not_the_forms(error: Exception) -> None:
    raised: list[Exception] = []

    async def receive(request: web.Request) -> web.Response:
        with pytest.raises(type(error)) as caught:
            await receive_form(request, BrokenWriter(error))
        raised.append(caught.value)
        return web.Response()

    app = web.Application()
    app.router.add_post("/", receive)
    form = FormData()
    form.add_field("file", b"\0", filename="a.wav")
    async with TestClient(TestServer(app)) as client:
        response = await client.post("/", data=form)

    assert (response.status, raised) == (200, [error])


def test_client_may_take_longer_as_it_sends_more() -> None:
    pace = SendingPace()
    assert pace.allowance == PIECE_TIMEOUT

    pace.waited = PIECE_TIMEOUT + 99.0
    assert pace.allowance < 0.0
    pace.received = 100 * RATE_MIN
    assert pace.allowance == 1.0
    pace.received *= 9
    assert pace.allowance == PIECE_TIMEOUT


class Discard:
    """Takes a file, and keeps nothing."""

    async def write(self, data: bytes) -> None:
        pass


async def test_client_that_stops_sending_is_too_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forms, "PIECE_TIMEOUT", 0.01)
    refused = asyncio.Event()

    async def receive(request: web.Request) -> web.Response:
        with pytest.raises(TooSlow, match="bytes a second"):
            await receive_form(request, Discard())
        refused.set()
        return web.Response()

    async def beginning() -> AsyncIterator[bytes]:
        yield b"begin"
        await refused.wait()

    app = web.Application()
    app.router.add_post("/", receive)
    form = FormData()
    form.add_field("file", beginning(), filename="a.wav")
    async with TestClient(TestServer(app)) as client:
        response = await client.post("/", data=form)

    assert response.status == 200


SLOW_PIECE = 40 * RATE_MIN


@dataclass
class SlowClient:
    """Sends SLOW_PIECE every 20 s, on a clock that skips them; sees what arrives."""

    skipped: float = 0.0
    ended: bool = False
    _arrived: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def pieces(self) -> AsyncIterator[bytes]:
        for number in range(10):
            # The reader keeps some back, as the end of the part may be in it.
            while self._arrived < number * SLOW_PIECE - PIECE:
                if self.ended:
                    return
                self._changed.clear()
                await self._changed.wait()
            self.skipped += 20.0
            yield bytes(SLOW_PIECE)

    async def write(self, data: bytes) -> None:
        self._arrived += len(data)
        self._changed.set()

    def end(self) -> None:
        self.ended = True
        self._changed.set()


@pytest.mark.parametrize(
    ("rate", "accepted"), [(RATE_MIN, True), (4 * RATE_MIN, False)]
)
async def test_client_below_the_minimal_rate_is_too_slow(
    rate: int, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "RATE_MIN", rate)
    client = SlowClient()
    loop = asyncio.get_running_loop()
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + client.skipped)
    refused = False

    async def receive(request: web.Request) -> web.Response:
        nonlocal refused
        try:
            await receive_form(request, client)
        except TooSlow:
            refused = True
        client.end()
        return web.Response()

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/", receive)
    form = FormData()
    form.add_field("file", client.pieces(), filename="a.wav")
    async with TestClient(TestServer(app)) as session:
        await session.post("/", data=form)

    assert refused is not accepted
