from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.training import collectives
from shoal.training.all_reduces import encoded_all_reduce
from shoal.training.collectives import Place, ReduceOp, reduction
from shoal.training.compression.codings import CodingName, coding_of
from training.in_memory import run
from training.test_collectives import chooser, lengths, numbers, orders, raw, sizes

FLOAT32 = np.dtype(np.float32)
UNITS: dict[CodingName, float] = {"fp16": 2.0**-11, "bf16": 2.0**-8}
ERRORS: dict[CodingName, float] = {**UNITS, "fp8": 2.0**-4 + 2.0**-9, "int8": 1 / 254}
halves: st.SearchStrategy[CodingName] = st.sampled_from(list(UNITS))
names: st.SearchStrategy[CodingName] = st.sampled_from(list(ERRORS))
ops: st.SearchStrategy[ReduceOp] = st.sampled_from(["sum", "mean", "min", "max"])


@pytest.fixture(autouse=True, scope="module")
def small_segments() -> Any:
    """Make arrays of a few numbers have several segments."""
    patch = pytest.MonkeyPatch()
    patch.setattr(collectives, "SEGMENT_SIZE", 16)
    yield
    patch.undo()


@given(sizes, lengths, orders, ops, names)
def test_all_ranks_get_the_same_bits_of_nearly_the_right_result(
    size: int, length: int, order: list[int], op: ReduceOp, name: CodingName
) -> None:
    arrays = [numbers(rank, length) for rank in range(size)]
    before = [array.copy() for array in arrays]
    results = [np.empty_like(array) for array in arrays]
    combined, coding = reduction(op, FLOAT32, size), coding_of(name, FLOAT32)

    sent = run(
        [
            encoded_all_reduce(
                Place(r, size), raw(arrays[r]), raw(results[r]), combined, coding
            )
            for r in range(size)
        ],
        chooser(order),
    )

    expected = getattr(np, op)(np.array(before, float), axis=0)
    # That of int8 is a part of the largest number of a block.
    largest = np.max(before, initial=0) * (size if op == "sum" else 1)
    error = 2.1 * ERRORS[name] * (largest if name == "int8" else expected)
    assert (np.abs(results[0] - expected) <= error).all()
    for rank in range(size):
        assert results[rank].tobytes() == results[0].tobytes()
        assert np.array_equal(arrays[rank], before[rank]), "the own numbers survive"
    segments = [each for some in sent.values() for each in some]
    width = 2 if name in UNITS else 1  # bytes of a number
    head = coding.encoded_size(4) - width
    total = sum(len(each) - head for each in segments)
    assert total == 2 * width * length * (size - 1)


@given(sizes, lengths, orders, halves)
def test_the_result_may_replace_the_own_array(
    size: int, length: int, order: list[int], name: CodingName
) -> None:
    arrays = [np.arange(length, dtype=np.float32) % 9 * rank for rank in range(size)]
    expected = sum(array.copy() for array in arrays)
    combined, coding = reduction("sum", FLOAT32, size), coding_of(name, FLOAT32)

    operations = []
    for rank in range(size):
        own = raw(arrays[rank])
        operations.append(
            encoded_all_reduce(Place(rank, size), own, own, combined, coding)
        )
    run(operations, chooser(order))

    for array in arrays:
        assert np.array_equal(array, expected), "small integers are exact"


@pytest.mark.parametrize("name", UNITS)
def test_the_size_of_a_group_does_not_add_to_the_error(name: CodingName) -> None:
    random = np.random.default_rng(0)
    for size in (2, 8):
        arrays = [random.standard_normal(500).astype(np.float32) for _ in range(size)]
        results = [np.empty_like(array) for array in arrays]
        combined, coding = reduction("mean", FLOAT32, size), coding_of(name, FLOAT32)

        run(
            [
                encoded_all_reduce(
                    Place(r, size), raw(arrays[r]), raw(results[r]), combined, coding
                )
                for r in range(size)
            ]
        )

        error = np.abs(results[0] - np.mean(np.array(arrays, float), axis=0))
        assert (error <= 2.01 * UNITS[name] * np.mean(np.abs(arrays), axis=0)).all()


@pytest.mark.parametrize("name", UNITS)
def test_sums_beyond_float16_do_not_overflow(name: CodingName) -> None:
    arrays = [np.full(10, 60000, np.float32) for _ in range(4)]
    combined, coding = reduction("sum", FLOAT32, 4), coding_of(name, FLOAT32)

    operations = [
        encoded_all_reduce(Place(r, 4), raw(each), raw(each), combined, coding)
        for r, each in enumerate(arrays)
    ]
    run(operations)

    assert np.allclose(arrays, 240000, rtol=2 * UNITS[name])
