from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from shoal.domain.errors import PeerError
from shoal.training.compression import sparse_spans
from shoal.training.compression.sparse_spans import (
    decode_span,
    encode_span,
    encoded_size,
    is_dense,
    kept,
    largest,
)

Array = np.ndarray[Any, np.dtype[Any]]

spans = arrays(
    np.float32,
    st.integers(1, 60),
    elements=st.integers(-8, 8).map(lambda each: each / 4) | st.just(-0.0),
)


@given(spans, st.data())
def test_the_largest_are_taken_and_of_equal_ones_the_first(
    numbers: Array, data: Any
) -> None:
    count = data.draw(st.integers(1, numbers.size))

    places = largest(numbers, count)

    ranked = sorted(range(numbers.size), key=lambda at: (-abs(numbers[at]), at))
    assert places.tolist() == sorted(ranked[:count])


@given(spans, st.data())
def test_what_is_sent_arrives_and_the_rest_is_zero(numbers: Array, data: Any) -> None:
    count = data.draw(st.integers(0, numbers.size))
    places = np.array(
        sorted(data.draw(st.permutations(range(numbers.size)))[:count]), np.intp
    )

    encoded = encode_span(numbers, places)
    result = np.full_like(numbers, 7)
    decode_span(encoded, count, result)

    assert len(encoded) == encoded_size(numbers.size, count)
    assert len(encoded) <= 4 + 2 * numbers.size, "dense where that is smaller"
    expected = numbers
    if not is_dense(numbers.size, count):
        expected = np.zeros_like(numbers)
        expected[places] = numbers[places]
    assert np.array_equal(result, expected), "float16 has these numbers"


def test_numbers_that_are_not_finite_are_among_the_largest() -> None:
    numbers = np.array([1, np.nan, -3, -np.inf, 2], np.float32)

    assert largest(numbers, 3).tolist() == [1, 2, 3]


def test_places_beyond_the_span_are_refused() -> None:
    numbers = np.arange(100, dtype=np.float32)
    encoded = encode_span(numbers, np.array([3, 99]))

    with pytest.raises(PeerError, match="a number at 99 of a span of 50"):
        decode_span(encoded, 2, np.zeros(50, np.float32))


def test_a_span_has_a_share_and_places_of_two_bytes() -> None:
    assert kept(1000, 0.01) == 10
    assert kept(3, 0.01) == 1
    assert np.iinfo(np.uint16).max == sparse_spans.SPAN - 1
    assert encoded_size(sparse_spans.SPAN, 655) == 4 + 4 * 655
