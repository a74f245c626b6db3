"""The two ends of a connection between ranks, which carries segments one way.

A segment's label says which operation it belongs to, so that a rank that is out of step
is an error, and never a wrong sum.  Segments have no checksum: between machines TLS
authenticates them, and a checksum takes a sixth of the CPU time within one.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

from shoal.domain.errors import PeerError
from shoal.protocols.seam.ranks import (
    GENERATION_MAX,
    STEP_MAX,
    SegmentLabel,
    SegmentWire,
)
from shoal.training.collectives import Kind
from shoal.transports.rank_socket import Disconnected, RankSocket

OPERATIONS = 1 << 32  # after the last, operations are counted from 0 again


class OutOfStep(PeerError):
    """A rank is at another operation, or has an array of another size.

    Repeating the operation would not help: the programs of the ranks differ.
    """


class GroupStep(NamedTuple):
    """The generation of a group, and the step of training."""

    generation: int = 0
    step: int = 0


_Queued: TypeAlias = (
    tuple[bytes, memoryview] | threading.Event | Callable[[], None] | None
)
"""The rest of a segment; an event to set; what to call; None: end."""


class _Labels:
    """Numbers the segments of one direction of one connection."""

    def __init__(self) -> None:
        self._operation = 0
        self._index = 0
        self._kind = 0

    def begin(self, kind: Kind) -> None:
        self._operation = (self._operation + 1) % OPERATIONS
        self._kind = kind
        self._index = 0

    def next(self, at: GroupStep) -> SegmentLabel:
        label = SegmentLabel(
            self._kind,
            self._operation,
            self._index,
            at.generation & GENERATION_MAX,
            at.step & STEP_MAX,
        )
        self._index += 1
        return label


class OutgoingLink:
    """Sends segments to one rank, in order, from a thread of its own.

    ``connect`` is called from that thread, and so is ``on_failure``, with the reason,
    if it raises Disconnected, or sending does.
    """

    def __init__(
        self,
        connect: Callable[[], RankSocket],
        wire: SegmentWire,
        on_failure: Callable[[str], None],
    ) -> None:
        self._connect = connect
        self._connection: RankSocket | None = None
        self._opened = threading.Event()
        self._wire = wire
        self._on_failure = on_failure
        self._labels = _Labels()
        self._queue: SimpleQueue[_Queued] = SimpleQueue()
        self._queued = 0  # segments; changed by who sends
        self._taken = 0  # of these, those that were sent; changed by the thread
        self._thread = threading.Thread(target=self._send_all, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until it is connected, or cannot be."""
        self._opened.wait()

    def begin(self, kind: Kind) -> None:
        """Begin the next operation."""
        self._labels.begin(kind)

    def send(self, data: memoryview, at: GroupStep) -> None:
        """Send a segment, now or soon; its memory must not change before ``flush``."""
        head = self._wire.encode_segment(self._labels.next(at), len(data))
        sent = 0
        if self._connection is not None and self._queued == self._taken:
            # A core has it in its cache now, and waking a thread takes longer.
            sent = self._connection.send_now(head, data)
        if sent < len(head) + len(data):
            self._queued += 1
            self._queue.put((head[sent:], data[max(0, sent - len(head)) :]))

    def flush(self) -> None:
        """Wait until everything has been sent, or cannot be."""
        if self._queued != self._taken:
            sent = threading.Event()
            self._queue.put(sent)
            sent.wait()

    def call(self, after: Callable[[], None]) -> None:
        """Call a function once everything before it has been sent, from the thread."""
        self._queue.put(after)

    def close(self) -> None:
        """Send what is queued, then close, if it is connected."""
        self._queue.put(None)
        if self._connection is not None:
            self._thread.join()

    def _send_all(self) -> None:
        try:
            self._connection = connection = self._connect()
        except Disconnected as error:
            self._fail(error)
            return
        self._opened.set()
        try:
            while (item := self._queue.get()) is not None:
                if isinstance(item, threading.Event):
                    item.set()
                elif isinstance(item, tuple):
                    connection.send(*item)
                    self._taken += 1
                else:
                    item()
        except Disconnected as error:
            self._fail(error)
        finally:
            connection.close()

    def _fail(self, error: Disconnected) -> None:
        """Send nothing more."""
        self._on_failure(str(error))
        self._opened.set()
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()


class IncomingLink:
    """Receives segments from one rank."""

    def __init__(self, connection: RankSocket, wire: SegmentWire) -> None:
        self._connection = connection
        self._wire = wire
        self._labels = _Labels()
        self._head = memoryview(bytearray(wire.head_size))

    def begin(self, kind: Kind) -> None:
        """Begin the next operation."""
        self._labels.begin(kind)

    def receive_into(self, memory: memoryview, at: GroupStep) -> None:
        """Receive the next segment, of exactly this size.

        Raises Disconnected, OutOfStep, and PeerError if the rank sends anything else.
        """
        self._connection.receive_into(self._head)
        label, size = self._wire.decode_segment(bytes(self._head))
        expected = self._labels.next(at)
        if label != expected:
            raise OutOfStep(_mismatch(label, expected))
        if size != len(memory):
            raise OutOfStep(
                f"a segment of {size} bytes, expected {len(memory)}: the ranks do not "
                "agree on the size of the array"
            )
        self._connection.receive_into(memory)

    def abort(self) -> None:
        """End the connection; any thread may call it."""
        self._connection.abort()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _mismatch(label: SegmentLabel, expected: SegmentLabel) -> str:
    """Return in what a label differs from the expected one."""
    for name, found, wanted in zip(label._fields, label, expected, strict=True):
        if found != wanted:
            return f"a segment of {name} {found}, expected {wanted}"
    raise AssertionError("the labels differ")
