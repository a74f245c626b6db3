"""A line to a server of this machine that stops in the middle of an answer."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Event, Thread

from live.programs import PATIENCE

BLOCK = 1 << 16  # bytes that are read at once


@contextmanager
def gated_line(port: int, first: int) -> Iterator[tuple[int, Event]]:
    """Pass connections on to ``port``, and about the ``first`` bytes of what it says.

    The rest of each connection waits for the event.  Yields the line's port, and the
    event.
    """
    go_on = Event()

    class Passing(BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", port)) as server:
                asking = Thread(target=_pass, args=(self.request, server))
                asking.start()
                _pass(server, self.request, go_on, first)
                asking.join()

    class Line(ThreadingTCPServer):
        daemon_threads = True

    with Line(("127.0.0.1", 0), Passing) as line:
        serving = Thread(target=line.serve_forever, args=(0.05,))
        serving.start()
        try:
            yield line.server_address[1], go_on
        finally:
            go_on.set()
            line.shutdown()
            serving.join()


def _pass(
    source: socket.socket,
    to: socket.socket,
    go_on: Event | None = None,
    first: int = 0,
) -> None:
    """Pass on what comes, until an end closes the connection; then close it to both."""
    passed = 0
    with suppress(OSError):
        while data := source.recv(BLOCK):
            if go_on is not None and passed >= first:
                go_on.wait(PATIENCE)
            to.sendall(data)
            passed += len(data)
    for each in (source, to):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
