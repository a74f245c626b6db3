"""A group with ranks of other programs: collectives, and data-parallel training.

The other programs have no generations and no agreement: after an error such a rank goes
on with its own gradients, silently.  So this rank ends the group at its first failure,
and cannot know whether the others have: see ``docs/training.md``.

Nothing on the wire names a rank, an operation or a step: a rank that misses one array
takes the next for it.  So the schedule is exactly that of the other programs, and each
received array must have the shape and dtype that is due.  A collective is a generator
of one rank, without I/O.  It yields ``Exchange`` and gets the received array; its
return value is the result.  Source: recorded exchanges of the other programs.
"""

import os
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from shoal.domain.errors import InvalidRequest, NotAdmitted, PeerError
from shoal.protocols.seam.ranks import ArrayWire, RankIdentity, RankRefused
from shoal.training.collectives import Array, Place, ring_order
from shoal.training.links import RankAcceptor, connect_to
from shoal.training.rank_port import GroupEnded
from shoal.transports.blocking import rank_socket

TIMEOUT = 120.0  # seconds for one array, as in the other programs
VECTOR_HEAD = 15  # bytes before the numbers of a float32 vector

MixedOp: TypeAlias = Literal["sum", "mean"]


class Exchange(NamedTuple):
    """Send arrays to some ranks, and at the same time receive one from a rank."""

    sends: Sequence[tuple[int, Array]] = ()
    source: int | None = None


MixedOperation: TypeAlias = Generator[Exchange, Array, Array]


class MixedGroup:
    """One rank of a group, to which ranks of other programs belong.

    ``names`` are the ids of all ranks, in their order; the connections are ready when
    ``connect`` returns.  A group is used by one thread.  ``tls`` must be the same in
    all ranks; None: connections are encrypted if there is a ``token``.

    All operations raise GroupEnded if a rank is lost or late, or sends something else
    than what is due; the group is then of no more use.
    """

    def __init__(
        self,
        wire: ArrayWire,
        listener: rank_socket.RankListener,
        rank: int,
        names: Sequence[str],
        *,
        token: str = "",
        fleet: str = "",
        timeout: float = TIMEOUT,
        tls: bool | None = None,
    ) -> None:
        self.place = Place(rank, len(names))
        self._wire = wire
        self._names = names
        self._encrypts = bool(token) if tls is None else tls
        self._timeout = timeout
        self._identity = RankIdentity(names[rank], token, os.urandom, fleet)
        self._connections: dict[int, rank_socket.RankSocket] = {}
        self._changed = threading.Condition()
        self._reason = ""
        self._acceptor = RankAcceptor(
            *(wire, listener, self._identity),
            secret_of=self._secret_of,
            add=self._add_client,
        )

    @property
    def numbers_max(self) -> int:
        """How many float32 numbers one array may have."""
        return (self._wire.payload_max - VECTOR_HEAD) // 4

    @property
    def port(self) -> int:
        """The port on which this rank listens."""
        return self._acceptor.port

    def connect(
        self, addresses: Mapping[int, tuple[str, int]], within: float = TIMEOUT
    ) -> None:
        """Dial the ranks with an address, and wait until the others have dialled.

        Raises GroupEnded if a rank does not connect in time.
        """
        deadline = time.monotonic() + within
        for rank, (host, port) in addresses.items():
            try:
                way = partial(rank_socket.dial, host, port, encrypts=self._encrypts)
                name = self._names[rank]
                connection = connect_to(
                    self._wire, self._identity, name, [way], deadline
                )
            except (rank_socket.Disconnected, RankRefused) as error:
                raise self.end(f"rank {rank}: {error}") from error
            self._add(rank, connection)
        with self._changed:
            everyone = self._changed.wait_for(
                lambda: len(self._connections) == self.place.size - 1,
                max(0.0, deadline - time.monotonic()),
            )
        if not everyone:
            missing = sorted(
                {*range(self.place.size)} - {self.place.rank, *self._connections}
            )
            raise self.end(f"ranks {missing} did not connect within {within:g} s")

    def all_reduce(self, array: Array, op: MixedOp = "mean") -> Array:
        """Return the sum or mean of the arrays of all ranks."""
        return self._run(all_reduce(self.place, array, op))

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """Return the root's array; others pass one of the same shape and dtype."""
        return self._run(broadcast(self.place, array, root))

    def gather(self, array: Array, root: int = 0) -> Array | None:
        """Return the arrays of all ranks to the root, stacked; None to others."""
        result = self._run(gather(self.place, array, root))
        return result if self.place.rank == root else None

    def scatter(self, array: Array, root: int = 0) -> Array:
        """Return this rank's part of the root's array, along the first axis."""
        return self._run(scatter(self.place, array, root))

    def close(self) -> None:
        """Close the connections, and the port."""
        self._acceptor.close()
        for connection in self._connections.values():
            connection.close()

    def _run(self, operation: MixedOperation) -> Array:
        if self._reason:
            raise GroupEnded(self._reason)
        try:
            action = next(operation)
            while True:
                # Each array has a limit of its own, as in the other programs.
                received = self._exchange(action, time.monotonic() + self._timeout)
                action = operation.send(received)
        except StopIteration as ended:
            result: Array = ended.value
            return result
        except (rank_socket.Disconnected, PeerError) as error:
            raise self.end(str(error)) from error

    def _exchange(self, action: Exchange, deadline: float) -> Array:
        outgoing = []
        for to, array in action.sends:
            head, numbers = self._wire.encode_array(array)
            outgoing.append((self._connections[to], (memoryview(head), numbers)))
        received: list[memoryview] = []
        source = action.source
        rank_socket.exchange(
            outgoing,
            None if source is None else self._connections[source],
            self._read(received),
            deadline,
        )
        if source is None:
            return action.sends[0][1]
        try:
            return self._wire.decode_array(bytes(received[0]), received[1])
        except PeerError as error:
            raise PeerError(f"rank {source}: {error}") from error

    def _read(self, received: list[memoryview]) -> Generator[memoryview, None, None]:
        """Yield memory for the head of an array, and then for the array."""
        head = memoryview(bytearray(self._wire.head_size))
        yield head
        payload = memoryview(bytearray(self._wire.array_size(bytes(head))))
        yield payload
        received += head, payload

    def end(self, reason: str) -> GroupEnded:
        """End the group in this rank, and disconnect the others."""
        self._reason = self._reason or reason
        for connection in self._connections.values():
            connection.abort()
        return GroupEnded(self._reason)

    def _secret_of(self, name: str) -> str:
        if name not in self._names:
            raise NotAdmitted(f"{name!a} is no rank of this group")
        return self._identity.secret

    def _add_client(
        self, name: str, connection: rank_socket.RankSocket, end: bytes
    ) -> None:
        connection.send(end)
        self._add(self._names.index(name), connection)

    def _add(self, rank: int, connection: rank_socket.RankSocket) -> None:
        with self._changed:
            # The other programs take a later connection for the same rank.
            replaced = self._connections.get(rank)
            self._connections[rank] = connection
            connection.address = f"rank {rank} ({connection.address})"  # in errors
            self._changed.notify_all()
        if replaced is not None:
            replaced.abort()


GRADIENT_MAX = 1e6  # beyond, the other programs discard a mean on their own
PARAMETERS_TYPE = "float32"


class MixedDataParallel:
    """Data-parallel training in a mixed group, in the order of the other programs.

    Parameters and gradients are float32 vectors.
    """

    def __init__(self, group: MixedGroup) -> None:
        self._group = group
        self._count = -1

    def start(self, parameters: Array) -> Array:
        """Return the parameters of rank 0, with which all ranks begin.

        Raises InvalidRequest if the ranks do not have the same number of parameters, or
        more than one array may have.
        """
        group = self._group
        limit = group.numbers_max
        if parameters.size > limit:
            raise InvalidRequest(
                f"{parameters.size} parameters: a group with other programs sends them "
                f"as one array, of at most {limit} float32 numbers"
            )
        flat = np.ascontiguousarray(parameters, PARAMETERS_TYPE).reshape(-1)
        counts = np.array([flat.size], np.float64)
        group.gather(counts)
        total = group.all_reduce(counts, "sum")
        if total[0] != flat.size * group.place.size:
            raise InvalidRequest(
                f"this rank has {flat.size} parameters, and all ranks together "
                f"{total[0]:.0f}: the models differ"
            )
        self._count = flat.size
        return group.broadcast(flat)

    def mean_gradient(self, gradient: Array) -> Array:
        """Return the mean of the gradients of all ranks.

        A gradient with a number that is not finite counts as zeros.

        Raises GroupEnded if the mean is not finite or exceeds ``GRADIENT_MAX``: the
        other programs then go on with their own gradients, and the replicas differ.
        """
        flat = np.ascontiguousarray(gradient, PARAMETERS_TYPE).reshape(-1)
        if flat.size != self._count:
            raise InvalidRequest(
                f"a gradient of {flat.size} numbers, expected {self._count}"
            )
        if not np.isfinite(flat).all():
            flat = np.zeros_like(flat)
        mean = self._group.all_reduce(flat, "mean")
        if not (np.abs(mean) <= GRADIENT_MAX).all():
            raise self._group.end(
                f"the mean gradient is not finite, or exceeds {GRADIENT_MAX:g}: other "
                "programs discard it, each for itself, so the replicas differ now"
            )
        return mean


def all_reduce(place: Place, array: Array, op: MixedOp) -> MixedOperation:
    """Return the sum or mean of the arrays of all ranks.

    Two ranks exchange their arrays; the mean of integers is float64.  More ranks form a
    ring; there, the mean of integers is truncated.
    """
    if op not in ("sum", "mean"):
        raise InvalidRequest(f"{op!r}: expected sum or mean")
    if place.size == 1:
        return array
    if place.size == 2:
        return (yield from _exchange_whole(place, array, op))
    return (yield from _ring(place, array, op))


def broadcast(place: Place, array: Array, root: int) -> MixedOperation:
    """Return the root's array; those of other ranks say what shape is due."""
    if place.rank != root:
        received = yield Exchange((), root)
        return _checked(received, array, root)
    yield Exchange([(rank, array) for rank in range(place.size) if rank != root])
    return array


def gather(place: Place, array: Array, root: int) -> MixedOperation:
    """Return all arrays, stacked, to the root, and to others their own."""
    if place.rank != root:
        yield Exchange([(root, array)])
        return array
    parts = []
    for rank in range(place.size):
        if rank == root:
            parts.append(array)
        else:
            received = yield Exchange((), rank)
            parts.append(_checked(received, array, rank))
    return np.stack(parts)


def scatter(place: Place, array: Array, root: int) -> MixedOperation:
    """Return this rank's part of the root's array, divided along the first axis.

    The first parts have one element more if the length is not a multiple of the size.
    Arrays of other ranks say what shape and dtype is due.
    """
    if not array.ndim:
        raise InvalidRequest("scatter: an array without an axis cannot be divided")
    parts = np.array_split(array, place.size)
    if place.rank != root:
        received = yield Exchange((), root)
        return _checked(received, parts[place.rank], root)
    yield Exchange([(rank, parts[rank]) for rank in range(place.size) if rank != root])
    return parts[root]


def _exchange_whole(place: Place, array: Array, op: MixedOp) -> MixedOperation:
    other = 1 - place.rank
    received = yield Exchange([(other, array)], other)
    total = array + _checked(received, array, other)
    return total / 2.0 if op == "mean" else total


def _ring(place: Place, array: Array, op: MixedOp) -> MixedOperation:
    rank, size = place
    length = -(-array.size // size)
    padded = np.zeros(length * size, array.dtype)
    padded[: array.size] = array.reshape(-1)
    chunks = list(padded.reshape(size, length))
    for sent, at in pairwise(ring_order(place, rank)):
        received = yield Exchange([(place.right, chunks[sent])], place.left)
        chunks[at] = chunks[at] + _checked(received, chunks[at], place.left)
    if op == "mean":
        chunks = [chunk / size for chunk in chunks]
    for sent, at in pairwise(ring_order(place, rank + 1)):
        received = yield Exchange([(place.right, chunks[sent])], place.left)
        chunks[at] = _checked(received, chunks[at], place.left)
    whole = np.concatenate(chunks)[: array.size]
    return whole.reshape(array.shape).astype(array.dtype, copy=False)


def _checked(received: Array, due: Array, source: int) -> Array:
    """Return a received array.  Raises PeerError if it is not the one that is due."""
    # Sums have the machine's native byte order, as NumPy returns them.
    same = received.dtype.newbyteorder("=") == due.dtype.newbyteorder("=")
    if received.shape != due.shape or not same:
        raise PeerError(
            f"rank {source} sent {received.dtype} of shape {received.shape}, expected "
            f"{due.dtype} of shape {due.shape}: its program is at another operation"
        )
    return received
