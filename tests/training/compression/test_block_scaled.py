from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from shoal.training.compression.codings import (
    BLOCK,
    CODINGS,
    CodingName,
    e4m3_numbers,
)

Array = np.ndarray[Any, np.dtype[Any]]

NAMES: tuple[CodingName, ...] = ("fp8", "int8")
finite = arrays(
    np.float32,
    st.integers(0, 2 * BLOCK + 9),
    elements=st.floats(allow_nan=False, allow_infinity=False, width=32),
)


def there_and_back(name: CodingName, numbers: Array) -> Array:
    coding = CODINGS[name]
    data = memoryview(bytearray(coding.encoded_size(numbers.nbytes)))
    result = np.full_like(numbers, 7)
    if numbers.size:
        coding.encode(numbers.view(np.uint8).data, data)
        coding.decode(data, result.view(np.uint8).data)
    return result


def blocks(numbers: Array) -> list[Array]:
    return [numbers[at : at + BLOCK] for at in range(0, numbers.size, BLOCK)]


@given(finite)
def test_int8_is_off_by_half_a_step_of_its_block(numbers: Array) -> None:
    back = there_and_back("int8", numbers)

    for before, after in zip(blocks(numbers.astype(float)), blocks(back), strict=True):
        largest = np.abs(before).max()
        limit = largest * (1 + 1e-5) / 254 + 2.0**-126
        assert (np.abs(after - before) <= limit).all()


@given(finite)
def test_fp8_is_off_by_a_part_of_each_number(numbers: Array) -> None:
    back = there_and_back("fp8", numbers)

    for before, after in zip(blocks(numbers.astype(float)), blocks(back), strict=True):
        smallest = np.abs(before).max() / 448 * 2.0**-10 + 2.0**-126
        limit = np.abs(before) * (2.0**-4 + 2.0**-8) + smallest
        assert (np.abs(after - before) <= limit).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("problem", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_spoils_its_block_only(
    name: CodingName, problem: float
) -> None:
    numbers = np.ones(3 * BLOCK, np.float32)
    numbers[BLOCK + 5] = problem

    back = there_and_back(name, numbers)

    assert np.isnan(blocks(back)[1]).all()
    assert (blocks(back)[0] == blocks(back)[2]).all()
    assert np.allclose(blocks(back)[0], 1, rtol=1e-5)


@pytest.mark.parametrize(("name", "error"), [("fp8", 0.027), ("int8", 0.0075)])
def test_a_byte_is_enough_for_normally_distributed_numbers(
    name: CodingName, error: float
) -> None:
    numbers = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)

    wrong = there_and_back(name, numbers) - numbers

    assert np.sqrt(np.mean(wrong**2)) <= error
    size = CODINGS[name].encoded_size(numbers.nbytes)
    assert size == 10_000 + 4 * 40, "a scale for each block"


def test_the_bytes_of_fp8_are_those_of_e4m3() -> None:
    # Micikevicius and others, "FP8 formats for deep learning", table 1.
    numbers = e4m3_numbers()

    assert numbers[0b0_1111_110] == 448
    assert numbers[0b0_0001_000] == 2.0**-6
    assert numbers[0b0_0000_111] == 0.875 * 2.0**-6
    assert numbers[0b0_0000_001] == 2.0**-9
    assert numbers[0b1_0111_000] == -1
    assert np.isnan(numbers[[0x7F, 0xFF]]).all()


def test_ties_of_fp8_go_to_even() -> None:
    numbers = np.zeros(BLOCK, np.float32)
    numbers[:6] = 448, 17, 19, 21, -17, 2.0**-10

    back = there_and_back("fp8", numbers)

    assert np.allclose(back[:6], [448, 16, 20, 20, -16, 0], rtol=1e-6)
