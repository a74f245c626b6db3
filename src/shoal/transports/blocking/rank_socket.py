"""Blocking sockets between the ranks of a training run.

Gradients are gigabytes a second, which an event loop halves: each connection carries
data in one direction, and a thread waits for it.  Any thread may end a connection.

Between processes of one machine, Linux moves a gigabyte through a local (AF_UNIX)
socket in a third of the CPU time that TCP takes over loopback.
"""

import contextlib
import hashlib
import select
import socket
import ssl
import sys
import time
from collections.abc import Generator, Sequence
from typing import NamedTuple

from shoal.domain.addresses import is_loopback
from shoal.domain.errors import Unavailable
from shoal.transports.tls import ServerTls, context_of_any

BUFFER_SIZE = 4 << 20  # bytes that the kernel buffers in each direction
EMPTY = memoryview(b"")
HAS_LOCAL_SOCKETS = sys.platform == "linux"  # only there they have names without files
LOCAL = "local socket"  # the address of connections by it


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine on the way to another one.

    Raises OSError if there is none.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        own: str = probe.getsockname()[0]
        return own


class Disconnected(Unavailable):
    """The other end closed the connection, or it broke."""


class RankSocket:
    """A connection to one rank: bytes in order, as many as asked for.

    ``certificate`` is the fingerprint of the server's, empty without TLS.
    """

    def __init__(
        self, connected: socket.socket, address: str, certificate: bytes = b""
    ) -> None:
        self._socket = connected
        self._encrypts = isinstance(connected, ssl.SSLSocket)
        self.address = address
        self.certificate = certificate

    def set_timeout(self, seconds: float | None) -> None:
        """Limit each wait; None: wait until the connection ends."""
        self._socket.settimeout(seconds)

    def send(self, head: bytes, body: memoryview = EMPTY) -> None:
        """Send a head and a body.

        Raises Disconnected.
        """
        try:
            if sys.platform == "win32" or self._encrypts:
                self._socket.sendall(head)
                self._socket.sendall(body)
                return
            sent = self._socket.sendmsg((head, body))
            if sent < len(head):
                self._socket.sendall(head[sent:])
            rest = body[max(0, sent - len(head)) :]
            if rest:
                self._socket.sendall(rest)
        except OSError as error:
            raise Disconnected(f"{self.address}: {_reason(error)}") from error

    def send_now(self, head: bytes, body: memoryview) -> int:
        """Send what there is room for, without waiting; return how many bytes.

        0 also with TLS, and if the connection has ended.
        """
        if sys.platform == "win32" or self._encrypts:
            return 0
        try:
            return self._socket.sendmsg((head, body), (), socket.MSG_DONTWAIT)
        except OSError:
            return 0

    def receive_into(self, memory: memoryview) -> None:
        """Fill memory with the next bytes.

        Raises Disconnected.
        """
        filled, size = 0, len(memory)
        flags = 0 if self._encrypts else socket.MSG_WAITALL
        try:
            while filled < size:
                rest = memory[filled:]
                count = self._socket.recv_into(rest, len(rest), flags)
                if not count:
                    raise Disconnected(f"{self.address} closed the connection")
                filled += count
        except OSError as error:
            raise Disconnected(f"{self.address}: {_reason(error)}") from error

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def send_some(self, data: memoryview) -> int | None:
        """Send without waiting; return how many bytes.

        0: wait until it is writable; None: until it is readable, as TLS may require.

        Raises Disconnected.
        """
        try:
            return self._socket.send(data)
        except (BlockingIOError, ssl.SSLWantWriteError):
            return 0
        except ssl.SSLWantReadError:
            return None
        except OSError as error:
            raise Disconnected(f"{self.address}: {_reason(error)}") from error

    def receive_some(self, memory: memoryview) -> int | None:
        """Receive without waiting; return how many bytes.

        0: wait until it is readable; None: until it is writable, as TLS may require.

        Raises Disconnected.
        """
        try:
            count = self._socket.recv_into(memory)
        except (BlockingIOError, ssl.SSLWantReadError):
            return 0
        except ssl.SSLWantWriteError:
            return None
        except OSError as error:
            raise Disconnected(f"{self.address}: {_reason(error)}") from error
        if not count:
            raise Disconnected(f"{self.address} closed the connection")
        return count

    def abort(self) -> None:
        """End the connection at once; a thread that waits for it gets Disconnected.

        With TLS, the method of the base class: the other would read on without TLS.
        """
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the socket, which no thread uses any more."""
        self._socket.close()


def exchange(
    outgoing: Sequence[tuple[RankSocket, Sequence[memoryview]]],
    incoming: RankSocket | None,
    reader: Generator[memoryview, None, None],
    deadline: float,
) -> None:
    """Send to some ranks and receive from one at the same time, in this thread.

    A connection may be used in both directions, as TLS allows to one thread only.
    ``reader`` yields the memory to fill next, until it has everything.

    Raises Disconnected, also if it is not done by the ``deadline``, a monotonic time.
    """
    writers = [_Writer(to, [each for each in parts if each]) for to, parts in outgoing]
    source = None if incoming is None else _Reader(incoming, reader)
    used = [each.connection for each in writers]
    if source is not None:
        used.append(source.connection)
    for connection in used:
        connection.set_timeout(0.0)
    while True:
        waits: list[_Writer | _Reader] = [each for each in writers if each.advance()]
        if source is not None and source.advance():
            waits.append(source)
        if not waits:
            break
        left = deadline - time.monotonic()  # noqa: TID251  # blocks a training process
        reads = [each.connection.fileno() for each in waits if each.waits_to_read]
        writes = [each.connection.fileno() for each in waits if not each.waits_to_read]
        if left <= 0 or not any(select.select(reads, writes, [], left)):
            late = ", ".join(each.connection.address for each in waits)
            raise Disconnected(f"{late}: timed out")
    for connection in used:
        connection.set_timeout(None)


class _Writer:
    """The rest of what is sent to a rank."""

    def __init__(self, connection: RankSocket, parts: list[memoryview]) -> None:
        self.connection = connection
        self.waits_to_read = False
        self._parts = parts

    def advance(self) -> bool:
        """Send what the connection takes; return whether there is more."""
        while self._parts:
            sent = self.connection.send_some(self._parts[0])
            if not sent:
                self.waits_to_read = sent is None
                return True
            rest = self._parts[0][sent:]
            self._parts[:1] = [rest] if rest else []
        return False


class _Reader:
    """The rest of what is received from a rank."""

    def __init__(
        self, connection: RankSocket, reader: Generator[memoryview, None, None]
    ) -> None:
        self.connection = connection
        self.waits_to_read = True
        self._reader = reader
        self._memory = next(reader, None)

    def advance(self) -> bool:
        """Receive what has arrived; return whether there is more to come."""
        while self._memory is not None:
            if not self._memory:
                self._memory = next(self._reader, None)
                continue
            count = self.connection.receive_some(self._memory)
            if not count:
                self.waits_to_read = count is not None
                return True
            self._memory = self._memory[count:]
        return False


class RankListener:
    """A port for the ranks of a group; ``tls`` encrypts what arrives there.

    ``plain_loopback``: connections from loopback addresses are not encrypted.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        tls: ServerTls | None = None,
        *,
        plain_loopback: bool = False,
    ) -> None:
        self._tls = tls
        self._plain_loopback = plain_loopback
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise Unavailable(
                f"ranks cannot listen on {host}:{port}: {_reason(error)}"
            ) from error
        # Connections inherit it; set later, it would not change the window.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_SIZE)

    @property
    def port(self) -> int:
        """The port it listens on."""
        port: int = self._socket.getsockname()[1]
        return port

    def accept(self) -> "AcceptedSocket | None":
        """Wait for a connection; None: the listener was closed."""
        while True:
            try:
                accepted = self._socket.accept()[0]
            except OSError:
                return None
            try:
                host, port = accepted.getpeername()[:2]
                _tune(accepted)
            except OSError:  # it has been reset
                accepted.close()
                continue
            plain = self._plain_loopback and is_loopback(host)
            tls = None if plain else self._tls
            return AcceptedSocket(accepted, f"{host}:{port}", tls)

    def close(self) -> None:
        """Stop listening; a thread in ``accept`` returns."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class LocalListener:
    """A local socket for the ranks of this machine, by a name.

    No other process gets the name while this listens; nothing is encrypted, as over
    loopback.  The name is one of the network namespace, and no file (unix(7), abstract
    sockets).
    """

    port = 0

    def __init__(self, name: str) -> None:
        """Listen.  Raises Unavailable."""
        try:
            with contextlib.ExitStack() as undo:
                self._socket = undo.enter_context(_local_socket())
                self._socket.bind(_local_name(name))
                self._socket.listen()
                undo.pop_all()
        except OSError as error:
            raise Unavailable(
                f"ranks cannot listen on a {LOCAL}: {_reason(error)}"
            ) from error

    def accept(self) -> "AcceptedSocket | None":
        """Wait for a connection; None: the listener was closed."""
        try:
            accepted = self._socket.accept()[0]
        except OSError:
            return None
        _set_buffer(accepted)
        return AcceptedSocket(accepted, LOCAL, None)

    def close(self) -> None:
        """Stop listening; a thread in ``accept`` returns."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def dial_local(name: str, timeout: float) -> RankSocket | None:
    """Connect to a rank of this machine; None if none listens under this name."""
    try:
        with contextlib.ExitStack() as undo:
            connected = undo.enter_context(_local_socket())
            connected.settimeout(timeout)
            connected.connect(_local_name(name))
            _set_buffer(connected)
            undo.pop_all()
    except OSError:
        return None
    return RankSocket(connected, LOCAL)


def dial(host: str, port: int, timeout: float, *, encrypts: bool) -> RankSocket:
    """Connect to a rank.

    Raises Disconnected.
    """
    address = f"{host}:{port}"
    try:
        connected = socket.create_connection((host, port), timeout)
        _tune(connected)
    except OSError as error:
        raise Disconnected(f"{address}: {_reason(error)}") from error
    return begin_client(connected, address, encrypts=encrypts)


class AcceptedSocket(NamedTuple):
    """A connection of a client; ``tls`` is how to encrypt it, None: it is plain."""

    socket: socket.socket
    address: str
    tls: ServerTls | None


def begin_server(accepted: AcceptedSocket, timeout: float) -> RankSocket:
    """Begin TLS on an accepted connection, where it is used.

    Raises Disconnected.
    """
    connected, address, tls = accepted
    try:
        connected.settimeout(timeout)
        if tls is None:
            return RankSocket(connected, address)
        wrapped = tls.context.wrap_socket(connected, server_side=True)
    except OSError as error:
        connected.close()
        raise Disconnected(f"{address}: {_reason(error)}") from error
    return RankSocket(wrapped, address, tls.certificate_hash)


def begin_client(
    connected: socket.socket, address: str, *, encrypts: bool
) -> RankSocket:
    """Begin TLS on a connection to a rank, where it is used.

    Any certificate is accepted: the handshake that follows proves the other end by its
    fingerprint.

    Raises Disconnected.
    """
    if not encrypts:
        return RankSocket(connected, address)
    try:
        wrapped = context_of_any().wrap_socket(connected)
        shown = wrapped.getpeercert(binary_form=True) or b""
    except OSError as error:
        connected.close()
        raise Disconnected(f"{address}: {_reason(error)}") from error
    return RankSocket(wrapped, address, hashlib.sha256(shown).digest())


def _local_socket() -> socket.socket:
    if sys.platform != "linux":
        raise OSError("only Linux has local sockets with names of their own")
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _tune(connected: socket.socket) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _set_buffer(connected)


def _set_buffer(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_SIZE)


def _local_name(name: str) -> str:
    return f"\0shoal/{name}"


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    return error.strerror or str(error)
