"""A connection between ranks: how it begins, and its two ends.

It is dialled or accepted, begins with a handshake, and carries segments one way.  A
segment's label says which operation it belongs to, so that a rank that is out of step
is an error, and never a wrong sum.  Segments have no checksum: between machines TLS
authenticates them, and a checksum takes a sixth of the CPU time within one.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

from shoal.domain.errors import NotAdmitted, PeerError
from shoal.protocols.seam import ranks
from shoal.training.collectives import Kind
from shoal.transports.blocking.rank_socket import (
    AcceptedSocket,
    Disconnected,
    LocalListener,
    RankListener,
    RankSocket,
    begin_server,
)

HANDSHAKE_TIMEOUT = 10.0  # seconds of a handshake
ADMITTING_MAX = 64  # connections in their handshake at a time; others wait
WAY_TIMEOUT = 3.0  # seconds for one of several ways to a rank
DIAL_INTERVAL = 0.05  # seconds between attempts to reach a rank that is starting
OPERATIONS = 1 << 32  # after the last, operations are counted from 0 again

Way: TypeAlias = Callable[[float], RankSocket]
"""Connects to a rank within a number of seconds, or raises Disconnected."""

Add: TypeAlias = Callable[[str, RankSocket, bytes], None]
"""Takes over the connection of a peer, and sends it the end of the handshake.

A connection that carries data both ways is taken over after that message, or data would
overtake it.  One that only receives is taken over before: once the other end is
admitted, it may send all that it has, close its port, and no longer be reachable.
"""


class RankAcceptor:
    """Accepts connections at a port, from a thread of its own.

    ``secret_of`` takes a client's id and returns what it has to prove; ``add`` takes
    its connection after that, and sends the last message of the handshake.  Both may
    raise NotAdmitted, and are called from threads.
    """

    def __init__(
        self,
        wire: ranks.RankWire,
        listener: RankListener | LocalListener,
        identity: ranks.RankIdentity,
        secret_of: Callable[[str], str],
        add: Add,
    ) -> None:
        self._wire = wire
        self._listener = listener
        self._identity = identity
        self._secret_of = secret_of
        self._add = add
        self._admitting = threading.Semaphore(ADMITTING_MAX)
        self._thread = threading.Thread(target=self._accept_all, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The number of the port."""
        return self._listener.port

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()
        self._thread.join()

    def admit(self, accepted: AcceptedSocket) -> None:
        """Handshake with a client in a thread, once fewer than 64 others do."""
        self._admitting.acquire()
        threading.Thread(target=self._admit, args=(accepted,), daemon=True).start()

    def _accept_all(self) -> None:
        while (accepted := self._listener.accept()) is not None:
            self.admit(accepted)

    def _admit(self, accepted: AcceptedSocket) -> None:
        """Handshake with a client; one that may not enter is disconnected."""
        try:
            with contextlib.suppress(Disconnected, ranks.RankRefused, NotAdmitted):
                connection = begin_server(accepted, HANDSHAKE_TIMEOUT)
                handshake = self._wire.server(
                    self._identity, connection.address, self._secret_of
                )
                agree(connection, handshake, self._add)
        finally:
            self._admitting.release()


def connect_to(
    wire: ranks.RankWire,
    identity: ranks.RankIdentity,
    server: str,
    ways: Sequence[Way],
    deadline: float,
    *,
    repeats: bool = True,
    on_attempt: Callable[[RankSocket], None] = lambda connection: None,
) -> RankSocket:
    """Connect to the rank ``server``, by the first way that leads to it.

    All are tried in turn until the ``deadline``, a monotonic time: the rank may not
    listen yet, and a private address may be that of another machine here.  Without
    ``repeats``, each is tried once.

    ``on_attempt`` gets each connection before its handshake; to give up, it raises
    Disconnected, or aborts the connection later.

    Raises Disconnected and RankRefused.
    """
    while True:
        failures: list[Disconnected | ranks.RankRefused] = []
        for way in ways:
            left = max(deadline - time.monotonic(), DIAL_INTERVAL)
            try:
                connection = way(left if len(ways) == 1 else WAY_TIMEOUT)
            except Disconnected as error:
                failures.append(error)
                continue
            try:
                on_attempt(connection)
                agree(connection, wire.client(identity, server, connection.address))
            except (Disconnected, ranks.RankRefused) as error:
                if len(ways) == 1:
                    raise
                failures.append(error)
            else:
                return connection
        if not repeats or deadline - time.monotonic() < DIAL_INTERVAL:
            raise Disconnected("; ".join(map(str, failures)))
        time.sleep(DIAL_INTERVAL)


def _send_end(peer: str, connection: RankSocket, end: bytes) -> None:
    """End the handshake; who called ``agree`` takes over the connection."""
    connection.send(end)


def agree(
    connection: RankSocket, handshake: ranks.RankHandshake, add: Add = _send_end
) -> None:
    """Carry out a handshake.

    Raises Disconnected, RankRefused, and NotAdmitted as ``add`` does, after closing the
    connection.
    """
    # Each wait has a limit, and all together one: a client may send byte by byte.
    limit = threading.Timer(HANDSHAKE_TIMEOUT, connection.abort)
    limit.daemon = True
    limit.start()
    try:
        _agree(connection, handshake, add)
    except ranks.RankRefused as refusal:
        with contextlib.suppress(Disconnected):
            connection.send(refusal.send)
        connection.close()
        raise
    except (Disconnected, NotAdmitted):
        connection.close()
        raise
    finally:
        limit.cancel()


def _agree(connection: RankSocket, handshake: ranks.RankHandshake, add: Add) -> None:
    connection.set_timeout(HANDSHAKE_TIMEOUT)
    handshake.on_open(connection.certificate)
    connection.send(handshake.start(time.monotonic()))
    head = memoryview(bytearray(handshake.head_size))
    while True:
        connection.receive_into(head)
        body = bytearray(handshake.body_size(bytes(head)))
        connection.receive_into(memoryview(body))
        step = handshake.receive(bytes(head), bytes(body), time.monotonic())
        if step.peer is not None:
            connection.set_timeout(None)
            add(step.peer, connection, step.send)
            return
        connection.send(step.send)


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

    def next(self, at: GroupStep) -> ranks.SegmentLabel:
        label = ranks.SegmentLabel(
            self._kind,
            self._operation,
            self._index,
            at.generation & ranks.GENERATION_MAX,
            at.step & ranks.STEP_MAX,
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
        wire: ranks.SegmentWire,
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

    def __init__(self, connection: RankSocket, wire: ranks.SegmentWire) -> None:
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


def _mismatch(label: ranks.SegmentLabel, expected: ranks.SegmentLabel) -> str:
    """Return in what a label differs from the expected one."""
    for name, found, wanted in zip(label._fields, label, expected, strict=True):
        if found != wanted:
            return f"a segment of {name} {found}, expected {wanted}"
    raise AssertionError("the labels differ")
