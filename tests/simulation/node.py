"""A coordinator of a simulation: a process with a hub on the shared database."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from contextvars import Context
from typing import Any, TypeVar

from protocols.contexts import SIGNER
from shoal.calls.durable import DurableCalls
from shoal.coordinator.admission import WorkerAdmission, load_join_tokens
from shoal.coordinator.hub import Hub
from shoal.domain.errors import Fenced, StoreError
from shoal.domain.ids import JobId
from shoal.front.channel import Channel
from shoal.front.hub_links import FrontLinks
from shoal.gateway.http.access import FIRST_KEY, Access, key_cache
from shoal.gateway.http.authentication import Keyring
from shoal.gateway.http.browser_sessions import BrowserSessions
from shoal.peers.connections import PeerConnections
from shoal.protocols.seam.context import ProtocolContext
from shoal.protocols.seam.endpoints import Listener, UpgradeRequest, WebSocketRoute
from shoal.protocols.seam.protocol import AnyWireProtocol
from shoal.transports.clock import Clock
from simulation.front_link import LinkEnd, connect
from simulation.network import Wire
from simulation.pauses import Process
from simulation.shared_store import SharedStore

T = TypeVar("T")

KEY_OF_FRONTS = "sk-of-all-clients-at-fronts"
LOOK_EVERY = 1.0  # seconds between looks whether another one has taken over
EXIT_AFTER = 0.5  # seconds from a broken store to the end of the process


class Node:
    """A coordinator, from its takeover of the database until it is killed.

    Its hub, timers and connections wait while its ``process`` is paused.
    """

    def __init__(
        self,
        protocol: AnyWireProtocol,
        store: SharedStore,
        clock: Clock,
        new_id: Callable[[], JobId],
        setting: ProtocolContext,
        hedge_after: float | None,
        *,
        approve_nodes: bool,
    ) -> None:
        self.store = store
        self.process = Process()
        self.up = False
        self.hub = Hub(
            store,
            clock,
            new_id,
            SIGNER,
            hedge_after=hedge_after,
            approve_nodes=approve_nodes,
        )
        self.calls = self.hub.carried = DurableCalls(self.hub, store, clock)
        endpoints = protocol.endpoints(protocol.config(), setting)
        usable = [e for e in endpoints if isinstance(e, Listener | WebSocketRoute)]
        self.endpoint = max(usable, key=lambda each: isinstance(each, Listener))
        self.peers: PeerConnections
        self.links: FrontLinks
        self._front_links: list[LinkEnd] = []
        self.running: list[asyncio.Task[None]] = []
        self._name = protocol.name
        self._clock = clock
        self._serving: dict[asyncio.Task[object], Wire] = {}
        self._clients: set[asyncio.Task[Any]] = set()

    async def start(self, await_clients: float) -> None:
        """Take the database over, and go on with what its last owner left."""
        await self.process.start(self._restore(await_clients))
        work = (self.hub.run(), self.calls.run())
        self.running = [self.process.start(each) for each in work]
        self.up = True

    async def _restore(self, await_clients: float) -> None:
        await self.hub.restore(clients_return=await_clients > 0)
        self._clock.call_at(self._clock.now() + await_clients, self.hub.end_return)
        keys = self.store.keys
        admission = WorkerAdmission(await load_join_tokens(keys), keys, self._clock)
        keyring = Keyring(await key_cache(keys), {FIRST_KEY: KEY_OF_FRONTS})
        sessions = BrowserSessions(self.store.sign_ins)
        access = Access(self.hub, self._clock, keyring, keys, sessions)
        self.links = FrontLinks(
            self.hub, access, self._clock, lambda answered: None, b"of this node"
        )
        self.peers = PeerConnections(self.hub, self._clock, admission)

    def watch(self) -> None:
        """Look every second whether another one has taken over; then end."""
        self.running.append(self.process.start(self._watch()))

    async def _watch(self) -> None:
        health = self.hub.store_health
        with suppress(StoreError):
            while not health.is_broken:
                await asyncio.sleep(LOOK_EVERY)
                await health.read(self.store.confirm)
        await asyncio.sleep(EXIT_AFTER)
        self.kill()

    async def crash(self) -> None:
        """End the process as ``kill -9`` does: no farewell, nothing flushed."""
        await asyncio.gather(*self.kill(), return_exceptions=True)

    def kill(self) -> list[asyncio.Task[Any]]:
        """Cut all connections, and cancel all tasks; return them."""
        self.process.resume()
        self.up = False
        dead = [*self.running, *self._serving, *self._clients]
        self.cut()
        self.cut_links()
        for task in dead:
            task.cancel()
        return dead

    def cut(self) -> None:
        """Cut the connections of all workers."""
        for wire in self._serving.values():
            wire.cut()

    def link(self, front: Channel, front_process: Context) -> None:
        """Accept the link of a front."""
        end = connect(front, self.links.channel, front_process, self.process.context)
        self._front_links.append(end)

    def cut_links(self) -> None:
        """Cut the links of all fronts."""
        links, self._front_links = self._front_links, []
        for each in links:
            each.abort()

    def raise_failure(self) -> None:
        """Raise what the hub died of, unless that was a takeover."""
        failure = self.hub.store_health.failure
        if self.hub.store_health.is_broken and not isinstance(failure, Fenced):
            raise AssertionError(f"the store broke: {failure}")
        for each in self.running:
            if each.done() and not each.cancelled():
                each.result()

    def start_client(self, client: Coroutine[None, None, T]) -> asyncio.Task[T]:
        """Run a client, which the coordinator's end cuts off, as it would a connection.

        From its creation on: one that begins to run only after the coordinator was
        killed would otherwise wait for a dead hub.
        """
        task = asyncio.create_task(client)
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)
        return task

    def accept(
        self, url: str, headers: Mapping[str, str], wire: Wire
    ) -> Mapping[str, str]:
        """Serve a new connection; return the headers of the answer."""
        now = self._clock.now()
        answer: dict[str, str] = {}
        if isinstance(self.endpoint, Listener):
            session = self.endpoint.accept("coordinator", now)
        else:
            path, _, query = url.partition("://coordinator:4010")[2].partition("?")
            lower = {name.lower(): value for name, value in headers.items()}
            accepted = self.endpoint.accept(UpgradeRequest(path, query, lower), now)
            answer = {name.lower(): value for name, value in accepted.headers.items()}
            session = accepted.session
        serving = self.process.start(
            self.peers.serve(self._name, session, wire.coordinator)
        )
        self._serving[serving] = wire
        serving.add_done_callback(self._serving.pop)
        return answer
