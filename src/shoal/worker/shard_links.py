"""The connections of the machine that runs a model to the shards that others lend.

llama.cpp connects to a loopback port for each shard, several times at its start.  Each
connection is passed on, encrypted, to the machine of the shard: directly if it can be
reached, else over the coordinator, which sees no plain text.  A heartbeat beside them
detects a lost shard soon: llama.cpp itself would wait for ever.

The loopback ports are for this user alone, and where psutil has to find that out, for
this program's own children: the other end of each connection is looked up.  Another
program of the same user could trace those children anyway.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
import os
import sys
from collections.abc import Coroutine, Iterator, MutableMapping, Sequence, Set
from functools import partial
from typing import Any

import msgspec
import psutil

from shoal.domain.errors import PeerError, Unavailable
from shoal.domain.work import Shard
from shoal.domain.worker import MeasuredLink
from shoal.ledger.keys import Signer
from shoal.processes.programs import connected_user
from shoal.transports.link import CLOSE_TIMEOUT
from shoal.transports.relayed_sockets import OpenRelay, RelayedSockets
from shoal.transports.splice import Spliced
from shoal.transports.tcp import describe_socket_error, set_options
from shoal.transports.tls import context_of_any
from shoal.worker.first_way import ConnectionWay, connect_first
from shoal.worker.shard_hello import (
    HEARTBEAT,
    SILENCE_MAX,
    LineConnection,
    Purpose,
    ShardAnswer,
    write_hello,
)

CONNECT_TIMEOUT = 5.0  # seconds for an address of a shard's machine
STAGGER = 0.25  # seconds until the next address is tried beside those before
RELAY_AFTER = 2.0  # seconds until the relay is tried, too: it is slower for each token
RELAY_TIMEOUT = 15.0  # seconds by the relay, where the other end may be waited for
RATE_SAMPLE = 16 << 20  # bytes, of which the rate of a line is known
LOOPBACK = "127.0.0.1"
RELAYED = "over the coordinator"  # in place of an address

log = logging.getLogger("shoal.worker")


class ShardLinks:
    """Open connections to all shards of a model; their owner must ``close`` them.

    ``ports`` are loopback ports, one for each shard, in their order.
    ``lost`` is done with the reason as soon as a shard is gone, stopped or silent.
    """

    def __init__(
        self,
        group: str,
        signer: Signer,
        protocol: str,
        shards: Sequence[Shard],
        relay: OpenRelay | None = None,
        measured: MutableMapping[str, MeasuredLink] | None = None,
    ) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ports: Sequence[int] = ()
        self._group = group
        self._signer = signer
        self._protocol = protocol
        self._shards = shards
        self._open_relay = relay
        self._relay: RelayedSockets | None = None
        self._measured = {} if measured is None else measured
        self._data: dict[str, set[Spliced]] = {}  # connections of llama.cpp, by machine
        self._ways: dict[
            str, ConnectionWay[LineConnection]
        ] = {}  # the one that led to it, by machine
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(
        cls,
        group: str,
        signer: Signer,
        protocol: str,
        shards: Sequence[Shard],
        relay: OpenRelay | None = None,
        measured: MutableMapping[str, MeasuredLink] | None = None,
    ) -> "ShardLinks":
        """Connect to all shards.

        Args:
            group: what the machines are called that run the model together.
            signer: the key of this machine, which the others admit.
            protocol: llama.cpp's, with its version.
            shards: those that the other machines lend.
            relay: the way to machines that cannot be reached; None: there is none.
            measured: gets the round trip and the rate to each machine, by its id.

        Raises Unavailable that names the shard; then all is closed.
        """
        links = cls(group, signer, protocol, shards, relay, measured)
        try:
            await links._open()
        except BaseException:
            await links.close()
            raise
        return links

    async def close(self) -> None:
        """Leave all shards."""
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._relay is not None:
            await asyncio.to_thread(self._relay.close)

    async def _open(self) -> None:
        begun = [
            asyncio.create_task(self._begin_heartbeat(each)) for each in self._shards
        ]
        try:
            await asyncio.gather(*begun)
        except BaseException:
            for task in begun:  # which would go on after ``close``
                task.cancel()
            await asyncio.gather(*begun, return_exceptions=True)
            raise
        self.ports = [await self._listen(each) for each in self._shards]

    async def _begin_heartbeat(self, shard: Shard) -> None:
        end = await self._dial(shard, Purpose.HEARTBEAT)
        self._start(self._beat(shard, end))

    async def _beat(self, shard: Shard, end: LineConnection) -> None:
        """Ask whether the shard works, until it does not."""
        fault, loop, shortest = "", asyncio.get_running_loop(), math.inf
        try:
            while not fault:
                asked = loop.time()
                end.spliced.write(b"\n")
                async with asyncio.timeout(SILENCE_MAX):
                    fault = (await _answer(end)).fault
                # The others had to wait for something besides the way.
                shortest = min(shortest, loop.time() - asked)
                self._note(shard.machine, shortest)
                # Until the next question, the other end speaks only of a fault.
                if not fault:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(HEARTBEAT):
                            fault = (await _answer(end)).fault
            self._lose(f"{shard.machine}: {fault}")
        except TimeoutError:
            self._lose(f"{shard.machine} has been silent for {SILENCE_MAX:.0f} s")
        except PeerError as error:
            self._lose(f"{shard.machine}: {error}")
        finally:
            end.spliced.abort()

    def _note(self, machine: str, round_trip: float) -> None:
        """Note what has been measured on the way to a machine."""
        data = self._data.get(machine, ())
        known, rate = self._measured.get(machine), 0.0
        if (sent := sum(each.sent for each in data)) >= RATE_SAMPLE:
            rate = round(sent / sum(each.held_up for each in data))
        elif known is not None:
            rate = known.rate
        self._measured[machine] = MeasuredLink(machine, round(round_trip, 4), rate)

    def _lose(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)

    async def _listen(self, shard: Shard) -> int:
        """Accept llama.cpp's connections to a shard; return the port."""
        server = await asyncio.get_running_loop().create_server(
            lambda: Spliced(partial(self._on_made, shard)), LOOPBACK, 0
        )
        self._servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port

    def _on_made(self, shard: Shard, near: Spliced) -> None:
        near.pause()
        self._start(self._pass_on(shard, near))

    async def _pass_on(self, shard: Shard, near: Spliced) -> None:
        """Pass on a connection of llama.cpp to its shard, until either ends it."""
        far = LineConnection()
        data = self._data.setdefault(shard.machine, set())
        try:
            assert near.transport is not None, "it has just been made"
            source = near.transport.get_extra_info("peername")[1]
            target = near.transport.get_extra_info("sockname")[1]
            if not await asyncio.to_thread(is_own_connection, source, target):
                log.warning("another user connected to the port of a shard")
                return
            far = await self._dial(shard, Purpose.DATA)
            data.add(far.spliced)
            near.join(far.spliced)
            await far.ended()
        except Unavailable as error:
            self._lose(str(error))
        finally:
            data.discard(far.spliced)
            near.abort()
            far.spliced.abort()

    async def _dial(self, shard: Shard, purpose: Purpose) -> LineConnection:
        """Connect to a shard.  Raises Unavailable."""
        known = self._ways.get(shard.machine)
        try:
            way, end = await connect_first(
                [*self._ways_to(shard)] if known is None else [known],
                lambda end: end.spliced.abort(),
            )
            try:
                end.spliced.write(
                    write_hello(
                        *(self._signer, self._group, purpose, self._protocol),
                        bytes.fromhex(shard.fingerprint),
                    )
                )
                async with asyncio.timeout(way.timeout):
                    fault = (await _answer(end)).fault
            except BaseException:
                end.spliced.abort()
                raise
        except (PeerError, OSError, Unavailable) as error:  # TimeoutError is one, too
            reason = describe_socket_error(error)
            raise Unavailable(f"{shard.machine} cannot be reached: {reason}") from error
        if fault:
            end.spliced.abort()
            raise Unavailable(f"{shard.machine} refuses: {fault}")
        self._ways[shard.machine] = way
        return end

    def _ways_to(self, shard: Shard) -> Iterator[ConnectionWay[LineConnection]]:
        """Yield the ways to a shard, in the order in which they are tried."""
        for host in shard.hosts:
            connect = partial(_connect, shard, host=host, port=shard.port)
            yield ConnectionWay(host, STAGGER, CONNECT_TIMEOUT, connect)
        if self._open_relay is not None:
            connect = partial(self._dial_relay, shard)
            yield ConnectionWay(RELAYED, RELAY_AFTER, RELAY_TIMEOUT, connect)

    async def _dial_relay(self, shard: Shard) -> LineConnection:
        """Connect to a shard over the coordinator, as ``_connect`` does."""
        if self._relay is None:
            assert self._open_relay is not None, "there is no such way else"
            self._relay = self._open_relay(self._group)
        sock = self._relay.dial(shard.machine)
        sock.setblocking(False)
        try:
            return await _connect(shard, sock=sock)
        except BaseException:
            sock.close()
            raise

    def _start(self, work: Coroutine[None, None, None]) -> None:
        """Do it until it is done, or the links are closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _connect(shard: Shard, **target: Any) -> LineConnection:
    """Connect to what shows the certificate of a shard's port.

    ``target`` is an address, or a connected socket, as for ``create_connection``.
    Raises OSError, and PeerError if it is another program.
    """
    end = LineConnection()
    try:
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: end.spliced,
            **target,
            ssl=context_of_any(),
            server_hostname="",
            ssl_shutdown_timeout=CLOSE_TIMEOUT,
        )
        set_options(transport.get_extra_info("socket"))
        shown = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        if hashlib.sha256(shown or b"").hexdigest() != shard.fingerprint:
            raise PeerError("another program answers there")
    except BaseException:
        end.spliced.abort()
        raise
    return end


async def _answer(end: LineConnection) -> ShardAnswer:
    """Raises PeerError."""
    try:
        return msgspec.json.decode(await end.line(), type=ShardAnswer)
    except msgspec.MsgspecError as error:
        raise PeerError(f"it does not answer as a shard: {error}") from error


def is_own_connection(source: int, target: int) -> bool:
    """Return whether a connection between loopback ports comes from this user."""
    if sys.platform == "linux":
        return connected_user(source, target) == os.getuid()
    this = psutil.Process()
    return any(
        (source, target) in _ports_of(each)
        for each in (this, *this.children(recursive=True))
    )


def _ports_of(process: psutil.Process) -> Set[tuple[int, int]]:
    """Return the ports of both ends of a process's connections."""
    try:
        connections = process.net_connections("tcp4")
    except psutil.Error:
        return set()  # it has ended
    return {(each.laddr.port, each.raddr.port) for each in connections if each.raddr}
