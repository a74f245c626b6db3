"""Ranks that exchange parcels in memory, in any order that sockets keep."""

from collections import defaultdict, deque
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import PeerError
from shoal.training import point_to_point
from shoal.training.point_to_point import (
    ArrayTransfer,
    Envelope,
    Note,
    Parcel,
    TransferMatcher,
)


class Ranks:
    """Their matchers, and what is on its way between them."""

    def __init__(self, size: int) -> None:
        self.boxes = [TransferMatcher() for _ in range(size)]
        self.on_way: dict[tuple[int, int], deque[tuple[Envelope, bytes]]] = defaultdict(
            deque
        )
        self.ended: list[ArrayTransfer] = []

    def send(self, rank: int, to: int, tag: int, data: bytes) -> ArrayTransfer:
        transfer = ArrayTransfer(to, tag, memoryview(data), lambda error: None)
        self._post(rank, self.boxes[rank].send(transfer))
        return transfer

    def receive(
        self, rank: int, source: int | None, tag: int, size: int
    ) -> ArrayTransfer:
        memory = memoryview(bytearray(size))
        transfer = ArrayTransfer(source, tag, memory, lambda error: None)
        self._post(rank, self.boxes[rank].receive(transfer))
        return transfer

    def deliver(self, source: int, to: int) -> None:
        """Let one parcel arrive."""
        envelope, data = self.on_way[source, to].popleft()
        box = self.boxes[to]
        parcels = box.begin(source, envelope)
        memory = box.memory_for(source, envelope)
        self._post(to, parcels)
        if memory is not None:
            memory[:] = data
            box.end(source, envelope)
        self._collect(box)

    def deliver_all(self) -> None:
        while ways := [way for way, parcels in self.on_way.items() if parcels]:
            self.deliver(*ways[0])

    def _post(self, rank: int, parcels: Sequence[Parcel]) -> None:
        for to, envelope, sends in parcels:
            data = b"" if sends is None else bytes(sends.memory)
            self.on_way[rank, to].append((envelope, data))
            if sends is not None:
                self.boxes[rank].sent(sends)
        self._collect(self.boxes[rank])

    def _collect(self, box: TransferMatcher) -> None:
        self.ended += box.ended
        box.ended.clear()


@pytest.fixture(autouse=True, scope="module")
def small_buffer() -> object:
    patch = pytest.MonkeyPatch()
    patch.setattr(point_to_point, "BUFFER_MAX", 10)
    yield
    patch.undo()


steps = st.lists(
    st.tuples(st.sampled_from(["send", "receive", "any"]), st.integers(0, 1))
    | st.tuples(st.just("deliver"), st.integers(0, 2)),
    max_size=40,
)


@given(steps, st.integers(0, 12))
def test_arrays_of_a_tag_are_received_in_their_order_whatever_comes_first(
    order: list[tuple[str, int]], size: int
) -> None:
    """Rank 0 sends to rank 1, with two tags; sizes are below and above the buffer."""
    ranks = Ranks(2)
    sends: dict[int, list[ArrayTransfer]] = {0: [], 1: []}
    receives: dict[int, list[ArrayTransfer]] = {0: [], 1: []}

    def act(what: str, number: int) -> None:
        tag, ways = number % 2, [(0, 1), (1, 0)]
        if what == "send":
            data = bytes([len(sends[tag])]) * size
            sends[tag].append(ranks.send(0, 1, tag, data))
        elif what != "deliver":
            source = None if what == "any" else 0
            receives[tag].append(ranks.receive(1, source, tag, size))
        elif ranks.on_way[ways[tag]]:
            ranks.deliver(*ways[tag])

    for step in order:
        act(*step)
    for tag in sends:
        while len(sends[tag]) < len(receives[tag]):
            act("send", tag)
        while len(sends[tag]) > len(receives[tag]):
            act("receive", tag)
    ranks.deliver_all()

    transfers = [*sends[0], *sends[1], *receives[0], *receives[1]]
    assert len(ranks.ended) == len(transfers)
    assert {*ranks.ended} == {*transfers}
    for tag in sends:
        found = [bytes(each.memory) for each in receives[tag]]
        assert found == [bytes(each.memory) for each in sends[tag]]
        assert all(each.peer == 0 for each in receives[tag])
    assert not [each for box in ranks.boxes for each in box.waiting()]


def test_a_small_array_is_sent_before_it_is_received_and_a_large_one_is_not() -> None:
    ranks = Ranks(2)
    small, large = ranks.send(0, 1, 0, bytes(10)), ranks.send(0, 1, 0, bytes(1))

    ranks.deliver_all()
    assert ranks.ended == [small], "the buffer is full"

    ranks.receive(1, 0, 0, 10)
    ranks.receive(1, None, 0, 1)
    ranks.deliver_all()
    assert large in ranks.ended

    again = ranks.send(0, 1, 0, bytes(10))
    assert again in ranks.ended, "the buffer is empty again"


def test_the_sender_of_what_any_rank_may_send_is_known() -> None:
    ranks = Ranks(3)
    first, second = (ranks.receive(2, None, 7, 1) for _ in range(2))

    ranks.send(1, 2, 7, b"b")
    ranks.deliver_all()
    ranks.send(0, 2, 7, b"a")
    ranks.deliver_all()

    assert (first.peer, bytes(first.memory)) == (1, b"b")
    assert (second.peer, bytes(second.memory)) == (0, b"a")


@pytest.mark.parametrize(
    ("envelope", "problem"),
    [
        ((Note.ARRAY, 0, 0, 11), "more than this rank can keep"),
        ((Note.ACCEPT, 0, 0, 1), "array 0 is accepted twice"),
        ((Note.ACCEPTED_ARRAY, 0, 0, 1), "array 0 has not been accepted"),
        ((Note.OFFER, 0, 9, 5), "a message of 5 bytes, expected 4"),
        ((Note.ARRAY, 0, 9, 3), "a message of 3 bytes, expected 4"),
    ],
)
def test_what_does_not_follow_is_the_error_of_the_other_rank(
    envelope: tuple[Note, int, int, int], problem: str
) -> None:
    ranks = Ranks(2)
    receive = ranks.receive(1, 0, 9, 4)

    with pytest.raises(PeerError, match=problem):
        ranks.boxes[1].begin(0, Envelope(*envelope))

    assert [*ranks.boxes[1].waiting()] == [receive]
