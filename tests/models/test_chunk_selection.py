"""Which chunk is requested from which source, by hand and in random histories."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from shoal.models.chunk_selection import (
    AHEAD,
    AHEAD_MAX,
    ELSEWHERE_TIMEOUT,
    PROMPT,
    REPEAT_AFTER,
    SILENCE_TIMEOUT,
    ChunkRequest,
    ChunkSelection,
)

CHUNKS = 12
WAITS = [0.1, REPEAT_AFTER, ELSEWHERE_TIMEOUT, SILENCE_TIMEOUT]  # seconds


def flags(*chunks: int, of: int = CHUNKS) -> "np.typing.NDArray[np.bool_]":
    has = np.zeros(of, bool)
    has[[*chunks]] = True
    return has


def a_selection(**sources: "np.typing.NDArray[np.bool_]") -> ChunkSelection:
    selection = ChunkSelection(CHUNKS)
    for name, has in sources.items():
        selection.add_source(name, 0.0)
        selection.on_available(name, has)
    return selection


def test_the_rarest_chunks_are_requested_first() -> None:
    everything = np.ones(CHUNKS, bool)
    selection = a_selection(seed=everything, peer=~flags(7, 9))

    seed = [each.chunk for each in selection.requests(0.0) if each.source == "seed"]

    assert seed[:2] == [7, 9]


def test_receivers_request_in_order_until_there_are_others() -> None:
    orders = []
    for seed in range(3):
        selection = a_selection(seed=np.ones(CHUNKS, bool))
        assert [each.chunk for each in selection.requests(0.0)] == [0, 1, 2, 3]
        selection.remove_source("seed")

        selection.shuffle(seed)
        selection.add_source("seed", 0.0)
        selection.on_available("seed", np.ones(CHUNKS, bool))
        orders.append(tuple(each.chunk for each in selection.requests(0.0)))

    assert len({*orders}) == 3


def test_sources_get_different_requests_and_few_ahead() -> None:
    everything = np.ones(CHUNKS, bool)
    selection = a_selection(a=everything, b=everything)

    requests = selection.requests(0.0)

    assert Counter(each.source for each in requests) == {"a": AHEAD, "b": AHEAD}
    assert len({each.chunk for each in requests}) == 2 * AHEAD
    assert selection.requests(0.0) == []


def test_more_is_requested_ahead_of_a_prompt_source_than_of_a_slow_one() -> None:
    selection, now = ChunkSelection(64), 0.0
    selection.add_source("a", now)
    selection.on_available("a", np.ones(64, bool))
    ahead = []
    for takes in (0.0, PROMPT):
        owed = [each.chunk for each in selection.requests(now)]
        for _ in range(2 * AHEAD_MAX):
            now += takes
            assert selection.expects("a", owed[0], now)
            selection.on_checked("a", owed.pop(0), right=True)
            owed += [each.chunk for each in selection.requests(now)]
        ahead.append(len(owed))
        for chunk in owed:
            selection.expects("a", chunk, now)
            selection.on_checked("a", chunk, right=True)

    assert AHEAD < ahead[0] <= AHEAD_MAX  # several are requested in one message
    assert ahead[1] == AHEAD


def test_held_chunks_are_not_requested() -> None:
    selection = ChunkSelection(CHUNKS, held=range(CHUNKS - 1))
    selection.add_source("a", 0.0)
    selection.on_available("a", np.ones(CHUNKS, bool))

    assert selection.requests(0.0) == [ChunkRequest("a", CHUNKS - 1)]


def test_a_source_that_sends_what_nobody_asked_for_is_dropped() -> None:
    selection = a_selection(a=np.ones(CHUNKS, bool))
    selection.requests(0.0)

    assert not selection.expects("a", CHUNKS - 1, 0.0)

    assert selection.failures == {"a": "it sent a chunk that was not requested"}


def test_a_source_that_sends_a_chunk_twice_is_dropped() -> None:
    selection = a_selection(a=np.ones(CHUNKS, bool))
    selection.requests(0.0)

    assert selection.expects("a", 0, 0.0)
    assert not selection.expects("a", 0, 0.0)

    assert "a" in selection.failures


def test_a_wrong_chunk_is_requested_from_another_source() -> None:
    everything = np.ones(CHUNKS, bool)
    selection = a_selection(bad=everything)
    selection.requests(0.0)
    assert selection.expects("bad", 0, 0.0)
    selection.on_checked("bad", 0, right=False)
    selection.add_source("good", 0.0)
    selection.on_available("good", everything)

    assert [each.chunk for each in selection.requests(0.0)] == [0, 1, 2, 3]
    assert "chunk 0 has another hash" in selection.failures["bad"]


def test_a_silent_source_is_dropped_and_an_idle_one_is_not() -> None:
    selection = a_selection(silent=flags(0), idle=flags())
    selection.requests(0.0)

    assert selection.drop_silent(1.0) == REPEAT_AFTER
    assert selection.drop_silent(REPEAT_AFTER) == SILENCE_TIMEOUT
    assert selection.drop_silent(SILENCE_TIMEOUT) is None

    assert [*selection.sources] == ["idle"]
    assert selection.failures == {"silent": "it sent nothing for 100 s"}


def test_what_a_slow_source_owes_is_requested_again_once() -> None:
    everything = np.ones(1, bool)
    selection = ChunkSelection(1)
    for name in ("slow", "fast", "third"):
        selection.add_source(name, 0.0)
        selection.on_available(name, everything)

    assert selection.requests(0.0) == [ChunkRequest("slow", 0)]
    assert selection.requests(REPEAT_AFTER - 0.1) == []
    assert selection.requests(REPEAT_AFTER) == [ChunkRequest("fast", 0)]
    assert selection.expects("fast", 0, REPEAT_AFTER)
    selection.on_checked("fast", 0, right=True)
    assert not selection.expects("slow", 0, REPEAT_AFTER)
    assert selection.complete
    assert selection.failures == {}


def test_a_chunk_that_is_held_is_not_requested_for_a_slow_source() -> None:
    everything = np.ones(2, bool)
    selection = ChunkSelection(2)
    for name in ("slow", "fast"):
        selection.add_source(name, 0.0)
    selection.on_available("slow", everything)
    selection.requests(0.0)
    selection.on_available("fast", everything)
    selection.requests(REPEAT_AFTER)
    assert selection.expects("fast", 0, REPEAT_AFTER)
    selection.on_checked("fast", 0, right=True)

    assert selection.requests(2 * REPEAT_AFTER) == []


def test_chunks_that_are_elsewhere_are_requested_there_first() -> None:
    everything = np.ones(CHUNKS, bool)
    selection = a_selection(seed=everything)
    selection.requests(0.0)

    selection.on_elsewhere("seed", [0, 2, 11], 1.0)  # the last was not requested

    assert [each.chunk for each in selection.requests(1.0)] == [4, 5]
    selection.add_source("peer", 1.0)
    selection.on_available("peer", flags(0))
    assert selection.requests(1.0) == [ChunkRequest("peer", 0)]
    for chunk in (1, 3, 4, 5):
        assert selection.expects("seed", chunk, 1.0 + PROMPT)
        selection.on_checked("seed", chunk, right=True)
    selection.requests(1.0)
    for chunk in range(6, CHUNKS):
        if chunk not in (10, 11):
            assert selection.expects("seed", chunk, 1.0 + PROMPT)
            selection.on_checked("seed", chunk, right=True)
    assert [each.chunk for each in selection.requests(1.0)] == [10, 11]
    for chunk in (10, 11):
        assert selection.expects("seed", chunk, 1.0 + PROMPT)
        selection.on_checked("seed", chunk, right=True)
    assert selection.expects("peer", 0, 1.0)
    selection.on_checked("peer", 0, right=True)
    assert selection.requests(1.0) == []
    assert selection.drop_silent(1.0) == 1.0 + ELSEWHERE_TIMEOUT

    # The peer of the other one has not come.
    again = ChunkRequest("seed", 2)
    late = 1.0 + ELSEWHERE_TIMEOUT
    assert selection.requests(late) == [again]
    assert selection.drop_silent(late) == late + REPEAT_AFTER  # else it looks all along


def test_what_a_near_source_has_is_requested_there() -> None:
    selection = a_selection(far=np.ones(CHUNKS, bool))
    begun = {each.chunk for each in selection.requests(0.0)}
    selection.add_source("near", 0.0, near=True)
    selection.on_available("near", flags(*range(CHUNKS - 1)))
    for chunk in begun:
        assert selection.expects("far", chunk, 0.0)
        selection.on_checked("far", chunk, right=True)

    requests = selection.requests(0.0)

    assert ChunkRequest("far", CHUNKS - 1) in requests  # which only that one has
    others = {each.chunk for each in requests} - {CHUNKS - 1}
    assert requests.count(ChunkRequest("far", CHUNKS - 1)) == 1
    assert {each for each in requests if each.source == "near"} == {
        ChunkRequest("near", chunk) for chunk in others
    }
    late = selection.requests(REPEAT_AFTER)  # the near one sends nothing
    assert {each.source for each in late} == {"far"}


def test_what_a_near_source_leaves_to_others_is_requested_from_them() -> None:
    selection = ChunkSelection(CHUNKS)
    selection.add_source("near", 0.0, near=True)
    selection.on_available("near", np.ones(CHUNKS, bool))
    assert ChunkRequest("near", 0) in selection.requests(0.0)
    selection.add_source("far", 0.0)
    selection.on_available("far", flags(0))

    selection.on_elsewhere("near", [0], 0.0)

    assert ChunkRequest("far", 0) in selection.requests(0.0)


def test_a_source_of_another_model_is_dropped() -> None:
    selection = a_selection(a=np.ones(CHUNKS + 1, bool))

    assert selection.failures == {"a": "it has another number of chunks"}


@given(st.integers(1, 5000), st.booleans())
@settings(max_examples=20)
def test_one_source_sends_each_chunk_once(chunks: int, shuffled: bool) -> None:
    selection = ChunkSelection(chunks)
    if shuffled:
        selection.shuffle(chunks)
    selection.add_source("a", 0.0)
    selection.on_available("a", np.ones(chunks, bool))
    seen: Counter[int] = Counter()

    while not selection.complete:
        for name, chunk in selection.requests(0.0):
            seen[chunk] += 1
            assert selection.expects(name, chunk, 0.0)
            selection.on_checked(name, chunk, right=True)

    assert seen == Counter(range(chunks))


class Histories(RuleBasedStateMachine):
    """Sources that come, go, lie, and are slow, in any order."""

    @initialize(held=st.sets(st.integers(0, CHUNKS - 1)))
    def begin(self, held: set[int]) -> None:
        self.selection = ChunkSelection(CHUNKS, held)
        self.held = set(held)
        self.has: dict[str, set[int]] = {}
        self.owed: list[ChunkRequest] = []
        self.checking: list[ChunkRequest] = []
        self.now = 0.0
        self.count = 0

    @rule(has=st.sets(st.integers(0, CHUNKS - 1)), near=st.booleans())
    def come(self, has: set[int], near: bool) -> None:
        self.count += 1
        name = f"s{self.count}"
        self.has[name] = has
        self.selection.add_source(name, self.now, near=near)
        self.selection.on_available(name, flags(*has))

    @precondition(lambda self: self.has)
    @rule(data=st.data(), more=st.sets(st.integers(0, CHUNKS - 1)))
    def gain(self, data: st.DataObject, more: set[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.has)))
        self.has[name] |= more
        self.selection.on_available(name, flags(*more))

    @precondition(lambda self: self.has)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.has)))
        self.selection.remove_source(name)
        self.forget(name)

    @rule(seed=st.integers(0, 9))
    def shuffle(self, seed: int) -> None:
        self.selection.shuffle(seed)

    @rule(
        seconds=st.sampled_from([0.1, REPEAT_AFTER, ELSEWHERE_TIMEOUT, SILENCE_TIMEOUT])
    )
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.selection.drop_silent(self.now)
        for name in [*self.has]:
            if name not in self.selection.sources:
                self.forget(name)

    @rule()
    def ask(self) -> None:
        for each in self.selection.requests(self.now):
            assert each.chunk in self.has[each.source]
            assert each.chunk not in self.held
            assert each not in self.owed
            self.owed.append(each)
        for name in self.has:
            lost = [*self.owed, *self.checking]  # if this process were killed
            assert sum(each.source == name for each in lost) <= AHEAD_MAX

    @precondition(lambda self: self.owed)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.owed))
        self.owed.remove(each)
        if self.selection.expects(*each, self.now):
            assert each.chunk not in self.held
            assert all(each.chunk != other.chunk for other in self.checking)
            self.checking.append(each)

    @precondition(lambda self: self.owed)
    @rule(data=st.data())
    def defer(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.owed))
        self.owed.remove(each)
        self.selection.on_elsewhere(each.source, [each.chunk], self.now)

    @precondition(lambda self: self.checking)
    @rule(data=st.data(), right=st.booleans())
    def check(self, data: st.DataObject, right: bool) -> None:
        each = data.draw(st.sampled_from(self.checking))
        self.checking.remove(each)
        self.selection.on_checked(*each, right=right)
        if right:
            self.held.add(each.chunk)
        else:
            self.forget(each.source)

    @invariant()
    def what_is_held_is_what_was_right(self) -> None:
        if hasattr(self, "selection"):
            assert {*np.flatnonzero(self.selection.held)} == self.held
            assert self.selection.complete == (len(self.held) == CHUNKS)

    def teardown(self) -> None:
        """Whatever happened, an honest source completes it."""
        if not hasattr(self, "selection"):
            return
        for each in [*self.checking]:
            self.selection.on_checked(*each, right=True)
        for name in [*self.has]:
            self.selection.remove_source(name)
        self.selection.add_source("honest", self.now)
        self.selection.on_available("honest", np.ones(CHUNKS, bool))
        while requests := self.selection.requests(self.now):
            for each in requests:
                assert self.selection.expects(*each, self.now)
                self.selection.on_checked(*each, right=True)
        assert self.selection.complete

    def forget(self, name: str) -> None:
        self.has.pop(name, None)
        self.owed = [each for each in self.owed if each.source != name]


test_histories = Histories.TestCase
