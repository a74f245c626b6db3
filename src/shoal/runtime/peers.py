"""Which connection stands for which worker."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from shoal.domain.ids import WorkerId
from shoal.domain.vocabulary import Command, Dismiss
from shoal.protocols.crowd import Protection

NORMAL = 1000  # WebSocket close code (RFC 6455, section 7.4.1)


class Peer(Protocol):
    """A worker's connection, as the hub sees it."""

    @property
    def accepts(self) -> frozenset[type]: ...

    def issue(self, message: Command) -> bool: ...

    def hang_up(self, reason: str, code: int, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Via:
    """Which peer has a worker's model, and who else can read what it is told."""

    name: str
    protection: Protection


@dataclass(slots=True)
class Connection:
    """What is known of a peer: little, until it has joined.

    ``via`` is there where a peer is more than one worker.
    """

    peer: Peer
    wire: str
    worker_id: WorkerId | None = None
    via: Via | None = None


class Peers:
    """The connections of all workers.

    What is heard runs ahead of what the pool knows by what is being stored at the
    moment.  Words are taken from the newest connection of a worker, but commands go to
    the one that the pool's worker stands for: a newer process of the same name has
    none of its jobs.
    """

    def __init__(self) -> None:
        self._newest: dict[WorkerId, Connection] = {}  # as heard
        self._arriving: deque[Connection] = deque()  # heard, not yet in the pool
        self._in_pool: dict[WorkerId, Connection] = {}

    def __iter__(self) -> Iterator[Peer]:
        return iter([connection.peer for connection in self._newest.values()])

    def join(self, connection: Connection, name: str) -> WorkerId:
        """Take ``connection`` as a worker's; an older one under its name is told."""
        worker_id = WorkerId(f"{connection.wire}:{name}")
        older = self._newest.get(worker_id)
        if older is not None:
            _dismiss(older.peer, "replaced by a newer connection")
        connection.worker_id = worker_id
        self._newest[worker_id] = connection
        self._arriving.append(connection)
        return worker_id

    def speaker(self, connection: Connection) -> WorkerId | None:
        """Return whom ``connection`` speaks for; nobody, once it has been replaced."""
        worker_id = connection.worker_id
        if worker_id is None or self._newest.get(worker_id) is not connection:
            return None
        return worker_id

    def leave(self, connection: Connection) -> WorkerId | None:
        """Forget a connection; return the worker that has gone with it, if one has."""
        worker_id = self.speaker(connection)
        if worker_id is not None:
            del self._newest[worker_id]
        return worker_id

    # In step with the pool.

    def entered(self, worker_id: WorkerId) -> None:
        """Note that the worker which joined first of those arriving is in the pool."""
        self._in_pool[worker_id] = self._arriving.popleft()

    def left(self, worker_id: WorkerId) -> None:
        """Note that the pool has lost the worker."""
        del self._in_pool[worker_id]

    def of(self, worker_id: WorkerId) -> Peer:
        """Return the connection that the pool's worker stands for."""
        return self._in_pool[worker_id].peer

    def via(self, worker_id: WorkerId) -> Via | None:
        """Return which peer the pool's worker is a part of, if it is one of several."""
        entered = self._in_pool.get(worker_id)  # None: it is being stored
        return None if entered is None else entered.via


def _dismiss(peer: Peer, reason: str) -> None:
    if Dismiss in peer.accepts:
        peer.issue(Dismiss(reason))
    else:
        peer.hang_up(reason, NORMAL, reason)
