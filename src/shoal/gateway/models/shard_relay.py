"""The relay between the machines of a group that cannot reach each other.

Only a machine that holds a part of a model listens there, and only the one that runs
the model dials it.  Each proves the key that it has stated in the pool, and the bytes
are encrypted between the two (``worker/shard_hello``).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from aiohttp import web

from shoal.coordinator.hub import Hub
from shoal.domain.errors import NotFound, NotReady, TooLarge
from shoal.domain.facts import Fact, WorkerJoined, WorkerLeft
from shoal.domain.work import ModelOrder
from shoal.domain.worker import MemoryLoan
from shoal.gateway.context import ModelsGateway
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.relay import (
    RELAY_ROLES,
    BytePace,
    SocketRelay,
    open_socket,
    role_of,
)
from shoal.pool.state import PoolState
from shoal.transports import http_server
from shoal.transports.clock import Clock
from shoal.worker.shard_hello import RELAY_PATH, read_pass

api = Operations()

MESSAGE_MAX = 1 << 20  # bytes; what is relayed comes in smaller pieces
PER_SHARD_MAX = 64  # WebSockets of a shard: two for each connection of llama.cpp
RELAYED_MAX = 1024  # WebSockets of all groups of a coordinator


class ShardRelays:
    """The relays of groups, each of which ends when no machine is in its group."""

    def __init__(self, hub: Hub, clock: Clock, pace: BytePace) -> None:
        self._pool = hub.pool
        self._clock = clock
        self._pace = pace
        self._relays: dict[str, SocketRelay] = {}
        self._entered: Counter[str] = Counter()  # the connections of each group
        hub.subscribe(self._on_facts)

    @contextmanager
    def entered(self, order: ModelOrder) -> Iterator[SocketRelay]:
        """Yield the relay of a group for one connection.  Raises TooLarge."""
        group = order.group
        limit = PER_SHARD_MAX * (len(order.shards) - 1)
        if self._entered[group] >= limit or self._entered.total() >= RELAYED_MAX:
            raise TooLarge(f"too many connections of {group} are relayed already")
        relay = self._relays.get(group) or SocketRelay(self._pace, self._clock)
        self._relays[group] = relay
        self._entered[group] += 1
        try:
            yield relay
        finally:
            self._entered[group] -= 1
            if not self._entered[group]:
                del self._entered[group]
                self._relays.pop(group, None)

    def _on_facts(self, batch: Sequence[Fact]) -> None:
        if self._relays and any(
            isinstance(fact, WorkerJoined | WorkerLeft) for fact in batch
        ):
            for group, relay in [*self._relays.items()]:
                if find_group(self._pool, group) is None:
                    relay.end()


SHARD_RELAYS = web.AppKey("shard_relays", ShardRelays)


@api.get(RELAY_PATH, "Connect the machines of a group, over WebSockets", status=101)
async def relay_shards(
    gateway: ModelsGateway, request: web.Request
) -> web.StreamResponse:
    role, place = role_of(request)
    group = request.query.get("group", "")
    if (order := find_group(gateway.hub.pool, group)) is None:
        # A machine may ask before its group is known here, as after a restart.
        raise NotReady(f"no machine of a group {group!a:.80} is connected")
    lenders = [each.machine for each in order.shards[:-1]]
    loans = _loans(gateway.hub.pool)
    awaited = {"at": [place], "to": [], "ticket": lenders}[role]
    if any(each in lenders and each not in loans for each in awaited):
        raise NotReady(f"not all machines of group {group!a:.80} are connected")
    _, _, shown = request.headers.get("Authorization", "").partition(" ")
    key = read_pass(shown.strip(), group)
    if not key or not _may(loans, order, key, role, place):
        raise NotFound(f"no machine with this key has that part of group {group!a:.80}")
    http_server.admit(request)
    with request.app[SHARD_RELAYS].entered(order) as relay:
        socket = await open_socket(request, gateway.pages, MESSAGE_MAX)
        await RELAY_ROLES[role](relay, place, socket)
    return socket


def find_group(pool: PoolState, group: str) -> ModelOrder | None:
    """Return an order of a group that a machine has, or is about to carry out."""
    if not group:
        return None
    for each in pool.model_orders:
        if each.order.group == group:
            return each.order
    for loan in _loans(pool).values():
        for order in (*loan.groups, *(each.order for each in loan.shards)):
            if order.group == group:
                return order
    return None


def _may(
    loans: Mapping[str, MemoryLoan], order: ModelOrder, key: str, role: str, place: str
) -> bool:
    """Return whether the holder of a key may take a role in a group.

    ``place`` is the machine of a shard; to accept, it is a ticket of the relay.
    """
    lenders = [each.machine for each in order.shards[:-1]]
    if role == "to":
        return key == order.runner and place in lenders
    keys = {each: loans[each].key for each in lenders if each in loans}
    return keys.get(place) == key if role == "at" else key in keys.values()


def _loans(pool: PoolState) -> dict[str, MemoryLoan]:
    """Return what the machines lend, by the ids of their libraries' workers."""
    return {
        worker.id: worker.offer.library.loan
        for worker in pool.workers.values()
        if worker.offer.library is not None and worker.offer.library.loan is not None
    }
