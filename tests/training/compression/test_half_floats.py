from typing import Any

import numpy as np
import pytest

from shoal.domain.errors import InvalidRequest
from shoal.training.compression.codings import CodingName, coding_of

Array = np.ndarray[Any, np.dtype[Any]]

FLOAT32 = np.dtype(np.float32)
NAMES: tuple[CodingName, ...] = ("fp16", "bf16")


def there_and_back(name: CodingName, numbers: Array) -> Array:
    coding = coding_of(name, FLOAT32)
    data = memoryview(bytearray(coding.encoded_size(numbers.nbytes)))
    coding.encode(numbers.view(np.uint8).data, data)
    result = np.empty_like(numbers)
    coding.decode(data, result.view(np.uint8).data)
    return result


@pytest.mark.parametrize(("name", "unit"), [("fp16", 2.0**-11), ("bf16", 2.0**-8)])
def test_numbers_of_any_size_keep_their_precision(
    name: CodingName, unit: float
) -> None:
    random = np.random.default_rng(0)
    for size in (1e-30, 1e-7, 1.0, 1e10, 1e38):
        numbers = (random.uniform(-1, 1, 5000) * size).astype(np.float32)

        error = np.abs(there_and_back(name, numbers).astype(float) - numbers)

        assert (error <= unit * np.abs(numbers) + 2.0**-39 * size).all()


@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_fit_come_back_unchanged(name: CodingName) -> None:
    numbers = np.array([0, -0.0, 1, -2, 0.375, 96, -1.5], np.float32)

    assert there_and_back(name, numbers).tobytes() == numbers.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_are_not_finite_stay_so(name: CodingName) -> None:
    # All bits set: adding half a unit would carry into the sign.
    nan = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    numbers = np.concatenate([nan, np.array([np.inf, -np.inf, 1], np.float32)])

    back = there_and_back(name, numbers)

    assert np.isnan(back[:3]).all()
    assert back[3:].tolist() == [np.inf, -np.inf, 1]


def test_bfloat16_is_rounded_to_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], np.uint32)

    back = there_and_back("bf16", bits.view(np.float32)).view(np.uint32)

    assert [hex(each) for each in back] == [
        "0x3f800000",
        "0x3f820000",
        "0x3f810000",
        "0x3f800000",
    ]


def test_other_compressions_and_dtypes_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="expected one of fp16, bf16, fp8, int8"):
        coding_of("fp4", FLOAT32)  # type: ignore[arg-type]  # what it refuses
    with pytest.raises(InvalidRequest, match="only float32"):
        coding_of("fp16", np.dtype(np.float64))
