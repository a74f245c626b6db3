"""Streams of pieces: laws of both ends, over any connection."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.session_pair import binary, sent
from shoal.domain.errors import PeerError
from shoal.protocols.seam.encrypted_stream import PLAIN_MAX
from shoal.protocols.seam.session import Bulk, Send
from shoal.protocols.shoal.streams import (
    CREDIT,
    FRAME_MAX,
    HEAD,
    LAST,
    MESSAGE_MAX,
    MORE,
    NUMBER,
    PIECE_MAX,
    QUEUED_FOR,
    SMALL_MAX,
    STREAM_LAST,
    STREAM_MORE,
    STREAMS_MAX,
    WHOLE,
    WINDOW,
    IncomingStreams,
    OutgoingStreams,
)

LARGE = 3 * SMALL_MAX + 7


class Sender:
    """An end that sends, with a queue as the outbox has it: small messages first."""

    def __init__(self, window: int = WINDOW) -> None:
        self.streams = OutgoingStreams()
        self.streams.window = window
        self.small: deque[bytes] = deque()
        self.turns: list[tuple[Bulk, list[bytes]]] = []

    def send(
        self, message: bytes, key: object = None, after: Sequence[object] = ()
    ) -> None:
        output = self.streams.write((message[:100], message[100:]), key, after)
        if isinstance(output, Send):
            self.small += binary([output.data])
        else:
            self.turns.append((output, []))

    def next(self) -> bytes | None:
        """Return what is written next; None: it has to wait for credit."""
        if self.small:
            return self.small.popleft()
        for place, (bulk, written) in enumerate(self.turns):
            assert bulk.is_ready is not None
            if not bulk.is_ready():
                continue
            del self.turns[place]
            piece = b""
            for part in bulk.parts:
                if not part:
                    self.turns.append((bulk, written))
                    return piece
                piece = bytes(part)
                written.append(piece)
            assert sum(map(len, written)) == bulk.size
            return piece
        return None


@dataclass
class Connection:
    """Both ends of a connection in one direction, and what is on the way.

    ``unfinished`` is how many bytes have arrived of messages that are not complete.
    """

    sender: Sender = field(default_factory=Sender)
    window: int = WINDOW
    frames: deque[bytes] = field(default_factory=deque)
    received: list[bytes] = field(default_factory=list)
    unfinished: int = 0

    def __post_init__(self) -> None:
        on_credit = OutgoingStreams().on_credit
        self.receiver = IncomingStreams(MESSAGE_MAX, on_credit)
        self.receiver.window = self.window
        self.credit = IncomingStreams(MESSAGE_MAX, self.sender.streams.on_credit)

    def write(self) -> bool:
        """Write one frame; return whether there was one."""
        frame = self.sender.next()
        if frame is not None:
            assert len(frame) <= FRAME_MAX
            self.frames.append(frame)
        return frame is not None

    def read(self, count: int) -> None:
        """Receive frames, as one batch, and acknowledge them."""
        for _ in range(min(count, len(self.frames))):
            frame = self.frames.popleft()
            complete = self.receiver.receive(frame)
            self.received += complete
            self.unfinished += len(frame) - sum(map(len, complete))
        if self.receiver.unacknowledged:
            self.credit.receive(self.receiver.acknowledge())

    def run(self) -> None:
        """Carry everything over."""
        while self.write() or self.frames:
            self.read(len(self.frames))


@pytest.mark.parametrize("window", [0, WINDOW])
def test_a_message_arrives_whole_whatever_its_size(window: int) -> None:
    sizes = [0, 1, SMALL_MAX, SMALL_MAX + 1, 3 * SMALL_MAX, LARGE, 3 * WINDOW]
    for size in sizes:
        message = bytes(range(256)) * (size // 256) + bytes(size % 256)
        connection = Connection(Sender(window))

        connection.sender.send(message)
        connection.run()

        assert connection.received == [message]
        assert not connection.sender.streams.waiting


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 10, SMALL_MAX, SMALL_MAX + 1, LARGE]),
            st.sampled_from([None, "a", "b", "c"]),
            st.lists(st.sampled_from(["a", "b", "c"]), max_size=2),
        ),
        max_size=24,
    ),
    st.sampled_from([0, PIECE_MAX, 3 * PIECE_MAX]),
    st.data(),
)
def test_all_messages_arrive_in_the_order_of_their_keys(
    messages: list[tuple[int, str | None, list[str]]], window: int, data: st.DataObject
) -> None:
    connection = Connection(Sender(window), window)
    connection.receiver.held_max = SMALL_MAX
    numbered = [
        (number.to_bytes(4) + bytes(size), key, after)
        for number, (size, key, after) in enumerate(messages)
    ]
    unsent = deque(numbered)
    largest = max((len(m) for m, _, _ in numbered), default=0)

    while unsent or connection.sender.turns or connection.frames:
        step = data.draw(st.integers(0, 3))
        if step == 0 and unsent:
            connection.sender.send(*unsent.popleft())
        elif step == 1:
            connection.write()
        elif step == 2:
            connection.read(data.draw(st.integers(1, 8)))
        else:
            connection.run()
        # However many are under way, what an end holds is limited.
        if window:
            heads = 100 * FRAME_MAX // PIECE_MAX * STREAMS_MAX
            held = largest + SMALL_MAX + STREAMS_MAX * (window + PIECE_MAX)
            assert connection.unfinished <= held + heads + 24 * HEAD.size
    connection.run()

    places = {each[:4]: n for n, each in enumerate(connection.received)}
    assert sorted(connection.received) == [m for m, _, _ in numbered]
    for number, (message, key, after) in enumerate(numbered):
        for earlier, its_key, _ in numbered[:number]:
            if its_key is not None and its_key in (key, *after):
                assert places[earlier[:4]] < places[message[:4]]


def test_small_messages_pass_large_ones_that_wait_for_credit() -> None:
    connection = Connection()
    for _ in range(4):
        connection.sender.send(bytes(WINDOW * 2))
    while connection.write():
        pass  # until all credit is used

    connection.sender.send(b"token")

    assert connection.sender.next() == HEAD.pack(WHOLE, 5) + b"token"
    assert connection.sender.next() is None


def test_a_stream_without_credit_does_not_hold_up_others() -> None:
    sender = Sender(PIECE_MAX)
    sender.send(b"slow" + bytes(LARGE))
    sender.send(b"fast" + bytes(LARGE))
    finished: set[int] = set()

    while (frame := sender.next()) is not None:
        kind, size = HEAD.unpack_from(frame)
        (number,) = NUMBER.unpack_from(frame, HEAD.size)
        if kind == STREAM_LAST:
            finished.add(number)
        size -= NUMBER.size
        sender.streams.on_credit(number, size, size if number == 2 else 0)

    assert finished == {2}


def test_large_messages_take_turns() -> None:
    connection = Connection()
    connection.sender.send(b"long" + bytes(2 * WINDOW))
    connection.write()
    connection.sender.send(b"short" + bytes(LARGE))

    while not connection.received:
        connection.write()
        connection.read(1)

    assert connection.received[0].startswith(b"short")


@dataclass
class SlowLine:
    """A line with a rate in bytes and a delay in seconds, one way."""

    rate: float
    delay: float
    free_at: float = 0.0

    def arrival(self, size: int, now: float) -> float:
        self.free_at = max(self.free_at, now) + size / self.rate
        return self.free_at + self.delay


@pytest.mark.parametrize(
    ("rate", "delay"), [(0.25e6, 0.02), (1.25e6, 0.02), (10e6, 0.05), (125e6, 0.001)]
)
def test_a_line_is_used_well_and_tokens_wait_little(rate: float, delay: float) -> None:
    """Everything that is written is buffered on the way, as slow lines do."""
    connection = Connection()
    line, sender, now = SlowLine(rate, delay), connection.sender, 0.0
    size = min(int(20.0 * rate), 64 << 20)
    sender.send(bytes(size))
    arrivals: deque[tuple[float, bytes]] = deque()
    credits: deque[tuple[float, bytes]] = deque()
    waits: list[float] = []
    token_at = 3.0

    while sender.turns or arrivals or credits:
        sender.streams.now = now
        while (frame := sender.next()) is not None:
            arrivals.append((line.arrival(len(frame), now), frame))
        if now >= token_at:
            waits.append(line.arrival(30, now) - now)
            token_at = now + 0.2
        now = min(each[0][0] for each in (arrivals, credits) if each)
        if credits and credits[0][0] == now:
            sender.streams.now = now
            connection.credit.receive(credits.popleft()[1])
            continue
        connection.receiver.receive(arrivals.popleft()[1])
        if connection.receiver.unacknowledged:
            credits.append((now + delay, connection.receiver.acknowledge()))

    assert now < 1.25 * size / rate + 3.0
    if rate < 10e6:
        assert max(waits) < delay + 2.0 * QUEUED_FOR + 2 * PIECE_MAX / rate


def piece(kind: int, data: bytes) -> bytes:
    return HEAD.pack(kind, len(data)) + data


def part(kind: int, number: int, data: bytes) -> bytes:
    return piece(kind, NUMBER.pack(number) + data)


def receiver(message_max: int = MESSAGE_MAX, window: int = WINDOW) -> IncomingStreams:
    end = IncomingStreams(message_max, OutgoingStreams().on_credit)
    end.window = window
    return end


def test_small_messages_may_come_between_pieces() -> None:
    end = receiver()
    pieces = [piece(MORE, b"a"), piece(WHOLE, b"small"), part(STREAM_MORE, 1, b"x")]
    pieces += [piece(MORE, b"b"), part(STREAM_LAST, 1, b"y"), piece(LAST, b"c")]

    heard = [end.receive(each) for each in pieces]

    assert heard == [[], [b"small"], [], [], [b"xy"], [b"abc"]]
    assert end.receive(b"".join(pieces)) == [b"small", b"xy", b"abc"]


@pytest.mark.parametrize(
    "data",
    [
        "text",
        b"\0",
        piece(WHOLE, b"cut")[:-1],
        piece(6, b"what"),
        piece(STREAM_MORE, b"\0"),
        piece(CREDIT, b"\0"),
        piece(CREDIT, bytes(7) + b"\1" + bytes(4)),  # of what was never sent
        part(STREAM_MORE, 1, bytes(WINDOW + 1)),
        b"".join(part(STREAM_MORE, number, b"") for number in range(STREAMS_MAX + 1)),
    ],
)
def test_what_is_no_piece_is_refused(data: bytes | str) -> None:
    with pytest.raises(PeerError):
        receiver().receive(data)


def test_streams_are_refused_before_admission() -> None:
    with pytest.raises(PeerError, match="credit"):
        receiver(window=0).receive(part(STREAM_MORE, 1, b"x"))


@pytest.mark.parametrize("kinds", [(MORE, LAST), (STREAM_MORE, STREAM_LAST)])
def test_a_message_is_limited_however_it_is_cut(kinds: tuple[int, int]) -> None:
    def cut(kind: int, data: bytes) -> bytes:
        return (
            part(kind, 1, data)
            if kind in (STREAM_MORE, STREAM_LAST)
            else (piece(kind, data))
        )

    more, last = kinds
    end = receiver(8)

    assert end.receive(cut(more, b"12345678")) == []
    with pytest.raises(PeerError, match="8"):
        end.receive(cut(last, b"9"))
    with pytest.raises(PeerError, match="8"):
        receiver(8).receive(piece(WHOLE, b"123456789"))


def test_an_end_without_streams_gets_one_large_message_at_a_time() -> None:
    sender = Sender(0)
    outputs = [sender.streams.write((bytes(LARGE),)) for _ in range(2)]
    ready = [each.is_ready() for each in outputs if isinstance(each, Bulk)]  # type: ignore[misc]

    frames = binary(sent(outputs, joined=False))

    assert ready == [True, False]
    assert [each[0] for each in frames] == 2 * [MORE, MORE, MORE, LAST]


def test_a_piece_of_a_large_message_is_encrypted_as_one_record() -> None:
    outgoing = OutgoingStreams()
    outgoing.window = 1 << 20
    bulk = outgoing.write((bytes(SMALL_MAX + 1),))
    assert isinstance(bulk, Bulk)

    assert max(map(len, bulk.parts)) <= PLAIN_MAX
