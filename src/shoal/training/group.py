"""A group of ranks in one generation: runs collectives, one at a time.

One thread runs collectives; any may send and receive beside it.  A group ends with its
first failure, in all ranks: a rank that fails ends its connections, so that the next
one fails, and so on around.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from shoal.domain.errors import InvalidRequest, PeerError
from shoal.training import all_reduces, collectives
from shoal.training.collectives import (
    Array,
    Kind,
    Operation,
    Place,
    ReceiveSegment,
    ReduceOp,
    bytes_of,
    reduction,
)
from shoal.training.compression.choice import AutoCompression
from shoal.training.compression.error_feedback import ErrorFeedback
from shoal.training.links import GroupStep, IncomingLink, OutgoingLink, OutOfStep
from shoal.training.point_to_point import ArrayTransfer, PointToPoint
from shoal.training.rank_port import GroupLinks
from shoal.transports.blocking.rank_socket import Disconnected

TIMEOUT = 30.0  # seconds of one operation


class RankGroup:
    """The collectives of one rank.

    Each blocks until this rank's part is done, and raises GroupEnded if a rank is lost,
    late or out of step.  ``timeout`` limits one operation, in seconds.  All ranks call
    the same collectives in the same order, with arrays of the same shape and dtype.
    """

    def __init__(
        self,
        links: GroupLinks,
        timeout: float = TIMEOUT,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._links = links
        self._on_close = on_close
        membership = links.membership
        self.place = Place(membership.rank, membership.size)
        self._at = GroupStep(membership.generation, 0)
        self._auto = AutoCompression()
        self._waits_for: int | None = None  # the rank that an operation waits for
        self._timeout = timeout
        self._watchdog = Watchdog(timeout, self._expire)
        self.point_to_point = PointToPoint(links)

    @property
    def generation(self) -> int:
        """The number of the group's generation."""
        return self._at.generation

    @property
    def transfers(self) -> bool:
        """Whether it sends or receives arrays from rank to rank."""
        return self.point_to_point.is_busy

    def set_step(self, step: int) -> None:
        """Set the step of training to which the next operations belong."""
        self._at = self._at._replace(step=step)

    def all_reduce(
        self,
        array: Array,
        op: ReduceOp = "sum",
        result: Array | None = None,
        *,
        compression: all_reduces.Compression | None = None,
    ) -> Array:
        """Combine the arrays of all ranks, into ``result`` or in place.

        With a ``result``, ``array`` keeps its numbers if the group ends.  All ranks
        get the same bits.

        ``compression`` sends float32 numbers in fewer bytes, each rounded twice: by
        ``"fp16"`` and ``"bf16"`` in a half, by ``"fp8"`` and ``"int8"`` in a quarter.
        ``"auto"`` takes what suits the links, or none.  ``ErrorFeedback`` adds what a
        compression leaves out to the next array, and has ``"topk"`` as well.
        ``docs/training.md`` has their errors and costs.

        Raises InvalidRequest for dtypes without this operation or compression, and for
        arrays that are not in C order.
        """
        target = array if result is None else result
        feedback: ErrorFeedback | None = None
        wanted: all_reduces.ChosenCompression | Literal["auto"]
        if isinstance(compression, ErrorFeedback):
            feedback, wanted = compression, compression.compression
        else:
            wanted = compression
        if wanted == "auto":
            ratio = 0.0 if feedback is None else feedback.ratio
            chosen = self._auto.choose(self, array, ratio)
        else:
            chosen = wanted
        kind, operation = all_reduces.all_reduce_operation(
            self.place, array, target, op, chosen, feedback
        )
        self.run(kind, operation)
        if feedback is not None:
            feedback.commit()
        return target

    def reduce_scatter(self, array: Array, op: ReduceOp = "sum") -> Array:
        """Combine the arrays of all ranks, and return part r of the result to rank r.

        The parts divide the first axis, whose length is a multiple of the ranks.

        Raises InvalidRequest as ``all_reduce`` does, and for another length.
        """
        size = self.place.size
        if not array.ndim or array.shape[0] % size:
            raise InvalidRequest(
                f"an array of shape {array.shape} cannot be divided among {size} ranks"
            )
        result = np.empty((array.shape[0] // size, *array.shape[1:]), array.dtype)
        combined = reduction(op, array.dtype, size)
        ends = [result.nbytes * (each + 1) for each in range(size)]
        self.run(
            Kind.REDUCE_SCATTER,
            collectives.reduce_scatter(
                self.place, bytes_of(array), bytes_of(result), combined, ends
            ),
        )
        return result

    def all_gather(self, array: Array) -> Array:
        """Return the arrays of all ranks, stacked in the order of ranks."""
        rank, size = self.place
        result = np.empty((size, *array.shape), array.dtype)
        result[rank] = array
        ends = [array.nbytes * (each + 1) for each in range(size)]
        self.run(
            Kind.ALL_GATHER, collectives.all_gather(self.place, bytes_of(result), ends)
        )
        return result

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """Copy the root's array into that of each rank, and return it."""
        self._check_rank(root)
        self.run(
            Kind.BROADCAST, collectives.broadcast(self.place, bytes_of(array), root)
        )
        return array

    def gather(self, array: Array, root: int = 0) -> Array | None:
        """Return the arrays of all ranks to the root, stacked; None to others."""
        self._check_rank(root)
        own, parts, result = bytes_of(np.ascontiguousarray(array)), [], None
        if self.place.rank == root:
            result = np.empty((self.place.size, *array.shape), array.dtype)
            parts = [bytes_of(part) for part in result]
        self.run(Kind.GATHER, collectives.gather(self.place, own, parts, root))
        return result

    def scatter(
        self, result: Array, arrays: Sequence[Array] = (), root: int = 0
    ) -> Array:
        """Copy array r of the root into rank r's ``result``, and return it.

        Raises InvalidRequest at the root if there is not one array a rank, each of the
        size of ``result``.
        """
        self._check_rank(root)
        if self.place.rank == root and (
            len(arrays) != self.place.size
            or any(each.nbytes != result.nbytes for each in arrays)
        ):
            raise InvalidRequest(
                f"scatter: expected {self.place.size} arrays of {result.nbytes} bytes"
            )
        parts = [bytes_of(each) for each in arrays]
        self.run(
            Kind.SCATTER, collectives.scatter(self.place, parts, bytes_of(result), root)
        )
        return result

    def all_to_all(self, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        """Copy array s of rank r into result r of rank s, for all ranks.

        Raises InvalidRequest if there is not one array and one result a rank.
        """
        size = self.place.size
        if len(arrays) != size or len(results) != size:
            raise InvalidRequest(f"all_to_all: expected {size} arrays and results")
        self.run(
            Kind.ALL_TO_ALL,
            collectives.all_to_all(
                self.place,
                [bytes_of(each) for each in arrays],
                [bytes_of(each) for each in results],
            ),
        )

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self.run(Kind.BARRIER, collectives.barrier(self.place))

    def send(self, array: Array, to: int, tag: int = 0) -> None:
        """Send an array to a rank, which receives it by its tag."""
        self._check_rank(to)
        self._transfer(self.point_to_point.send, to, tag, array)

    def receive(self, array: Array, source: int | None = None, tag: int = 0) -> Array:
        """Receive an array from a rank, or any, into this one, and return it."""
        if source is not None:
            self._check_rank(source)
        self._transfer(self.point_to_point.receive, source, tag, array)
        return array

    def expire(self, rank: int | None) -> None:
        """End the group: an operation has waited for a rank beyond the limit."""
        name = "every rank" if rank is None else self._links.membership.name(rank)
        self._links.abort(_late(name, self._timeout), rank)

    def run(self, kind: Kind, operation: Operation) -> None:
        """Carry out a collective; all it sends has been sent when this returns."""
        self._links.check()
        self._watchdog.start()
        try:
            self._carry_out(kind, operation)
        except (Disconnected, PeerError) as error:
            self._links.abort(
                f"{self._suspect()}: {error}",
                self._waits_for,
                out_of_step=isinstance(error, OutOfStep),
            )
            self._links.check()
        finally:
            self._watchdog.stop()
            self._waits_for = None
        self._links.check()

    def abort(self, reason: str) -> None:
        """End the group in all ranks; any thread may call it."""
        self._links.abort(reason)

    def close(self) -> None:
        """Close the connections; not while an operation runs."""
        self._watchdog.close()
        self._links.close()
        self._on_close()

    def _carry_out(self, kind: Kind, operation: Operation) -> None:
        links, at = self._links, self._at
        outgoing: dict[int, OutgoingLink] = {}
        incoming: dict[int, IncomingLink] = {}
        for action in operation:
            if isinstance(action, ReceiveSegment):
                source = action.source
                self._waits_for = source
                if (begun := incoming.get(source)) is None:
                    begun = incoming[source] = links.incoming(source)
                    begun.begin(kind)
                begun.receive_into(action.into, at)
            else:
                to = action.to
                if (started := outgoing.get(to)) is None:
                    started = outgoing[to] = links.outgoing(to)
                    # A rank that fails before could not let the other one know.
                    started.wait()
                    started.begin(kind)
                started.send(action.data, at)
        for rank, link in outgoing.items():
            self._waits_for = rank
            link.flush()

    def _transfer(
        self,
        begin: Callable[[ArrayTransfer], None],
        peer: int | None,
        tag: int,
        array: Array,
    ) -> None:
        """Send or receive an array, and wait for it."""
        # No SimpleQueue: a signal at the limit lets that wait for ever (Python 3.11).
        ended = threading.Event()
        errors: list[Exception | None] = []

        def on_end(error: Exception | None) -> None:
            errors.append(error)
            ended.set()

        begin(ArrayTransfer(peer, tag, bytes_of(array), on_end))
        if not ended.wait(self._timeout):
            self.expire(peer)
            ended.wait()
        if errors[0] is not None:
            raise errors[0]

    def _expire(self, timeout: float) -> None:
        self._links.abort(_late(self._suspect(), timeout), self._waits_for)

    def _suspect(self) -> str:
        """Return what the operation waits for."""
        if self._waits_for is None:
            return "this rank"
        return self._links.membership.name(self._waits_for)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.place.size:
            raise InvalidRequest(f"rank {rank} of a group of {self.place.size}")


def _late(name: str, timeout: float) -> str:
    return f"{name} is late: an operation took longer than {timeout:g} s"


class Watchdog:
    """Calls ``expire``, with the limit, from its own thread if a start has no stop.

    A thread that waits for a socket without a limit needs fewer system calls.
    """

    def __init__(self, timeout: float, expire: Callable[[float], None]) -> None:
        self._timeout = timeout
        self._expire = expire
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Expect a stop before the limit."""
        self._deadline = time.monotonic() + self._timeout

    def stop(self) -> None:
        """Expect nothing."""
        self._deadline = None

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _watch(self) -> None:
        # It looks a few times in each limit instead of being woken by each start.
        interval = self._timeout / 8
        with self._changed:
            while not self._changed.wait_for(lambda: self._closed, interval):
                deadline = self._deadline
                if deadline is not None and time.monotonic() >= deadline:
                    self._deadline = None
                    self._expire(self._timeout)
