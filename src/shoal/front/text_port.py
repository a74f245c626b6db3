"""Receives what workers send past the hub, for the streams of all fronts of a machine.

A worker reaches any of the fronts, which passes pieces for another one on to it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from aiohttp import web

from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import TextSent
from shoal.front.channel import Channel
from shoal.front.linked_jobs import NO_HUB, LinkedJobs
from shoal.protocols.seam.session import CloseCode
from shoal.protocols.shoal.codec import MessageDecoder
from shoal.protocols.shoal.text import (
    TEXT_MAX,
    TextHello,
    TextReceiver,
    text_ticket,
)
from shoal.transports import websocket
from shoal.transports.clock import Clock
from shoal.transports.driver import Driver
from shoal.transports.link_encryption import encrypt_accepted
from shoal.transports.strangers import Strangers
from shoal.transports.websocket import WebSocketLink

NAME_SIZE = 8  # bytes of a front's name, with which those of its routes begin
WAITING_MAX = 10_000  # messages for a front that is being connected to
IDLE_MAX = 60.0  # seconds without a message or a pong, until a worker is lost
DECODER = MessageDecoder(frozenset({TextSent}))

log = logging.getLogger("shoal.front")


class TextPort:
    """One front's end; ``name`` is its name, and ``folder`` has the fronts' sockets."""

    def __init__(
        self,
        name: bytes,
        folder: Path,
        jobs: LinkedJobs,
        clock: Clock,
        strangers: Strangers,
    ) -> None:
        self._name = name
        self._folder = folder
        self._jobs = jobs
        self._clock = clock
        self._strangers = strangers
        self._serving: set[asyncio.Task[None]] = set()
        # The other fronts by their names, or what waits for a connection to them.
        self._others: dict[bytes, Channel | list[TextSent]] = {}

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Accept pieces from other fronts for the length of the block."""
        loop = asyncio.get_running_loop()
        path = self._socket(self._name)
        server = await loop.create_unix_server(self._channel, path)
        try:
            yield
        finally:
            server.close()
            path.unlink(missing_ok=True)
            for each in self._serving:
                each.cancel()
            for other in self._others.values():
                if isinstance(other, Channel):
                    other.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve the WebSocket of a worker, to its end."""
        if not self._jobs.text_secret:
            raise web.HTTPServiceUnavailable(text=f"{NO_HUB}\n")
        link, response = await websocket.accept(
            *(request, {}, TEXT_MAX, self._strangers, IDLE_MAX)
        )
        # In a task of its own, because aiohttp cancels a handler whose connection is
        # lost, before the last messages are read.
        serving = asyncio.get_running_loop().create_task(
            self._strangers.meter(lambda: self._serve(link), link.charge)
        )
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        self._jobs.upgraded += 1
        try:
            await asyncio.shield(serving)
        finally:
            self._jobs.upgraded -= 1
        return response

    async def _serve(self, link: WebSocketLink) -> None:
        try:
            await encrypt_accepted(link)
        except PeerError as error:
            await link.close(CloseCode.PROTOCOL_ERROR, str(error))
            return
        receiver = TextReceiver(lambda name: text_ticket(self._jobs.text_secret, name))

        def on_message(message: TextHello | TextSent) -> None:
            if isinstance(message, TextHello):
                driver.admit()
            else:
                self._deliver(message)

        driver = Driver[TextHello | TextSent, object](
            receiver, link, self._clock, on_message
        )
        end = await driver.run()
        log.debug("text link ended peer=%s reason=%r", link.peer, end.reason)

    def _deliver(self, sent: TextSent) -> None:
        name = sent.name[:NAME_SIZE]
        if name == self._name:
            self._jobs.receive_text(sent)
        elif (other := self._others.get(name)) is None:
            self._connect(name, sent)
        elif isinstance(other, list):
            if len(other) < WAITING_MAX:
                other.append(sent)
        elif not other.is_congested:  # else its streams ask the hub for what is lost
            other.send(sent)

    def _connect(self, name: bytes, first: TextSent) -> None:
        """Connect to another front, and send it what comes until then."""
        waiting = self._others[name] = [first]

        def on_open(opened: Channel) -> None:
            self._others[name] = opened
            for sent in waiting:
                opened.send(sent)

        async def connect() -> None:
            loop = asyncio.get_running_loop()
            make, path = partial(self._channel, on_open), str(self._socket(name))
            try:
                await loop.create_unix_connection(make, path)
            except OSError:  # it has ended, and its streams with it
                self._others.pop(name, None)

        connecting = asyncio.get_running_loop().create_task(connect())
        self._serving.add(connecting)
        connecting.add_done_callback(self._serving.discard)

    def _channel(
        self, on_open: Callable[[Channel], None] = lambda channel: None
    ) -> Channel:
        def begin(channel: Channel) -> Callable[[TextSent], None]:
            on_open(channel)
            return self._jobs.receive_text

        return Channel(DECODER, begin, self._on_lost)

    def _on_lost(self, lost: Channel) -> None:
        for name, other in [*self._others.items()]:
            if other is lost:
                del self._others[name]

    def _socket(self, name: bytes) -> Path:
        return self._folder / f"text-{name.hex()}"
