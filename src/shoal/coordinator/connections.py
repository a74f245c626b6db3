"""Which connection stands for which worker."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from shoal.domain.ids import WorkerId
from shoal.domain.vocabulary import Command, Dismiss
from shoal.protocols.seam.multi_peer import Protection
from shoal.protocols.seam.session import CloseCode


class WorkerConnection(Protocol):
    """A worker's connection, as the hub sees it."""

    @property
    def accepts(self) -> frozenset[type]: ...

    def send(self, message: Command) -> bool: ...

    def disconnect(self, reason: str, code: int, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class PeerRoute:
    """Which peer has a worker's model, and who else can read what it is told."""

    name: str
    protection: Protection


@dataclass(slots=True)
class WorkerRegistration:
    """What is known of a peer: little, until it has joined.

    ``via`` is there where a peer is more than one worker.
    """

    connection: WorkerConnection
    wire: str
    worker_id: WorkerId | None = None
    via: PeerRoute | None = None


class WorkerConnections:
    """The connections of all workers.

    What is heard runs ahead of what the pool knows by what is being stored at the
    moment.  Words are taken from the newest connection of a worker, but commands go to
    the one that the pool's worker stands for: a newer process of the same name has
    none of its jobs.
    """

    def __init__(self) -> None:
        self._newest: dict[WorkerId, WorkerRegistration] = {}  # as heard
        self._arriving: deque[WorkerRegistration] = (
            deque()
        )  # heard, not yet in the pool
        self._in_pool: dict[WorkerId, WorkerRegistration] = {}

    def __iter__(self) -> Iterator[WorkerConnection]:
        return iter([connection.connection for connection in self._newest.values()])

    def register(self, connection: WorkerRegistration, name: str) -> WorkerId:
        """Take ``connection`` as a worker's; an older one under its name is told."""
        worker_id = WorkerId(f"{connection.wire}:{name}")
        older = self._newest.get(worker_id)
        if older is not None:
            _dismiss(older.connection, "replaced by a newer connection")
        connection.worker_id = worker_id
        self._newest[worker_id] = connection
        self._arriving.append(connection)
        return worker_id

    def worker_of(self, connection: WorkerRegistration) -> WorkerId | None:
        """Return whom ``connection`` speaks for; nobody, once it has been replaced."""
        worker_id = connection.worker_id
        if worker_id is None or self._newest.get(worker_id) is not connection:
            return None
        return worker_id

    def unregister(self, connection: WorkerRegistration) -> WorkerId | None:
        """Forget a connection; return the worker that has gone with it, if one has."""
        worker_id = self.worker_of(connection)
        if worker_id is not None:
            del self._newest[worker_id]
        return worker_id

    # In step with the pool.

    def on_worker_joined(self, worker_id: WorkerId) -> None:
        """Note that the worker which joined first of those arriving is in the pool."""
        self._in_pool[worker_id] = self._arriving.popleft()

    def on_worker_left(self, worker_id: WorkerId) -> None:
        """Note that the pool has lost the worker."""
        del self._in_pool[worker_id]

    def connection_of(self, worker_id: WorkerId) -> WorkerConnection:
        """Return the connection that the pool's worker stands for."""
        return self._in_pool[worker_id].connection

    def route_of(self, worker_id: WorkerId) -> PeerRoute | None:
        """Return which peer the pool's worker is a part of, if it is one of several."""
        entered = self._in_pool.get(worker_id)  # None: it is being stored
        return None if entered is None else entered.via


def _dismiss(peer: WorkerConnection, reason: str) -> None:
    if Dismiss in peer.accepts:
        peer.send(Dismiss(reason))
    else:
        peer.disconnect(reason, CloseCode.NORMAL, reason)
