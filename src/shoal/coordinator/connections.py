"""Maps workers to their connections."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from shoal.domain.ids import WorkerId
from shoal.domain.vocabulary import Command, Dismiss, RunningJobNames
from shoal.protocols.seam.peer_session import Protection
from shoal.protocols.seam.session import CloseCode


class WorkerConnection(Protocol):
    """A worker's connection, as the hub sees it."""

    @property
    def accepts(self) -> frozenset[type]: ...

    def send(self, message: Command) -> bool: ...

    def disconnect(self, reason: str, code: int, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class PeerRoute:
    """The peer that runs a worker's model, and the encryption on the way to it."""

    name: str
    protection: Protection


@dataclass(slots=True)
class WorkerRegistration:
    """A connection and its worker, if that has joined.

    ``via`` is set if the worker is a model of a peer; ``opened_at`` is monotonic.
    ``running`` are the jobs that it ran when it joined, as in ``Joined``.
    """

    connection: WorkerConnection
    wire: str
    opened_at: float
    worker_id: WorkerId | None = None
    via: PeerRoute | None = None
    running: RunningJobNames = ()


class WorkerConnections:
    """The connections of all workers.

    Connections change before the pool does, because the facts are stored first.  Events
    are accepted from the newest connection of a worker, but commands go to the
    connection of the worker in the pool: a newer process of the same name has none of
    its jobs.
    """

    def __init__(self) -> None:
        self._newest: dict[WorkerId, WorkerRegistration] = {}
        # Joined, but not in the pool yet.
        self._arriving: deque[WorkerRegistration] = deque()
        self._in_pool: dict[WorkerId, WorkerRegistration] = {}

    def __iter__(self) -> Iterator[WorkerConnection]:
        return iter([connection.connection for connection in self._newest.values()])

    def register(self, connection: WorkerRegistration, name: str) -> WorkerId:
        """Register a worker's connection; dismiss an older one of the same name."""
        worker_id = WorkerId(f"{connection.wire}:{name}")
        older = self._newest.get(worker_id)
        if older is not None:
            _dismiss(
                older.connection,
                Dismiss("replaced by a newer connection", replaced=True),
            )
        connection.worker_id = worker_id
        self._newest[worker_id] = connection
        self._arriving.append(connection)
        return worker_id

    def worker_of(self, connection: WorkerRegistration) -> WorkerId | None:
        """Return the worker of ``connection``; None once it is replaced."""
        worker_id = connection.worker_id
        if worker_id is None or self._newest.get(worker_id) is not connection:
            return None
        return worker_id

    def unregister(self, connection: WorkerRegistration) -> WorkerId | None:
        """Remove a connection; return the worker that left with it, if any."""
        worker_id = self.worker_of(connection)
        if worker_id is not None:
            del self._newest[worker_id]
        return worker_id

    # From the pool.

    def on_worker_joined(self, worker_id: WorkerId) -> RunningJobNames:
        """Move the first of the arriving workers into the pool.

        Returns the jobs that it ran when it joined.
        """
        entered = self._in_pool[worker_id] = self._arriving.popleft()
        return entered.running

    def on_worker_left(self, worker_id: WorkerId) -> None:
        """Remove a worker that left the pool."""
        del self._in_pool[worker_id]

    def dismiss(self, worker_id: WorkerId, reason: str) -> None:
        """Disconnect the worker in the pool, which then leaves it."""
        _dismiss(self.connection_of(worker_id), Dismiss(reason))

    def connection_of(self, worker_id: WorkerId) -> WorkerConnection:
        """Return the connection of the worker in the pool."""
        return self._in_pool[worker_id].connection

    def route_of(self, worker_id: WorkerId) -> PeerRoute | None:
        """Return the peer that the worker is a model of, if it is one."""
        entered = self._in_pool.get(worker_id)  # None: not in the pool yet
        return None if entered is None else entered.via

    def opened_at(self, worker_id: WorkerId) -> float | None:
        """Return the time at which the worker's connection was opened."""
        entered = self._in_pool.get(worker_id)
        return None if entered is None else entered.opened_at


def _dismiss(peer: WorkerConnection, dismissal: Dismiss) -> None:
    reason = dismissal.reason
    if Dismiss in peer.accepts:
        peer.send(dismissal)
    else:
        peer.disconnect(reason, CloseCode.NORMAL, reason)
