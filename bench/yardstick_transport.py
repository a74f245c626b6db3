"""The least that moving payloads costs: blocking sockets, and nothing checked.

A payload comes after its size and goes into the same memory as the one before it; one
byte acknowledges it.
"""

import socket
import ssl
import struct
import threading
from contextlib import closing, suppress

SIZE = struct.Struct("!Q")
READ_MAX = 64 << 20  # bytes of a payload
ACKNOWLEDGED = b"k"


def serve(tls: ssl.SSLContext | None) -> int:
    """Take payloads on a port of 127.0.0.1, until the process ends; return the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, tls), daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


def connect(port: int, *, secure: bool) -> socket.socket:
    """Connect to such a port."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not secure:
        return sock
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(sock)


def send(sock: socket.socket, payload: bytes) -> None:
    """Send a payload, and wait until it is acknowledged."""
    sock.sendall(SIZE.pack(len(payload)))
    sock.sendall(payload)
    if sock.recv(1) != ACKNOWLEDGED:
        raise RuntimeError("a payload was not acknowledged")


def _accept(listener: socket.socket, tls: ssl.SSLContext | None) -> None:
    place = memoryview(bytearray(READ_MAX))
    while True:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            sock = tls.wrap_socket(sock, server_side=True)
        with closing(sock), suppress(EOFError):
            while True:
                (size,) = SIZE.unpack(_read(sock, place[: SIZE.size]))
                _read(sock, place[:size])
                sock.sendall(ACKNOWLEDGED)


def _read(sock: socket.socket, place: memoryview) -> memoryview:
    at = 0
    while at < len(place):
        size = sock.recv_into(place[at:])
        if not size:
            raise EOFError
        at += size
    return place
