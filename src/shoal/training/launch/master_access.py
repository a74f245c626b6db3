"""How machines reach PyTorch's store, which the process of rank 0 has.

Where a machine cannot reach that of rank 0, as behind network address translation, its
processes find the store at a port of their own machine, whose connections pass through
the coordinator.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress

from shoal.training.run_events import run_id_of
from shoal.transports.blocking.rank_socket import Disconnected
from shoal.transports.relayed_sockets import RelayedSockets

PROBE_TIMEOUT = 3.0  # seconds for the machine of rank 0 to say which run it is of
CONNECT_TIMEOUT = 10.0  # seconds to connect to the store on the same machine
PIECE_SIZE = 64 << 10  # bytes
LOOPBACK = "127.0.0.1"


class MasterDoor:
    """Lets other machines reach the store at ``master_port`` of this one.

    Its own ``port``, open at all addresses of the kind of ``host``, answers each
    connection with the id of the run: elsewhere, the address of this machine may be
    that of another one.
    """

    def __init__(
        self, relay: RelayedSockets, token: str, host: str, master_port: int
    ) -> None:
        self._relay = relay
        self._name = run_id_of(token).encode()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        _serve(self._listener, self._answer)
        relay.listen(_relay_id(master_port), lambda each: _join(each, master_port))

    def close(self) -> None:
        """Admit no more connections, and end those over the coordinator."""
        _close(self._listener)
        self._relay.close()

    def _answer(self, client: socket.socket) -> None:
        with closing(client), suppress(OSError):
            client.sendall(self._name)


def is_reachable(token: str, host: str, door_port: int) -> bool:
    """Return whether the machine of rank 0 is found under an address."""
    name = run_id_of(token).encode()
    try:
        with socket.create_connection((host, door_port), PROBE_TIMEOUT) as door:
            # No secret: it distinguishes the machine from another of the same address.
            return door.makefile("rb").read(len(name)) == name
    except OSError:
        return False


class MasterForwarder:
    """A port of this machine that leads to the store, over the coordinator."""

    def __init__(self, relay: RelayedSockets, master_port: int) -> None:
        self._relay = relay
        self._relay_id = _relay_id(master_port)
        self._listener = socket.create_server((LOOPBACK, 0))
        self.address: tuple[str, int] = LOOPBACK, self._listener.getsockname()[1]
        _serve(self._listener, self._forward)

    def close(self) -> None:
        """End all connections."""
        _close(self._listener)
        self._relay.close()

    def _forward(self, client: socket.socket) -> None:
        with suppress(Disconnected):  # closed meanwhile
            _exchange(client, self._relay.dial(self._relay_id))
            return
        client.close()


def _relay_id(master_port: int) -> str:
    """Return under which id the store's machine listens at the coordinator."""
    return f"master-{master_port}"


def _join(relayed: socket.socket, master_port: int) -> None:
    """Connect a relayed connection to the store; close it if that does not listen."""

    def join() -> None:
        try:
            place = LOOPBACK, master_port
            _exchange(relayed, socket.create_connection(place, CONNECT_TIMEOUT))
        except OSError:
            relayed.close()

    threading.Thread(target=join, daemon=True).start()


def _serve(listener: socket.socket, handle: Callable[[socket.socket], None]) -> None:
    """Accept connections, in a thread, until the listener is closed."""

    def serve() -> None:
        with suppress(OSError):  # it was closed
            while True:
                client, _ = listener.accept()
                handle(client)

    threading.Thread(target=serve, daemon=True).start()


def _close(listener: socket.socket) -> None:
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
    listener.close()


def _exchange(one: socket.socket, other: socket.socket) -> None:
    """Pass on bytes between two sockets in threads, until either end is closed."""

    def copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(PIECE_SIZE):
                target.sendall(data)
        for each in (one, other):  # the store's protocol has no half-closed state
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def run() -> None:
        with closing(one), closing(other):
            back = threading.Thread(target=copy, args=(other, one), daemon=True)
            back.start()
            copy(one, other)
            back.join()

    for each in (one, other):
        each.settimeout(None)
    threading.Thread(target=run, daemon=True).start()
