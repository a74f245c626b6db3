"""Which array belongs to which receive, without I/O.

Arrays of one sender and tag are received in the order in which they were sent, and
receives of one tag are served in their order (MPI 4.1, section 3.5).

An array that fits into the receiver's buffer is sent at once, and kept there until a
receive takes it.  Others are *offered*, and follow once a receive has taken the offer:
nothing that is large is ever buffered, and no array waits behind another tag's.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from shoal.domain.errors import PeerError

BUFFER_MAX = 1 << 20  # bytes of one sender's arrays that no receive has taken
WAITING_MAX = 1 << 16  # arrays and offers that no receive has taken


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
