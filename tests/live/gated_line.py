"""A line to a server of this machine that stops in the middle of an answer."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Event, Thread

from live.programs import PATIENCE

BLOCK = 1 << 16  # bytes that are read at once


@dataclass
class GatedLine:
    """Passes connections on, and about the ``first`` bytes of what the server says.

    The rest waits for ``go_on``.  ``passed`` counts the bytes that the server has said
    on all connections.
    """

    server: int
    first: int
    port: int = 0
    passed: int = 0
    go_on: Event = field(default_factory=Event)

    def carry(self, client: socket.socket) -> None:
        """Carry one connection until it ends."""
        with socket.create_connection(("127.0.0.1", self.server)) as server:
            asking = Thread(target=_pass, args=(client, server))
            asking.start()
            _pass(server, client, self)
            asking.join()


@contextmanager
def gated_line(server: int, first: int) -> Iterator[GatedLine]:
    """Open a line to a port."""
    gate = GatedLine(server, first)

    class Passing(BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):  # the server is gone
                gate.carry(self.request)

    class Line(ThreadingTCPServer):
        daemon_threads = True

    with Line(("127.0.0.1", 0), Passing) as line:
        serving = Thread(target=line.serve_forever, args=(0.05,))
        serving.start()
        gate.port = line.server_address[1]
        try:
            yield gate
        finally:
            gate.go_on.set()
            line.shutdown()
            serving.join()


def _pass(
    source: socket.socket, to: socket.socket, gate: GatedLine | None = None
) -> None:
    """Pass on what comes, until an end closes the connection; then close it to both."""
    with suppress(OSError):
        while data := source.recv(BLOCK):
            if gate is not None:
                if gate.passed >= gate.first:
                    gate.go_on.wait(PATIENCE)
                gate.passed += len(data)
            to.sendall(data)
    for each in (source, to):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
