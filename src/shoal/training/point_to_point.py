"""Sends and receives of one rank: which array belongs to which receive, over sockets.

Arrays of one sender and tag are received in the order in which they were sent, and
receives of one tag are served in their order (MPI 4.1, section 3.5).

An array that fits into the receiver's buffer is sent at once, and kept there until a
receive takes it.  Others are *offered*, and follow once a receive has taken the offer:
nothing that is large is ever buffered, and no array waits behind another tag's.

``TransferMatcher`` decides this without I/O.  Any thread begins a transfer, and none
waits here.  One thread a connection reads what arrives, where it belongs; each outgoing
connection has a thread of its own, too.
"""

import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from shoal.domain.errors import PeerError
from shoal.training.collectives import Kind, segments
from shoal.training.links import GroupStep, IncomingLink
from shoal.training.rank_port import GroupEnded, GroupLinks, LinkUse
from shoal.transports.blocking.rank_socket import Disconnected

BUFFER_MAX = 1 << 20  # bytes of one sender's arrays that no receive has taken
WAITING_MAX = 1 << 16  # arrays and offers that no receive has taken
ENVELOPE = struct.Struct("<BQqQ")


class Note(IntEnum):
    """What a message between two ranks is; arrays follow ARRAY and ACCEPTED_ARRAY."""

    ARRAY = 1
    OFFER = 2
    ACCEPT = 3
    ACCEPTED_ARRAY = 4


class Envelope(NamedTuple):
    """What precedes an array, or stands for it.

    ``number`` counts the arrays of one sender for one receiver, ``size`` its bytes.
    """

    note: Note
    number: int
    tag: int
    size: int


@dataclass(slots=True, eq=False)
class ArrayTransfer:
    """A send to ``peer``, or a receive from it; None: from any rank.

    When it is done, the ``peer`` of a receive is the sender; ``on_end`` gets an error,
    or None.
    """

    peer: int | None
    tag: int
    memory: memoryview
    on_end: Callable[[Exception | None], None]


class Parcel(NamedTuple):
    """An envelope for a rank; ``sends`` is what the array after it belongs to."""

    to: int
    envelope: Envelope
    sends: ArrayTransfer | None = None


@dataclass(slots=True, eq=False)
class _Arrival:
    """An array that comes or has been offered; ``memory`` is where its bytes go."""

    source: int
    envelope: Envelope
    memory: memoryview | None = None
    whole: bool = False
    receive: ArrayTransfer | None = None


@dataclass(slots=True)
class TransferMatcher:
    """The sends and receives of one rank.  All methods return what is to be sent.

    They raise PeerError if a rank sends what does not follow, or another size.
    """

    ended: list[ArrayTransfer] = field(default_factory=list)
    """Transfers that are complete; the caller takes them out."""
    _sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _unaccepted: dict[tuple[int, int], ArrayTransfer | int] = field(
        default_factory=dict
    )
    _lent: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _sending: list[ArrayTransfer] = field(default_factory=list)
    _receives: list[ArrayTransfer] = field(default_factory=list)
    _arrivals: list[_Arrival] = field(default_factory=list)  # without a receive
    _filling: dict[tuple[int, int], _Arrival] = field(default_factory=dict)
    _kept: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def send(self, transfer: ArrayTransfer) -> Sequence[Parcel]:
        """Begin to send an array, whose bytes must not change before it is done."""
        to, size = transfer.peer, len(transfer.memory)
        assert to is not None
        number = self._sent[to]
        self._sent[to] += 1
        if self._lent[to] + size > BUFFER_MAX:
            self._unaccepted[to, number] = transfer
            return [Parcel(to, Envelope(Note.OFFER, number, transfer.tag, size))]
        self._unaccepted[to, number] = size
        self._lent[to] += size
        self._sending.append(transfer)
        envelope = Envelope(Note.ARRAY, number, transfer.tag, size)
        return [Parcel(to, envelope, transfer)]

    def receive(self, transfer: ArrayTransfer) -> Sequence[Parcel]:
        """Begin to receive an array."""
        for arrival in self._arrivals:
            if _belong_together(arrival, transfer):
                parcel = self._accept(arrival, transfer)
                self._arrivals.remove(arrival)
                self._kept[arrival.source] -= _kept_size(arrival.envelope)
                return [parcel]
        self._receives.append(transfer)
        return []

    def begin(self, source: int, envelope: Envelope) -> Sequence[Parcel]:
        """Handle an envelope; its array, if one follows, goes to ``memory_for``."""
        key = source, envelope.number
        match envelope.note:
            case Note.ACCEPT:
                offered = self._unaccepted.pop(key, None)
                if isinstance(offered, ArrayTransfer):
                    self._sending.append(offered)
                    answer = envelope._replace(note=Note.ACCEPTED_ARRAY)
                    return [Parcel(source, answer, offered)]
                if offered is None:
                    raise PeerError(f"array {envelope.number} is accepted twice")
                self._lent[source] -= offered
            case Note.ACCEPTED_ARRAY:
                arrival = self._filling.get(key)
                if arrival is None or arrival.envelope != envelope._replace(
                    note=Note.OFFER
                ):
                    raise PeerError(f"array {envelope.number} has not been accepted")
            case Note.ARRAY | Note.OFFER:
                return self._arrive(_Arrival(source, envelope))
        return []

    def memory_for(self, source: int, envelope: Envelope) -> memoryview | None:
        """Return where the array after an envelope goes; None: none follows."""
        if envelope.note in (Note.OFFER, Note.ACCEPT):
            return None
        return self._filling[source, envelope.number].memory

    def end(self, source: int, envelope: Envelope) -> None:
        """The array after an envelope is there."""
        arrival = self._filling.pop((source, envelope.number))
        arrival.whole = True
        if arrival.receive is not None:
            self._complete(arrival, arrival.receive)

    def sent(self, transfer: ArrayTransfer) -> None:
        """The array of a parcel has been sent."""
        if transfer in self._sending:
            self._sending.remove(transfer)
            self.ended.append(transfer)

    def leaving(self) -> Sequence[ArrayTransfer]:
        """Return the sends whose arrays are being sent: they need no answer."""
        return self._sending

    def waiting(self) -> Iterator[ArrayTransfer]:
        """Yield the other transfers that are not complete."""
        yield from self._receives
        for offered in self._unaccepted.values():
            if isinstance(offered, ArrayTransfer):
                yield offered
        for arrival in self._filling.values():
            if arrival.receive is not None:
                yield arrival.receive

    def _arrive(self, arrival: _Arrival) -> Sequence[Parcel]:
        source, envelope = arrival.source, arrival.envelope
        receive = next(
            (each for each in self._receives if _belong_together(arrival, each)), None
        )
        if receive is not None:
            parcel = self._accept(arrival, receive)
            self._receives.remove(receive)
            return [parcel]
        self._kept[source] += _kept_size(envelope)
        if self._kept[source] > BUFFER_MAX or len(self._arrivals) >= WAITING_MAX:
            raise PeerError("it sends more than this rank can keep without a receive")
        self._arrivals.append(arrival)
        if envelope.note is Note.ARRAY:
            arrival.memory = memoryview(bytearray(envelope.size))
            self._filling[source, envelope.number] = arrival
        return []

    def _accept(self, arrival: _Arrival, receive: ArrayTransfer) -> Parcel:
        source, envelope = arrival.source, arrival.envelope
        if envelope.size != len(receive.memory):
            raise PeerError(
                f"a message of {envelope.size} bytes, expected {len(receive.memory)}: "
                "the ranks do not agree on the size of the array"
            )
        receive.peer = source
        arrival.receive = receive
        if arrival.whole:
            self._complete(arrival, receive)
        elif arrival.memory is None:
            arrival.memory = receive.memory
            self._filling[source, envelope.number] = arrival
        return Parcel(source, envelope._replace(note=Note.ACCEPT))

    def _complete(self, arrival: _Arrival, receive: ArrayTransfer) -> None:
        assert arrival.memory is not None
        if arrival.memory is not receive.memory:
            receive.memory[:] = arrival.memory
        self.ended.append(receive)


def _belong_together(arrival: _Arrival, receive: ArrayTransfer) -> bool:
    is_from = receive.peer is None or receive.peer == arrival.source
    return is_from and receive.tag == arrival.envelope.tag


def _kept_size(envelope: Envelope) -> int:
    return envelope.size if envelope.note is Note.ARRAY else 0


class PointToPoint:
    """The sends and receives of one rank in one generation of a group.

    A transfer ends when the group ends.  The group ends if a transfer waits for a rank
    that is lost; that others have disconnected is not a failure.  A rank that is done
    may disconnect while this one has not noticed yet that all was sent, or has not read
    all that it sent: for sends, only the failure of a send counts, and for what comes,
    only the end of the connection that it comes by.
    """

    def __init__(self, links: GroupLinks) -> None:
        self._links = links
        membership = links.membership
        self._others = {*range(membership.size)} - {membership.rank}
        self._at = GroupStep(membership.generation)
        self._matcher = TransferMatcher()
        self._lock = threading.Lock()
        self._lost: dict[int, str] = {}
        self._unreachable: set[int] = set()  # of these: nothing can be sent to them
        self._read_to_end: set[int] = set()  # ranks whose connections have ended
        links.attend(self._read, self._on_unreachable, self._on_end)

    def send(self, transfer: ArrayTransfer) -> None:
        """Begin to send an array.  Raises GroupEnded."""
        self._act(self._matcher.send, transfer)

    def receive(self, transfer: ArrayTransfer) -> None:
        """Begin to receive an array.  Raises GroupEnded."""
        self._act(self._matcher.receive, transfer)

    @property
    def is_busy(self) -> bool:
        """Whether a transfer has not ended."""
        with self._lock:
            return any((*self._matcher.leaving(), *self._matcher.waiting()))

    def _act(
        self,
        begin: Callable[[ArrayTransfer], Sequence[Parcel]],
        transfer: ArrayTransfer,
    ) -> None:
        peer = transfer.peer
        with self._lock:
            self._links.check()
            # The connections of both directions show whether the other is still there.
            for each in self._others if peer is None else [peer]:
                self._links.outgoing(each, LinkUse.POINT_TO_POINT)
        self._handle(lambda: begin(transfer), peer)
        self._end_if_stuck()

    def _handle(
        self, handle: Callable[[], Sequence[Parcel]], suspect: int | None
    ) -> None:
        """Let the matcher handle something, and do what follows."""
        try:
            with self._lock:
                self._links.check()
                for parcel in handle():
                    self._send(parcel)
                ended, self._matcher.ended = self._matcher.ended, []
        except PeerError as error:
            name = "" if suspect is None else self._links.membership.name(suspect)
            self._links.abort(f"{name}: {error}", suspect, out_of_step=True)
            self._links.check()
        else:
            for each in ended:
                each.on_end(None)

    def _send(self, parcel: Parcel) -> None:
        to, envelope, transfer = parcel
        link = self._links.outgoing(to, LinkUse.POINT_TO_POINT)
        link.begin(Kind.POINT_TO_POINT)
        link.send(memoryview(ENVELOPE.pack(*envelope)), self._at)
        if transfer is not None:
            for segment in segments(transfer.memory):
                link.send(segment, self._at)
            link.call(lambda: self._on_sent(transfer))

    def _on_sent(self, transfer: ArrayTransfer) -> None:
        with self._lock:
            self._matcher.sent(transfer)
            ended, self._matcher.ended = self._matcher.ended, []
        for each in ended:
            each.on_end(None)

    def _read(self, source: int, link: IncomingLink) -> None:
        """Read what a rank sends, until the connection ends."""
        try:
            self._links.outgoing(source, LinkUse.POINT_TO_POINT)
            while True:
                self._receive(source, link)
        except GroupEnded:
            pass
        except Disconnected as error:
            with self._lock:
                self._read_to_end.add(source)
            self._on_lost(source, str(error))
        except PeerError as error:
            self._links.abort(f"{self._links.membership.name(source)}: {error}", source)
        finally:
            link.close()

    def _receive(self, source: int, link: IncomingLink) -> None:
        head = memoryview(bytearray(ENVELOPE.size))
        link.begin(Kind.POINT_TO_POINT)
        link.receive_into(head, self._at)
        envelope = _decode(head)
        memory: memoryview | None = None

        def begin() -> Sequence[Parcel]:
            nonlocal memory
            parcels = self._matcher.begin(source, envelope)
            memory = self._matcher.memory_for(source, envelope)
            return parcels

        def end() -> Sequence[Parcel]:
            self._matcher.end(source, envelope)
            return ()

        self._handle(begin, source)
        if memory is not None:
            for segment in segments(memory):
                link.receive_into(segment, self._at)
            self._handle(end, source)

    def _on_unreachable(self, rank: int, reason: str) -> None:
        """The connection to a rank has ended."""
        with self._lock:
            self._unreachable.add(rank)
        self._on_lost(rank, reason)

    def _on_lost(self, rank: int, reason: str) -> None:
        """A connection from or to a rank has ended."""
        with self._lock:
            self._lost.setdefault(rank, reason)
        self._end_if_stuck()

    def _end_if_stuck(self) -> None:
        """End the group if something waits for ranks that are lost."""
        with self._lock:
            unsent = {each.peer for each in self._matcher.leaving()}
            awaited = {each.peer for each in self._matcher.waiting()}
            if self._lost.keys() >= self._others and None in awaited:
                awaited |= self._others
            awaited = {each for each in awaited if not self._may_send(each)}
            stuck = next(
                (
                    rank
                    for rank in self._lost
                    if rank in awaited or (rank in unsent and rank in self._unreachable)
                ),
                None,
            )
        if stuck is not None:
            name = self._links.membership.name(stuck)
            self._links.abort(f"{name}: {self._lost[stuck]}", stuck)

    def _may_send(self, rank: int | None) -> bool:
        """Return whether a rank has connected, and its connection has not ended."""
        if rank is None or rank in self._read_to_end:
            return False
        return self._links.has_incoming(rank, LinkUse.POINT_TO_POINT)

    def _on_end(self) -> None:
        """The group has ended: so do all transfers."""
        with self._lock:
            matcher, self._matcher = self._matcher, TransferMatcher()
        for each in (*matcher.leaving(), *matcher.waiting()):
            try:
                self._links.check()
            except GroupEnded as ended:
                each.on_end(ended)


def _decode(head: memoryview) -> Envelope:
    note, number, tag, size = ENVELOPE.unpack(head)
    try:
        return Envelope(Note(note), number, tag, size)
    except ValueError as error:
        raise PeerError(f"a message of kind {note}") from error
