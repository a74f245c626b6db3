import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import InvalidRequest
from shoal.training import collectives
from shoal.training.collectives import (
    Operation,
    Place,
    ReceiveSegment,
    ReduceOp,
    SendSegment,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    chunk_bounds,
    gather,
    reduce_scatter,
    reduction,
    scatter,
)
from training.in_memory import Array, run

sizes = st.integers(1, 6)
lengths = st.integers(0, 50)
orders = st.lists(st.integers(0, 100), min_size=1, max_size=20)


@pytest.fixture(autouse=True, scope="module")
def small_segments() -> Any:
    """Make arrays of a few numbers have several segments."""
    patch = pytest.MonkeyPatch()
    patch.setattr(collectives, "SEGMENT_SIZE", 16)
    yield
    patch.undo()


def chooser(order: list[int]) -> Any:
    turns = itertools.cycle(order)
    return lambda count: next(turns) % count


def raw(array: Array) -> memoryview:
    return (
        array.reshape(-1).view(np.uint8).data
        if array.nbytes
        else memoryview(bytearray())
    )


def numbers(rank: int, length: int, dtype: str = "float32") -> Array:
    return np.random.default_rng(rank).integers(1, 99, length).astype(dtype) / 7


@given(sizes, lengths, orders, st.sampled_from(["sum", "mean", "min", "max"]))
def test_all_ranks_get_the_same_bits_of_the_right_result(
    size: int, length: int, order: list[int], op: ReduceOp
) -> None:
    arrays = [numbers(rank, length) for rank in range(size)]
    before = [array.copy() for array in arrays]
    results = [np.empty_like(array) for array in arrays]
    combined = reduction(op, np.dtype("float32"), size)

    run(
        [
            all_reduce(
                Place(rank, size), raw(arrays[rank]), raw(results[rank]), combined
            )
            for rank in range(size)
        ],
        chooser(order),
    )

    expected = getattr(np, op)(before, axis=0)
    assert np.allclose(results[0], expected)
    for rank in range(size):
        assert results[rank].tobytes() == results[0].tobytes()
        assert np.array_equal(arrays[rank], before[rank]), "the own numbers survive"


@given(sizes, lengths, orders)
def test_the_result_may_replace_the_own_array(
    size: int, length: int, order: list[int]
) -> None:
    arrays = [np.arange(length, dtype=np.int64) * rank for rank in range(size)]
    expected = sum(array.copy() for array in arrays)
    combined = reduction("sum", np.dtype("int64"), size)

    operations = []
    for rank in range(size):
        memory = raw(arrays[rank])
        operations.append(all_reduce(Place(rank, size), memory, memory, combined))
    run(operations, chooser(order))

    for array in arrays:
        assert np.array_equal(array, expected)


@given(st.lists(lengths, min_size=1, max_size=5), orders)
def test_each_rank_gets_its_part_of_a_sum(lengths: list[int], order: list[int]) -> None:
    size = len(lengths)
    ends = np.cumsum(lengths)
    arrays = [np.arange(ends[-1]) + 10 * rank for rank in range(size)]
    results = [np.empty(length, arrays[0].dtype) for length in lengths]
    combined = reduction("sum", arrays[0].dtype, size)
    bytes_of_ends = [int(end) * arrays[0].itemsize for end in ends]

    run(
        [
            reduce_scatter(
                Place(rank, size),
                raw(arrays[rank]),
                raw(results[rank]),
                combined,
                bytes_of_ends,
            )
            for rank in range(size)
        ],
        chooser(order),
    )

    parts = np.split(np.sum(arrays, axis=0), ends[:-1])
    for rank in range(size):
        assert np.array_equal(results[rank], parts[rank])


@given(st.lists(lengths, min_size=1, max_size=5), orders)
def test_all_ranks_get_all_parts_of_any_length(
    lengths: list[int], order: list[int]
) -> None:
    size = len(lengths)
    parts = [bytes([65 + rank]) * each for rank, each in enumerate(lengths)]
    ends = list(itertools.accumulate(lengths))
    results = []
    for rank in range(size):
        result = bytearray(sum(lengths))
        result[ends[rank] - lengths[rank] : ends[rank]] = parts[rank]
        results.append(result)

    run(
        [
            all_gather(Place(rank, size), memoryview(results[rank]), ends)
            for rank in range(size)
        ],
        chooser(order),
    )

    assert results == [b"".join(parts)] * size


@given(sizes, lengths, st.integers(0, 5), orders)
def test_the_roots_array_reaches_all_ranks_once(
    size: int, length: int, root: int, order: list[int]
) -> None:
    root %= size
    arrays = [bytearray([rank]) * length for rank in range(size)]

    sent = run(
        [broadcast(Place(r, size), memoryview(arrays[r]), root) for r in range(size)],
        chooser(order),
    )

    assert arrays == [bytes([root]) * length] * size
    assert sum(len(each) for each in itertools.chain(*sent.values())) == length * (
        size - 1
    )


@given(sizes, lengths, st.integers(0, 5), orders)
def test_the_root_gathers_what_it_scatters(
    size: int, length: int, root: int, order: list[int]
) -> None:
    root %= size
    parts = [bytearray([rank]) * length for rank in range(size)]
    own = [bytearray(length) for _ in range(size)]
    back = [bytearray(length) for _ in range(size)]

    def there_and_back(rank: int) -> Operation:
        is_root = rank == root
        views = [memoryview(part) for part in parts] if is_root else []
        yield from scatter(Place(rank, size), views, memoryview(own[rank]), root)
        views = [memoryview(part) for part in back] if is_root else []
        yield from gather(Place(rank, size), memoryview(own[rank]), views, root)

    run([there_and_back(rank) for rank in range(size)], chooser(order))

    assert own == parts
    assert back == parts


@given(sizes, lengths, orders)
def test_all_ranks_exchange_their_parts(
    size: int, length: int, order: list[int]
) -> None:
    parts = [[bytes([r, s]) * length for s in range(size)] for r in range(size)]
    results = [[bytearray(2 * length) for _ in range(size)] for _ in range(size)]

    run(
        [
            all_to_all(
                Place(rank, size),
                [memoryview(each) for each in parts[rank]],
                [memoryview(each) for each in results[rank]],
            )
            for rank in range(size)
        ],
        chooser(order),
    )

    for r, s in itertools.product(range(size), repeat=2):
        assert results[s][r] == parts[r][s]


@given(sizes, orders)
def test_no_rank_passes_a_barrier_before_all_have_come(
    size: int, order: list[int]
) -> None:
    arrived: set[int] = set()
    passed: list[int] = []

    def waits(rank: int) -> Operation:
        arrived.add(rank)
        yield from barrier(Place(rank, size))
        assert len(arrived) == size
        passed.append(rank)

    operations = [waits(rank) for rank in range(size)]
    run(operations, chooser(order))

    assert sorted(passed) == list(range(size))


def test_a_sum_is_passed_on_while_the_rest_of_the_chunk_is_on_its_way() -> None:
    own = np.arange(24, dtype=np.float32)
    combined = reduction("sum", own.dtype, 3)
    operation = all_reduce(Place(0, 3), raw(own), raw(own), combined)
    action = next(operation)
    actions: list[SendSegment | ReceiveSegment] = [action]

    for _ in range(4):
        if isinstance(action, ReceiveSegment):
            action.into[:] = bytes(len(action.into))
        action = next(operation)
        actions.append(action)

    kinds = [isinstance(each, SendSegment) for each in actions]
    assert kinds == [True, True, False, True, False]


def test_chunks_have_one_length_but_the_last() -> None:
    assert chunk_bounds(10, 4) == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert chunk_bounds(2, 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]
    assert chunk_bounds(0, 2) == [(0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("op", "dtype", "problem"),
    [
        ("mean", "int32", "a mean of int32"),
        ("sum", "datetime64[s]", "cannot be combined"),
        ("sum", ">f4", "cannot be combined"),
        ("median", "float32", "expected one of sum"),
    ],
)
def test_what_cannot_be_combined_is_refused(op: Any, dtype: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        reduction(op, np.dtype(dtype), 2)
