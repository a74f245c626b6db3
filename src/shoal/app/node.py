"""A node: one of several coordinators that share a database, of which one has the pool.

The others stand by.  Their fronts serve, too, with the hub of the one that has it; when
that is lost, another takes over.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import (
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)

from shoal.app.database import lease_at, shared_secrets, shared_store_at
from shoal.app.https import AUTO
from shoal.app.node_tunnel import LOOPBACK, SUBJECT, Bridge, Entrance
from shoal.app.parts import LINK_SOCKET, HubPart, report_alive, report_taking_over
from shoal.config import ServeConfig
from shoal.config.runtime_file import publish_url
from shoal.domain.addresses import host_and_port, is_own_host
from shoal.domain.errors import ConfigError, Fenced, InUse, StoreError, WentBack
from shoal.store.blobs import BlobStore
from shoal.store.lease import LeaseRow, LeaseVerdict, LeaseWatch, SharedStore
from shoal.transports.clock import Clock
from shoal.transports.http_server import public_urls
from shoal.transports.strangers import Strangers
from shoal.transports.tls import self_signed_tls

LOOK_EVERY = 0.25  # seconds between looks at the lease
LOOK_SOON = 0.05  # the same while another node takes the pool over
BEAT_EVERY = 0.5  # seconds between signs that the holder runs
RETRY_EVERY = 0.1  # seconds between attempts to reach a database that was lost
NOTE_EVERY = 5.0  # seconds between notes that a node is there
STRANGE_LOOKS = 20  # at a holder that is no node; one that starts is not yet
LOOKS_WITHOUT_FRONTS = 4  # after which none will come back

log = logging.getLogger("shoal.app")


def check_node(config: ServeConfig) -> None:
    """Raise ConfigError if these settings cannot be those of a node."""
    if not config.node:
        return
    if not config.store:
        raise ConfigError(
            "--node: nodes share a PostgreSQL database: give --store, too"
        )
    if not config.fronts:
        raise ConfigError(
            "--node: fronts serve HTTP on a node: give --fronts 1 or more"
        )
    if (place := host_and_port(config.node)) is None:
        raise ConfigError(f"--node {config.node}: expected HOST:PORT")
    if place[0] in LOOPBACK:
        raise ConfigError(
            f"--node {config.node}: no other node can connect to {place[0]}: give this "
            "machine's own address"
        )
    if is_own_host(config.host) and not is_own_host(place[0]):
        raise ConfigError(
            f"--node {config.node}: no other machine reaches what listens at --host "
            f"{config.host}: give --host 0.0.0.0, or this machine's own address"
        )


class Node:
    """This process of a node: it has the pool, or stands by.

    ``all_urls`` are those of all nodes, its own first.
    """

    def __init__(self, config: ServeConfig, part: HubPart, clock: Clock) -> None:
        self._secure = config.tls == AUTO or config.tls_cert is not None
        self._urls = public_urls(config.host, part.port, secure=self._secure)
        self.all_urls = [*self._urls]
        self._lost: asyncio.Future[Fenced] = asyncio.get_running_loop().create_future()
        self._config = config
        self._part = part
        self._clock = clock
        self._lease = lease_at(config.store)
        self._reachable = True
        self._noted_at = float("-inf")
        self._store: SharedStore | None = None

    async def is_alone(self) -> bool:
        """Return whether no other node was there lately, as far as is known."""
        with suppress(StoreError):
            await self._note()
        return len(self.all_urls) == len(self._urls)

    async def stand_by(
        self, stop: asyncio.Event, on_standby: Callable[[str], None]
    ) -> bool:
        """Stand by until this node may have the pool; False: until ``stop``.

        ``on_standby`` is called once if another has it, with where that is.  After
        ``stop``, what is open at its fronts goes on until it ends.

        Raises StoreError if the database cannot be reached at the beginning,
        ConfigError if it is another pool's, InUse if what has it is no node, WentBack.
        """
        watch = LeaseWatch(at_once=not self._part.announces)
        stands_by = False
        strange_looks = 0
        followed = ""  # the holder that was reached last
        config = self._config
        async with self._bridge() as bridge, AsyncExitStack() as published:
            while not stop.is_set():
                row = await self._look(may_fail=stands_by or not self._part.announces)
                if row is not None and row.older and not config.new_log:
                    raise WentBack(row.older, self._lease.name)
                verdict = watch.on_look(row, self._clock.now())
                if verdict is LeaseVerdict.TAKE_OVER:
                    report_taking_over()
                    return True
                if row is not None:
                    if verdict is LeaseVerdict.END_HOLDER:
                        log.warning("the node %s is silent: taking over", row.node)
                        await self._end_holder()
                    strange_looks = (
                        strange_looks + 1 if row.held and not row.node else 0
                    )
                    if strange_looks >= STRANGE_LOOKS:
                        raise InUse(
                            "a coordinator that is no node has the database: start it "
                            "with --node, too",
                            self._lease.name,
                        )
                    if row.secret and row.holder != followed:
                        followed = row.holder
                        await self._fetch_secrets(may_fail=stands_by)
                    await bridge.follow(row)
                    if followed and not stands_by:
                        stands_by = True
                        # For commands on this machine.
                        url = (config.data_dir, config.host, self._part.port)
                        published.enter_context(publish_url(*url, secure=self._secure))
                        on_standby(row.node)
                takes_over = row and row.held and row.node and not row.secret
                await _sleep(LOOK_SOON if takes_over else LOOK_EVERY, stop)
            await self._see_off(bridge)
        return False

    async def hand_over(self) -> None:
        """Let what is open go on at another node, to which the pool was left."""
        async with self._bridge() as bridge:
            await self._see_off(bridge)

    @asynccontextmanager
    async def _bridge(self) -> AsyncIterator[Bridge]:
        bridge = Bridge(self._config.host)
        async with bridge.open(self._part.sockets), _reporting_alive():
            yield bridge

    async def _see_off(self, bridge: Bridge) -> None:
        """Go on until no front of this node is left, or for as long as it may drain."""
        end = self._clock.now() + self._config.drain
        looks = 0  # in a row without a front; one may be about to come back
        while looks < LOOKS_WITHOUT_FRONTS and self._clock.now() < end:
            looks = 0 if bridge.was_used(LINK_SOCKET) else looks + 1
            if (row := await self._look(may_fail=True)) is not None:
                await bridge.follow(row)
            await asyncio.sleep(LOOK_EVERY)

    async def _fetch_secrets(self, *, may_fail: bool) -> None:
        """Write what the nodes share into the data folder, before fronts read it."""
        shared = shared_secrets(self._config)
        assert shared is not None, "it has a store on a server"
        try:
            await asyncio.to_thread(shared.fetch)
        except (StoreError, ConfigError) as error:
            if not may_fail:
                raise
            log.error("cannot read the secrets of the pool: %s", error)

    def make_store(self, blobs: BlobStore) -> SharedStore:
        """Return the store of a node that has the pool."""
        self._store = shared_store_at(self._config.store, blobs, self._config.node)
        return self._store

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Keep the lease for the length of the block, from when the store is open."""
        keeping = asyncio.get_running_loop().create_task(self._keep())
        try:
            async with _reporting_alive():
                yield
        finally:
            keeping.cancel()

    def on_lost(self, call: Callable[[Fenced], None]) -> None:
        """Call ``call`` once another node has the lease."""
        self._lost.add_done_callback(lambda lost: call(lost.result()))

    @asynccontextmanager
    async def entrance(
        self, ports: Mapping[str, int], strangers: Strangers
    ) -> AsyncIterator[None]:
        """Let other nodes reach this one for the length of the block.

        ``ports`` are those of wires, by name.  Raises ConfigError if the port of
        ``--node`` cannot be opened, StoreError.
        """
        found = host_and_port(self._config.node)
        assert found is not None, "checked by `check_node`"
        assert self._store is not None, "it has the pool"
        host, port = found
        secret = secrets.token_hex(16)
        tls = await asyncio.to_thread(self_signed_tls, SUBJECT)
        entrance = Entrance(
            secret, self._part.sockets, self._config.host, ports, strangers
        )
        async with entrance.open(self._config.host, port, tls) as bound:
            address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
            await self._lease.publish(
                *(self._store.holder, address, tls.certificate_hash, secret, ports)
            )
            yield

    async def _keep(self) -> None:
        assert self._store is not None, "it has the pool"
        failing = False
        while True:
            try:
                if not await self._lease.beat(self._store.holder):
                    raise Fenced(
                        "another node has taken over the pool: this one stands by"
                    )
                if failing:
                    await self._store.resume()
                    failing = False
                await self._note_at_times()
            except Fenced as error:
                self._lost.set_result(error)
                return
            except StoreError:  # the hub reports it
                failing = True
                await asyncio.sleep(RETRY_EVERY)
            else:
                await asyncio.sleep(BEAT_EVERY)

    async def _look(self, *, may_fail: bool) -> LeaseRow | None:
        """Return what the lease has; None: the database cannot be reached.

        Raises StoreError unless it ``may_fail``.
        """
        try:
            row = await self._lease.look()
            if row.node:
                await self._note_at_times()
        except StoreError as error:
            if not may_fail:
                raise
            if self._reachable:
                log.warning("standing by without the database: %s", error.located)
            self._reachable = False
            return None
        self._reachable = True
        return row

    async def _note_at_times(self) -> None:
        if self._clock.now() - self._noted_at >= NOTE_EVERY:
            await self._note()

    async def _note(self) -> None:
        """Note that this node is there, and which others are."""
        self.all_urls = await self._lease.note(self._urls[0], self._urls)
        self._noted_at = self._clock.now()

    async def _end_holder(self) -> None:
        try:
            await self._lease.end_holder()
        except StoreError as error:  # the next look fails, too
            log.warning("%s", error.located)


@asynccontextmanager
async def _reporting_alive() -> AsyncIterator[None]:
    """Report that this process runs for the length of the block.

    In a task of its own: one that waits for a stopped database runs, too.
    """

    async def report() -> None:
        while True:
            report_alive()
            await asyncio.sleep(LOOK_EVERY)

    reporting = asyncio.get_running_loop().create_task(report())
    try:
        yield
    finally:
        reporting.cancel()


async def _sleep(seconds: float, stop: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return
