"""A WebSocket that a thread reads: each message at once, into memory that it has.

An event loop copies what it reads several times, in small pieces; gigabytes then take
most of a core.
"""

import base64
import secrets  # noqa: TID251  # the key of a handshake
import socket
import ssl
import struct
from contextlib import suppress
from urllib.parse import urlsplit

from shoal.transports.link import CONNECT_TIMEOUT, LinkClosed
from shoal.transports.tls import context_of_any, context_of_system, context_pinning

HEAD_MAX = 16 << 10  # bytes of the answer to the upgrade
BINARY = 0x82  # a whole message in one frame (RFC 6455, section 5.2)
SIZES = {126: struct.Struct("!H"), 127: struct.Struct("!Q")}
SWITCHED = b"HTTP/1.1 101 "


class BulkSocket:
    """A connection to ``ws://``, ``wss://`` or ``wss-any://``; it sends nothing.

    ``fingerprint`` and the schemes are as in ``connect_websocket``.  One thread
    connects and receives; any may ``close``.
    """

    def __init__(self, url: str, fingerprint: bytes | None = None) -> None:
        self._url = url
        self._fingerprint = fingerprint
        self._socket: socket.socket | None = None
        self._closed = False

    def connect(self) -> bool:
        """Connect; return False if that is refused, or there is no way.

        Raises LinkClosed if the server may have accepted it.
        """
        parts = urlsplit(self._url)
        secure, host = parts.scheme != "ws", parts.hostname or ""
        # The zone of a link-local address: % is escaped in URLs (RFC 6874).
        address = host.replace("%25", "%"), parts.port or (443 if secure else 80)
        try:
            connected = socket.create_connection(address, CONNECT_TIMEOUT)
            if secure:
                context = self._context(parts.scheme)
                connected = context.wrap_socket(connected, server_hostname=host)
        except (OSError, ValueError):
            return False
        self._socket = connected
        connected.settimeout(None)  # a busy server may let it wait for its turn
        try:
            return self._upgrade(f"{parts.path}?{parts.query}", parts.netloc)
        except OSError as error:
            raise LinkClosed(f"bulk connection lost: {error}") from error

    def receive_into(self, buffer: memoryview) -> int:
        """Receive the next message into the beginning of a buffer; return its size.

        Raises LinkClosed, also for one that does not fit.
        """
        try:
            kind, size = self._exactly(2)
            if (long := SIZES.get(size)) is not None:
                (size,) = long.unpack(self._exactly(long.size))
            if kind != BINARY or size > len(buffer):
                raise LinkClosed("the bulk connection has ended")
            self._fill(buffer[:size])
        except OSError as error:
            raise LinkClosed(f"bulk connection lost: {error}") from error
        return int(size)

    def close(self) -> None:
        """Let what another thread does here fail."""
        self._closed = True
        if self._socket is not None:
            with suppress(OSError):
                # Of TLS, too, only the socket: the other thread is using the rest.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def end(self) -> None:
        """Close it in the thread that used it."""
        if self._socket is not None:
            self._socket.close()

    def _context(self, scheme: str) -> ssl.SSLContext:
        if scheme == "wss-any":
            return context_of_any()
        if self._fingerprint is not None:
            return context_pinning(self._fingerprint)
        return context_of_system()

    def _upgrade(self, target: str, host: str) -> bool:
        """Open the WebSocket (RFC 6455, section 4.1); return False if it is refused.

        Raises OSError and LinkClosed.
        """
        assert self._socket is not None, "it is connected"
        key = base64.b64encode(secrets.token_bytes(16)).decode()
        lines = (
            f"GET {target} HTTP/1.1",
            f"Host: {host}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key}",
            "Sec-WebSocket-Version: 13",
        )
        self._socket.sendall("\r\n".join((*lines, "", "")).encode("ascii"))
        head = bytearray()
        while not head.endswith(b"\r\n\r\n"):  # and not a byte of what follows
            head += self._exactly(1)
            if len(head) > HEAD_MAX:
                raise LinkClosed("a bulk connection is answered without an end")
        return head.startswith(SWITCHED)

    def _exactly(self, size: int) -> bytes:
        found = bytearray(size)
        self._fill(memoryview(found))
        return bytes(found)

    def _fill(self, view: memoryview) -> None:
        """Receive until a buffer is full.  Raises OSError and LinkClosed."""
        assert self._socket is not None, "it is connected"
        while view:
            count = 0 if self._closed else self._socket.recv_into(view)
            if not count:
                raise LinkClosed("the bulk connection has ended")
            view = view[count:]
