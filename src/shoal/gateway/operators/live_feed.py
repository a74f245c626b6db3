"""The live feed: one snapshot of the pool a second, encoded once, for all its clients.

Nothing runs without a client.  A client that does not keep up gets a new snapshot
in place of the changes that it missed: they would only grow, and are soon out of date.
So does one that reconnects.

Source: HTML, "Server-sent events".
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from shoal.domain import errors
from shoal.domain.credentials import Scope
from shoal.domain.facts import Fact
from shoal.gateway.context import OperatorsGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.errors import write_events
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.responses import (
    KEEPALIVE_EVERY,
    SSE_KEEPALIVE,
    SSE_TYPE,
    encode_event,
)
from shoal.gateway.operators.event_log import EventLog
from shoal.gateway.operators.pool_view import PoolView
from shoal.gateway.operators.workers import stored_orders
from shoal.transports.clock import Timer

api = Operations()

INTERVAL = 1.0  # seconds between two snapshots
CLIENTS_MAX = 100  # at a time, each with a connection
UNREAD_MAX = 8  # snapshots whose changes wait for one client
EVENTS_PER_LOOK = 200  # of the event log; older ones of the same second are left out


@dataclass(slots=True, eq=False)
class LiveClient:
    """A client of the feed.

    ``signal`` is set when there is something to read, and when the feed or the client's
    access ends.
    """

    caller: ApiCaller
    signal: asyncio.Event = field(default_factory=asyncio.Event)
    unread: deque[bytes] = field(default_factory=deque)
    needs_snapshot: bool = True


class LiveFeed:
    """Looks at the pool as long as it has clients.

    ``interval`` is in seconds.
    """

    def __init__(self, gateway: OperatorsGateway, log: EventLog) -> None:
        self.interval = INTERVAL
        self.closed = False
        self._gateway = gateway
        self._clients: set[LiveClient] = set()
        self._view: PoolView | None = None  # None: there are no clients
        self._timer: Timer | None = None
        self._snapshot = b""  # encoded; empty: none since the last change
        self._log = log
        self._next_event = 0  # the number of the first that was not sent
        gateway.hub.subscribe(self._on_facts)

    @property
    def is_looking(self) -> bool:
        """Whether any client is subscribed."""
        return self._timer is not None

    @asynccontextmanager
    async def subscribe(self, caller: ApiCaller) -> AsyncIterator[LiveClient]:
        """Add a client for the length of the block.  Raises QueueFull, StoreError."""
        orders = await stored_orders(self._gateway) if self._view is None else ()
        if len(self._clients) >= CLIENTS_MAX:
            raise errors.QueueFull(f"{CLIENTS_MAX} clients are listening already")
        if self._view is None:
            self._view = PoolView(self._gateway, orders)
            self._next_event = self._log.next_number
            self._view.orders_changed = True  # perhaps while they were read
            self._look_later()
        client = LiveClient(caller)
        client.signal.set()
        self._clients.add(client)
        try:
            yield client
        finally:
            self._clients.remove(client)
            if not self._clients:
                self._stop()

    async def read(self, client: LiveClient) -> bytes:
        """Return what a client has not read yet; empty if that is nothing.

        Raises KeyRevoked, KeyExpired or SessionEnded if its access has ended.
        """
        client.signal.clear()
        self._gateway.access.ensure_active(client.caller)
        await self._read_orders()
        if not client.needs_snapshot:
            unread = b"".join(client.unread)
            client.unread.clear()
            return unread
        client.needs_snapshot = False
        client.unread.clear()
        assert self._view is not None, "there is a client"
        self._snapshot = self._snapshot or encode_event(
            "snapshot", self._view.snapshot()
        )
        return self._snapshot

    def look(self) -> None:
        """Send the clients what has changed in the pool."""
        if self._view is None:
            return
        self._snapshot = b""
        text = b""
        if (changes := self._view.look()) is not None:
            text = encode_event("changes", changes)
        if events := self._log.since(self._next_event, EVENTS_PER_LOOK):
            text += encode_event("facts", events)
            self._next_event = self._log.next_number
        for client in self._clients:
            if text and not client.needs_snapshot:
                client.unread.append(text)
                if len(client.unread) > UNREAD_MAX:
                    client.unread.clear()
                    client.needs_snapshot = True
            if text or not self._is_valid(client.caller):
                client.signal.set()

    async def on_shutdown(self, app: web.Application) -> None:
        """End the streams of all clients, because the port is being closed."""
        self.closed = True
        for client in self._clients:
            client.signal.set()

    def _look_later(self) -> None:
        clock = self._gateway.clock
        self._timer = clock.call_at(clock.now() + self.interval, self._on_time)

    def _on_time(self) -> None:
        self._look_later()
        self.look()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._view = None
        self._snapshot = b""

    def _on_facts(self, batch: Sequence[Fact]) -> None:
        if self._view is not None:
            self._view.on_facts(batch)

    async def _read_orders(self) -> None:
        """Read operators' orders if they have changed; the next snapshot shows them."""
        view = self._view
        if view is None or not view.orders_changed:
            return
        view.orders_changed = False
        try:
            view.orders = await stored_orders(self._gateway)
        except errors.StoreError:  # the dashboard shows that the store fails
            view.orders_changed = True

    def _is_valid(self, caller: ApiCaller) -> bool:
        try:
            self._gateway.access.ensure_active(caller)
        except errors.Unauthorized:
            return False
        return True


LIVE_FEED = web.AppKey("live_feed", LiveFeed)


RETRY = b"retry: 2000\n\n"  # milliseconds before a browser connects again
WRITTEN_AT_ONCE = 1 << 16  # bytes: a slow client has the time limit for each


@api.get("/admin/live", "Stream the state of the pool", Scope.MONITOR, media=SSE_TYPE)
async def stream_live(request: web.Request, caller: ApiCaller) -> web.StreamResponse:
    feed = request.app[LIVE_FEED]
    async with feed.subscribe(caller) as client:
        return await write_events(request, _texts(feed, client), api.errors)


async def _texts(feed: LiveFeed, client: LiveClient) -> AsyncGenerator[bytes, None]:
    """Yield the feed of a client until the feed or the client's access ends.

    Raises as ``LiveFeed.read``.
    """
    yield RETRY
    while not feed.closed:
        text = await feed.read(client)
        for start in range(0, len(text), WRITTEN_AT_ONCE):
            yield text[start : start + WRITTEN_AT_ONCE]
        try:
            async with asyncio.timeout(KEEPALIVE_EVERY):
                await client.signal.wait()
        except TimeoutError:
            yield SSE_KEEPALIVE
