"""Messages cut out of a byte stream, without a socket."""

import random
import zlib
from collections.abc import Iterator

import psutil
import pytest

from shoal.domain.errors import LimitExceeded
from shoal.protocols.seam.framing import FramedMessage
from shoal.transports.message_splitter import (
    LARGE_BODY,
    LARGE_READ_SIZE,
    MAPPED_MIN,
    READ_AFTER_LARGE,
    READ_SIZE,
    UNTAKEN_MAX,
    MessageSplitter,
)
from transports.numbered import HEAD, START, Numbered, message


def bodies(*sizes: int) -> list[bytes]:
    source = random.Random(1)
    return [source.randbytes(size) for size in sizes]


def read(cutter: MessageSplitter, data: bytes, step: int) -> Iterator[FramedMessage]:
    """Put data where the cutter wants it, some bytes at a time; give what comes out."""
    at = 0
    while at < len(data):
        room = cutter.room()
        assert len(room) > 0
        size = min(step, len(room), len(data) - at)
        room[:size] = data[at : at + size]
        at += size
        if cutter.filled(size):
            yield from cutter.take()


SIZES = (
    0,
    1,
    5,
    4096,
    LARGE_BODY - 1,
    LARGE_BODY,
    LARGE_BODY + 1,
    0,
    3 * LARGE_READ_SIZE + 7,
    2,
    MAPPED_MIN,
)


@pytest.mark.parametrize(
    "step", [7, 8, 9, 1000, READ_AFTER_LARGE + 1, READ_SIZE, LARGE_READ_SIZE, 1 << 30]
)
def test_any_split_gives_the_same_messages(step: int) -> None:
    sent = bodies(*SIZES)
    data = b"".join(message(number, body) for number, body in enumerate(sent))

    got = list(read(MessageSplitter(Numbered()), data, step))

    assert [HEAD.unpack(each.head)[0] for each in got] == list(range(len(sent)))
    assert [bytes(each.body) for each in got] == sent


def test_bytes_one_at_a_time_are_cut_as_well() -> None:
    sent = bodies(0, 3, 100, LARGE_BODY + 1)
    data = b"".join(message(number, body) for number, body in enumerate(sent))

    got = list(read(MessageSplitter(Numbered()), data, 1))

    assert [bytes(each.body) for each in got] == sent


@pytest.mark.parametrize("step", [1000, READ_SIZE, 700_000])
def test_what_was_read_elsewhere_is_taken_over(step: int) -> None:
    sent = bodies(*SIZES)
    data = b"".join(message(number, body) for number, body in enumerate(sent))
    cutter = MessageSplitter(Numbered())
    got: list[FramedMessage] = []

    for at in range(0, len(data), step):
        cutter.feed(data[at : at + step])
        got += cutter.take()

    assert [bytes(each.body) for each in got] == sent


def test_large_bodies_have_their_checksum_and_small_ones_have_not() -> None:
    small, large = bodies(LARGE_BODY - 1, 5 * LARGE_READ_SIZE)
    data = message(1, small) + message(2, large)

    one, other = read(MessageSplitter(Numbered()), data, READ_SIZE)

    assert one.checksum is None
    assert other.checksum == zlib.crc32(large)


@pytest.mark.parametrize("step", [1000, 1001, READ_SIZE, LARGE_READ_SIZE, 1 << 30])
@pytest.mark.parametrize("fed", [False, True])
def test_only_the_start_of_a_body_is_kept_if_its_buffer_is_smaller(
    step: int, fed: bool
) -> None:
    sent = bodies(5, 3 * LARGE_READ_SIZE + 7, 0, LARGE_BODY + 1, 9)
    data = b"".join(message(number, body) for number, body in enumerate(sent))
    cutter = MessageSplitter(Numbered(start_of=LARGE_BODY))
    got: list[FramedMessage] = []

    if fed:
        for at in range(0, len(data), step):
            cutter.feed(data[at : at + step])
            got += cutter.take()
    else:
        got = list(read(cutter, data, step))

    assert [bytes(each.body) for each in got] == [
        body[:START] if len(body) > LARGE_BODY else body for body in sent
    ]
    assert [each.checksum for each in got if each.checksum is not None] == [
        zlib.crc32(body) for body in sent if len(body) > LARGE_BODY
    ]


def test_bodies_stay_what_they_were_when_others_follow() -> None:
    sent = bodies(10, LARGE_BODY, 10, LARGE_BODY, 10)
    data = b"".join(message(number, body) for number, body in enumerate(sent))
    cutter = MessageSplitter(Numbered())

    got = list(read(cutter, data, READ_SIZE))
    list(read(cutter, message(9, bytes(LARGE_BODY)) * 3, READ_SIZE))

    assert [bytes(each.body) for each in got] == sent


def test_after_a_large_body_little_is_read_that_would_have_to_be_copied() -> None:
    cutter = MessageSplitter(Numbered())
    list(read(cutter, message(1, bytes(LARGE_BODY)), READ_SIZE))
    assert len(cutter.room()) == READ_AFTER_LARGE

    list(read(cutter, message(2, b"small"), READ_SIZE))

    assert len(cutter.room()) == READ_SIZE


def test_size_that_is_too_large_is_refused_before_anything_is_held() -> None:
    cutter = MessageSplitter(Numbered(limit=100))

    assert list(read(cutter, message(1, b"ok") + HEAD.pack(2, 101), 1000)) != []
    assert cutter.full

    with pytest.raises(LimitExceeded, match="101"):
        cutter.take()
    with pytest.raises(LimitExceeded, match="101"):
        cutter.take()


def test_message_that_the_one_before_allows_is_taken() -> None:
    session = Numbered(limit=100)
    cutter = MessageSplitter(session)
    (large,) = bodies(LARGE_BODY + 10)
    data = message(1, b"let me in") + message(2, large)

    cutter.feed(data)
    (first,) = cutter.take()
    assert bytes(first.body) == b"let me in"
    assert cutter.full
    session.limit = 1 << 20

    (second,) = cutter.take()
    assert bytes(second.body) == large
    assert not cutter.full


def test_what_waits_to_be_taken_is_bounded() -> None:
    cutter = MessageSplitter(Numbered())
    data = message(1, bytes(1000)) * 100
    read_ = 0

    while not cutter.full:
        cutter.feed(data)
        read_ += len(data)

    assert read_ <= UNTAKEN_MAX + len(data)
    assert len(cutter.take()) == 100 * read_ // len(data)
    assert not cutter.full


def test_body_that_is_announced_and_does_not_come_takes_no_memory() -> None:
    process = psutil.Process()
    before = process.memory_info().rss

    cutters = [MessageSplitter(Numbered()) for _ in range(20)]
    for cutter in cutters:
        cutter.feed(HEAD.pack(1, 256 << 20) + b"a beginning")

    # At most the first page of each, which the system may give out in large ones.
    assert process.memory_info().rss - before < 20 * MAPPED_MIN + (4 << 20)
    assert all(len(cutter.room()) == LARGE_READ_SIZE for cutter in cutters)
