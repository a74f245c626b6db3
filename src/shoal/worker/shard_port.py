"""The port of a shard that this machine lends: who may use it, and for how long.

Only the machine that runs the model is admitted, while it keeps its heartbeat: then its
further connections are passed on to the shard's process.  It connects to the port, or
over the coordinator's relay, where the shard listens too.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from shoal.domain.errors import PeerError, Unavailable
from shoal.transports.acceptor import BACKLOG, Acceptor
from shoal.transports.clock import LoopClock
from shoal.transports.link import CLOSE_TIMEOUT
from shoal.transports.mdns import addresses_of
from shoal.transports.relayed_sockets import Accept, OpenRelay
from shoal.transports.splice import Spliced
from shoal.transports.strangers import BY_STRANGER, Stranger, bounded_strangers
from shoal.transports.tcp import describe_socket_error, set_options
from shoal.transports.tls import ServerTls, self_signed_tls
from shoal.worker.shard_hello import (
    HELLO_TIMEOUT,
    SILENCE_MAX,
    LineConnection,
    Purpose,
    ShardAnswer,
    read_hello,
)

SUBJECT = "shoal shard"
RELAYED = "the relay of the coordinator"  # the address of connections by it
DATA_MAX = 64  # connections; llama.cpp uses one at a time
SHARE = 128  # of a program's budget for strangers: 64 connections

REFUSED = "refused peer=%s reason=%r"

log = logging.getLogger("shoal.worker")


class LentProcess(Protocol):
    """The process of a shard (``engines/shards/shard_process``)."""

    @property
    def protocol(self) -> str:
        """llama.cpp's, with its version."""

    @property
    def exited(self) -> "asyncio.Future[str]":
        """Done with the reason when it has ended."""

    async def connect(self) -> socket.socket:
        """Return a new connection to it.  Raises Unavailable."""

    def fault(self) -> str | None:
        """Return why it does not work; None: it works."""

    async def close(self) -> None:
        """End it."""


class ShardPort:
    """An open port; its owner must always ``close`` it.

    ``hosts`` are the addresses at which others may reach it, and ``fingerprint`` is the
    SHA-256 of its certificate in hexadecimal.  ``on_use`` is called when the machine
    that runs the model connects or leaves.
    """

    def __init__(
        self,
        listener: socket.socket,
        hosts: tuple[str, ...],
        tls: ServerTls,
        group: str,
        runner: str,
        process: LentProcess,
        relay: OpenRelay | None = None,
        relay_id: str = "",
    ) -> None:
        listener.setblocking(False)
        self.hosts = hosts
        self.port: int = listener.getsockname()[1]
        self.fingerprint = tls.certificate_hash.hex()
        self.lost = process.exited
        self._tls = tls
        self._group = group
        self._runner = runner
        self._process = process
        self.on_use: Callable[[], None] = _ignore
        self._heart: LineConnection | None = None  # of the machine that runs the model
        self._data: set[Spliced] = set()
        self._strangers = bounded_strangers(LoopClock(), SHARE)
        self._strangers.meter_handshakes(tls.context)
        self._closing = asyncio.Event()
        self._relay = None if relay is None else relay(group)
        self._relay_id = relay_id
        self._relayed: set[asyncio.Task[None]] = set()
        self._listening = asyncio.create_task(self._listen(listener))

    @property
    def is_used(self) -> bool:
        """Whether the machine that runs the model is connected."""
        return self._heart is not None

    @classmethod
    async def open(
        cls,
        host: str,
        group: str,
        runner: str,
        process: LentProcess,
        *,
        port: int = 0,
        relay: OpenRelay | None = None,
        relay_id: str = "",
    ) -> "ShardPort":
        """Lend a shard's process to the holder of a key, and to no other.

        Args:
            host: the address to listen at; empty: all addresses of this machine.
            group: what the machines are called that run the model together.
            runner: public key of the machine that runs it, in hexadecimal.
            process: what is lent; it is the port's from now on.
            port: 0: the system chooses.
            relay: leads to the machine if it cannot reach this one; None: no way does.
            relay_id: under which the port is known there.

        Raises Unavailable; then the process is closed.
        """
        try:
            tls = await asyncio.to_thread(self_signed_tls, SUBJECT)
            tls.context.minimum_version = ssl.TLSVersion.TLSv1_3
            listener, hosts = _bind(host, port)
        except OSError as error:
            await process.close()
            reason = describe_socket_error(error)
            raise Unavailable(f"a shard cannot listen on {host}: {reason}") from error
        return cls(listener, hosts, tls, group, runner, process, relay, relay_id)

    async def close(self) -> None:
        """Close the port and all connections, and end the process."""
        if self._heart is not None:
            await self._heart.send_last(ShardAnswer("its machine lends it no more"))
        self._closing.set()
        await self._listening
        await self._process.close()

    async def _listen(self, listener: socket.socket) -> None:
        acceptor = Acceptor(self._strangers, self._serve)
        if self._relay is not None:
            self._relay.listen(self._relay_id, self._relayed_accept())
        with listener:
            async with acceptor.accepting(listener):
                await self._closing.wait()
        for task in self._relayed:
            task.cancel()
        if self._relayed:
            await asyncio.wait(self._relayed)
        if self._relay is not None:
            await asyncio.to_thread(self._relay.close)

    def _relayed_accept(self) -> Accept:
        """Return what takes a connection of the relay, in its thread."""
        loop = asyncio.get_running_loop()

        def accept(sock: socket.socket) -> None:
            loop.call_soon_threadsafe(self._accept_relayed, sock)

        return accept

    def _accept_relayed(self, sock: socket.socket) -> None:
        """Serve a connection that the coordinator passes on."""
        if self._closing.is_set() or len(self._relayed) > DATA_MAX:
            sock.close()
            return
        sock.setblocking(False)
        stranger = self._strangers.add(RELAYED, lambda reason: sock.close())
        task = asyncio.create_task(self._serve(sock, RELAYED, stranger))
        self._relayed.add(task)
        task.add_done_callback(self._relayed.discard)

    async def _serve(
        self, sock: socket.socket, address: str, stranger: Stranger | None
    ) -> None:
        """Serve a connection until it ends."""
        assert stranger is not None, "without a first look, no client is known"
        end = LineConnection()
        try:
            purpose = await self._admit(end, sock, stranger)
            if purpose is Purpose.DATA:
                await self._pass_on(end)
            else:
                await self._beat(end)
        except (PeerError, Unavailable) as error:
            log.info(REFUSED, address, error, extra=BY_STRANGER)
            await end.send_last(ShardAnswer(str(error)))
        finally:
            stranger.leave()
            end.spliced.abort()

    async def _admit(
        self, end: LineConnection, sock: socket.socket, stranger: Stranger
    ) -> Purpose:
        """Begin TLS and read the hello; return its purpose.  Raises PeerError."""
        try:
            with stranger.opening(secure=True):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: end.spliced,
                    sock,
                    ssl=self._tls.context,
                    ssl_handshake_timeout=HELLO_TIMEOUT,
                    ssl_shutdown_timeout=CLOSE_TIMEOUT,
                )
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError):  # ssl.SSLError and TimeoutError are, too
                raise PeerError(describe_socket_error(error)) from error
            raise
        try:
            async with asyncio.timeout(HELLO_TIMEOUT):
                line = await end.line()
        except TimeoutError as error:
            raise PeerError(f"no hello within {HELLO_TIMEOUT:.0f} s") from error
        purpose = read_hello(
            *(line, self._group, self._runner, self._process.protocol),
            self._tls.certificate_hash,
        )
        stranger.admit()
        set_options(sock)
        return purpose

    async def _beat(self, end: LineConnection) -> None:
        """Answer heartbeats until the machine falls silent; cut its connections then.

        Raises PeerError if another connection has this place.
        """
        if self._heart is not None:
            raise PeerError("this shard is in use by another process of that machine")
        self._heart = end
        self.on_use()
        end.send(ShardAnswer())
        watch = asyncio.ensure_future(self._report_exit(end))
        try:
            with suppress(PeerError, TimeoutError):  # it has left, or is silent
                while True:
                    async with asyncio.timeout(SILENCE_MAX):
                        await end.line()
                    end.send(ShardAnswer(self._process.fault() or ""))
        finally:
            watch.cancel()
            self._heart = None
            self.on_use()
            for each in [*self._data]:
                each.abort()

    async def _report_exit(self, end: LineConnection) -> None:
        await asyncio.wait({self._process.exited})
        end.send(ShardAnswer(self._process.exited.result()))

    async def _pass_on(self, end: LineConnection) -> None:
        """Pass bytes on between the machine and the process, until either ends it.

        Raises PeerError without a heartbeat, and Unavailable.
        """
        if self._heart is None:
            raise PeerError("this shard has no heartbeat of that machine")
        if len(self._data) >= DATA_MAX:
            raise PeerError(f"this shard has {DATA_MAX} connections")
        far = Spliced()
        await connect_to(self._process, far)
        self._data.add(end.spliced)
        try:
            end.send(ShardAnswer())
            end.spliced.join(far)
            await end.ended()
        finally:
            self._data.discard(end.spliced)
            far.abort()


async def connect_to(process: LentProcess, far: Spliced) -> None:
    """Connect one end to a shard's process.  Raises Unavailable."""
    connected = await process.connect()
    try:
        await asyncio.get_running_loop().create_connection(lambda: far, sock=connected)
        set_options(connected)
    except BaseException as error:
        connected.close()
        if isinstance(error, OSError):
            raise Unavailable(f"the shard: {describe_socket_error(error)}") from error
        raise


def _bind(host: str, port: int) -> tuple[socket.socket, tuple[str, ...]]:
    """Listen; return the addresses at which others reach it, too.  Raises OSError."""
    if not host and socket.has_dualstack_ipv6():
        with suppress(OSError):  # the machine may have no IPv6 nevertheless
            listener = socket.create_server(
                ("::", port),
                family=socket.AF_INET6,
                backlog=BACKLOG,
                dualstack_ipv6=True,
            )
            return listener, addresses_of("0.0.0.0") + addresses_of("::")
    found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)
    family, _, _, _, place = found[0]
    listener = socket.create_server(place, family=family, backlog=BACKLOG)
    address = str(place[0])
    return listener, addresses_of(address) or (address,)


def _ignore() -> None:
    """Do nothing."""
