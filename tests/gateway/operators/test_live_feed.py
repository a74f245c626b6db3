"""One look for all clients, and none without; slow clients get snapshots."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.keys import request
from gateway.serving import Pool, eventually, serving
from shoal.domain.credentials import Key, Scope
from shoal.domain.errors import StoreError
from shoal.domain.facts import AccountCredited, WorkerSuspended
from shoal.gateway.context import Gateway, OperatorsGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.operators.live_feed import (
    EVENTS_PER_LOOK,
    UNREAD_MAX,
    LiveClient,
    LiveFeed,
)
from shoal.store.sqlite.database import SqliteStore

CALLER = ApiCaller(Key("", "default", b"", "", Scope.ADMIN, 0.0))


class InterruptedReads(SqliteStore):
    """A store that is interrupted once, when it has read operators' orders."""

    interrupt: Callable[[], Awaitable[None]] | None = None

    async def suspensions(self) -> list[tuple[WorkerSuspended, float]]:
        found = await super().suspensions()
        interrupt, self.interrupt = self.interrupt, None
        if interrupt is not None:
            await interrupt()
        return found


@asynccontextmanager
async def interrupted_pool(
    folder: Path,
) -> AsyncIterator[tuple[Pool, InterruptedReads]]:
    """Run a coordinator with one worker within the block."""
    async with serving(folder, open_store=InterruptedReads) as pool, pool.node():
        await pool.wait_joined()
        assert pool.gateway is not None
        store = pool.gateway.store
        assert isinstance(store, InterruptedReads)
        yield pool, store


async def pause(pool: Pool) -> None:
    path = "/admin/workers/grandsage%3An1%2Fm1/pause"
    assert (await request(pool, "POST", path))[0] == 200


def feed_of(pool: Pool) -> LiveFeed:
    """Return a feed that looks only when it is told to."""
    gateway, log = pool.gateway, pool.log
    assert isinstance(gateway, Gateway)
    assert log is not None
    feed = LiveFeed(gateway.select(OperatorsGateway), log)
    feed.interval = 1e6
    return feed


@asynccontextmanager
async def reading(feed: LiveFeed) -> AsyncIterator[LiveClient]:
    """A client that has read its snapshot."""
    async with feed.subscribe(CALLER) as client:
        assert (await feed.read(client)).startswith(b"event: snapshot\n")
        yield client


def events_in(text: bytes) -> list[str]:
    """Return the lines of the events that were sent."""
    (data,) = (
        each.partition(b"data: ")[2]
        for each in text.strip().split(b"\n\n")
        if each.startswith(b"event: facts\n")
    )
    return [event["text"] for event in json.loads(data)]


async def test_nothing_is_looked_at_without_clients(pool: Pool) -> None:
    feed = feed_of(pool)

    assert not feed.is_looking
    async with reading(feed), reading(feed):
        assert feed.is_looking
    assert not feed.is_looking


async def test_nothing_is_sent_while_nothing_changes(pool: Pool) -> None:
    feed = feed_of(pool)
    async with pool.node():
        await pool.wait_joined()
        async with reading(feed) as client:
            feed.look()
            feed.look()

            assert not client.signal.is_set()
            assert await feed.read(client) == b""


async def test_clients_share_what_is_encoded(pool: Pool) -> None:
    feed, log = feed_of(pool), pool.log
    assert log is not None
    async with reading(feed) as one, reading(feed) as other, pool.node():
        await eventually(lambda: bool(log.latest(1)))

        feed.look()

        assert one.unread[0] is other.unread[0]
        text = (await feed.read(one)).decode()
        changes, facts = text.strip().split("\n\n")
        data = json.loads(changes.partition("data: ")[2])
        assert [*data["workers"]] == ["grandsage:n1/m1"]
        assert facts.startswith("event: facts\n")
        # The state is that of the last look: a new client misses nothing.
        async with feed.subscribe(CALLER) as late:
            snapshot = (await feed.read(late)).decode()
            assert '"id":"grandsage:n1/m1"' in snapshot


async def test_events_are_sent_once_and_of_many_the_latest(pool: Pool) -> None:
    feed, log = feed_of(pool), pool.log
    assert log is not None
    log.on_facts([AccountCredited("early", 1, "default")])
    async with reading(feed) as client:
        for number in range(EVENTS_PER_LOOK + 1):
            log.on_facts([AccountCredited(f"alice{number}", 1, "default")])
        feed.look()
        sent = events_in(await feed.read(client))
        log.on_facts([AccountCredited("bob", 1, "default")])
        feed.look()

        assert [each.split()[0] for each in sent] == [
            f"alice{number}" for number in range(1, EVENTS_PER_LOOK + 1)
        ]
        (last,) = events_in(await feed.read(client))
        assert last.startswith("bob ")


async def test_client_that_does_not_read_gets_a_new_snapshot(pool: Pool) -> None:
    feed = feed_of(pool)
    async with reading(feed) as slow, reading(feed) as fast:
        for number in range(UNREAD_MAX + 1):
            async with pool.node(f"n{number}"):
                await pool.wait_joined()
                feed.look()
                assert (await feed.read(fast)).startswith(b"event: changes\n")
            await pool.wait_joined(0)

        assert not slow.unread
        assert (await feed.read(slow)).startswith(b"event: snapshot\n")
        feed.look()
        assert (await feed.read(slow)).startswith(b"event: changes\n")


async def test_worker_that_returns_is_described_anew(pool: Pool) -> None:
    feed = feed_of(pool)
    async with reading(feed) as client:
        async with pool.node(slots="2"):
            await pool.wait_joined()
            feed.look()
            assert b'"slots":2' in await feed.read(client)
        await pool.wait_joined(0)
        async with pool.node(slots="3"):
            await eventually(lambda: len(pool.hub.pool.workers) == 1)
            feed.look()

            assert b'"slots":3' in await feed.read(client)


async def test_order_given_while_the_first_client_comes_is_shown(
    tmp_path: Path,
) -> None:
    async with interrupted_pool(tmp_path) as (pool, store):
        feed = feed_of(pool)
        store.interrupt = lambda: pause(pool)

        async with reading(feed) as client:
            feed.look()

            assert b'"by":"default"' in await feed.read(client)


async def test_orders_that_cannot_be_read_are_read_later(tmp_path: Path) -> None:
    async def fail() -> None:
        raise StoreError("the disk is away")

    async with interrupted_pool(tmp_path) as (pool, store):
        feed = feed_of(pool)
        async with reading(feed) as client:
            await pause(pool)
            store.interrupt = fail
            await feed.read(client)
            feed.look()
            assert b'"by":"default"' not in await feed.read(client)

            feed.look()

            assert b'"by":"default"' in await feed.read(client)
