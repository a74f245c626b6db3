"""Comes to peers other than by HTTP: on ports of its own, by calling, by looking.

Each connection is given to whoever serves, with the session that its endpoint made.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from shoal.domain.errors import ConfigError, TooManyFailures
from shoal.protocols import Endpoint
from shoal.protocols.crowd import Browser, Listener, Outgoing, Rounds, Security
from shoal.runtime.calling import Calls, Standing
from shoal.runtime.clock import Clock
from shoal.runtime.door import Door
from shoal.runtime.meeting import Meetings
from shoal.runtime.neighbourhood import Announced, Neighbourhood
from shoal.runtime.residing import Serve
from shoal.runtime.rounds import Running
from shoal.transports.bonjour import addresses_of
from shoal.transports.dialling import dial
from shoal.transports.tcp import TcpLink
from shoal.transports.tcp_listening import Bound, Entrance, listening_tcp
from shoal.transports.tls import Presented, new_certificate

FAREWELL = 3.0  # seconds that connections which we opened get to end

Ports: TypeAlias = Mapping[str, Mapping[str, int]]
"""Ports by the name of their wire, and by what is told of them: ``Listener.told``."""

log = logging.getLogger("shoal.reaching")


@dataclass(frozen=True, slots=True)
class Means:
    """What is needed to come to peers.

    ``tls`` is for listeners with the coordinator's certificate; without it there are
    none.  ``addresses`` says at which addresses others find what listens on one.
    ``hidden``: nothing is announced, and nobody looked for.
    """

    serve: Serve
    door: Door
    clock: Clock
    random: Random
    host: str
    tls: Presented | None = None
    hidden: bool = False
    addresses: Callable[[str], tuple[str, ...]] = addresses_of


@asynccontextmanager
async def reaching(
    endpoints: Sequence[tuple[str, Endpoint]], means: Means
) -> AsyncIterator[Ports]:
    """Serve the endpoints that are no claims on WebSockets for the length of the block.

    Each comes with the name of its wire.  At the end of the block, connections get a
    moment to end by themselves: whoever serves them is to hang up before.

    Raises ConfigError if a port cannot be had.
    """
    ports: dict[str, dict[str, int]] = {}
    announced: list[Announced] = []
    spares: list[str] = []
    async with AsyncExitStack() as listening:
        for wire, endpoint in endpoints:
            if not isinstance(endpoint, Listener):
                continue
            if endpoint.security is Security.VOUCHED and means.tls is None:
                continue
            bound = await listening.enter_async_context(_listen(wire, endpoint, means))
            ports.setdefault(wire, {})[endpoint.told] = bound.port
            endpoint.bound(bound.port)
            if endpoint.port not in (0, bound.port):
                spares.append(f"{bound.port} for {endpoint.port}")
            if endpoint.service is not None and not means.hidden:
                announced.append(Announced(wire, endpoint.service, bound))
        if spares:
            log.info("ports are in use, so others are taken: %s", ", ".join(spares))
        async with _calling(endpoints, announced, means):
            yield ports


@asynccontextmanager
async def _listen(wire: str, listener: Listener, means: Means) -> AsyncIterator[Bound]:
    async def serve(link: TcpLink) -> None:
        try:
            means.door.check(link.peer)
        except TooManyFailures as error:
            log.info("refused wire=%s peer=%s reason=%r", wire, link.peer, str(error))
            listener.gate.failed(link.peer, means.clock.now())
            return
        await means.serve(wire, listener.accept(link.peer, means.clock.now()), link)

    tls = None
    if listener.security is Security.VOUCHED:
        tls = means.tls
    elif listener.security is Security.OWN:
        tls = await asyncio.to_thread(new_certificate, listener.subject)
    gate, within = listener.gate, listener.handshake_within
    entrance = Entrance(tls, gate, within, means.clock.now)
    async with AsyncExitStack() as opened:
        try:
            bound = await opened.enter_async_context(
                listening_tcp(
                    *(means.host, listener.port, serve, entrance), spare=listener.spare
                )
            )
        except ConfigError as error:
            raise ConfigError(
                f"{error}; choose another {listener.flag or f'--{wire}-port'} (0 lets "
                "the system choose)"
            ) from error
        yield bound


@asynccontextmanager
async def _calling(
    endpoints: Sequence[tuple[str, Endpoint]],
    announced: Sequence[Announced],
    means: Means,
) -> AsyncIterator[None]:
    """Keep up connections, announce and look for the length of the block."""
    calls = Calls(means.serve, dial, means.clock, means.random)
    async with asyncio.TaskGroup() as tasks:
        callers = {
            tasks.create_task(calls.keep_up(wire, Standing(endpoint)))
            for wire, endpoint in endpoints
            if isinstance(endpoint, Outgoing)
        }
        meetings = [
            Meetings(wire, endpoint, calls, tasks)
            for wire, endpoint in endpoints
            if isinstance(endpoint, Browser) and not means.hidden
        ]
        rounds = [
            Running(wire, endpoint, calls, dial, means.clock, tasks)
            for wire, endpoint in endpoints
            if isinstance(endpoint, Rounds)
        ]
        walking = [tasks.create_task(each.run()) for each in rounds]
        around = Neighbourhood(announced, meetings, means.addresses)
        looking = tasks.create_task(around.take_part())
        patience = 0.0  # if this is cut off
        try:
            yield
            patience = FAREWELL
        finally:
            calls.stop()
            for task in (looking, *walking):
                task.cancel()
            callers = callers.union(
                *(each.calling for each in meetings), *(each.calling for each in rounds)
            )
            if callers:
                await asyncio.wait(callers, timeout=patience)
            for caller in callers:
                caller.cancel()
