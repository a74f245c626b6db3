"""Arrays as upstream encodes, accepts and rejects them."""

import subprocess
import sys
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as arrays

from harness.profiles import examples
from protocols.macfleet.recorded import Case, recorded
from shoal.domain.errors import InvalidRequest, PeerError, TooLarge
from shoal.protocols.macfleet import ranks as codec
from shoal.protocols.macfleet.codec import frames
from shoal.protocols.macfleet.codec.frames import FrameType, frame_header
from shoal.protocols.macfleet.ranks import decode_array, encode_array

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

types = (
    arrays.boolean_dtypes()
    | arrays.integer_dtypes()
    | arrays.unsigned_integer_dtypes()
    | arrays.floating_dtypes()
    | arrays.complex_number_dtypes()
    | arrays.datetime64_dtypes()
    | arrays.timedelta64_dtypes()
    | arrays.byte_string_dtypes()
    | arrays.unicode_string_dtypes()
)


def packed(array: Array) -> bytes:
    head, numbers = encode_array(array)
    return head + numbers


def original(case: Case) -> Array:
    said = case["input"]
    data = bytes.fromhex(said["data_hex"])
    array = np.frombuffer(data, said["dtype"]).reshape(said["shape"])
    match case["name"]:
        case "array/fortran order written as C":
            return np.asfortranarray(array)
        case "array/strided":
            return np.repeat(array, 3)[::3]
        case _:
            return array


@recorded("array")
def test_arrays_are_encoded_as_upstream_does(case: Case) -> None:
    array = original(case)

    written = packed(array)

    assert written.hex() == case["expect"]["packed_hex"]
    frame = frame_header(FrameType.GRADIENT, written) + written
    assert frame.hex() == case["expect"]["gradient_frame_hex"]
    again = decode_array(written)
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    assert again.tobytes().hex() == case["input"]["data_hex"]


@recorded("array_decode")
def test_arrays_that_upstream_accepts_are_accepted(case: Case) -> None:
    payload = bytes.fromhex(case["input"]["packed_hex"])

    if "error" in case["expect"]:
        with pytest.raises(PeerError, match="an array"):
            decode_array(payload)
        return
    accepted, array = case["expect"]["accepted"], decode_array(payload)
    assert str(array.dtype) == accepted["dtype"]
    assert array.shape == tuple(accepted["shape"])
    assert array.tobytes().hex() == accepted["data_hex"]


@settings(max_examples=examples(0.4))
@given(arrays.arrays(types, arrays.array_shapes(min_dims=0, min_side=0)))
def test_arrays_of_any_dtype_and_shape_round_trip(array: Array) -> None:
    again = decode_array(packed(array))

    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    assert again.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "name",
    [
        *("O", "object", "|O", "i4,f4", "(2,3)i4", "O,i4", "V", "S", "U", "a3", "i3"),
        *("[('a','O')]", "{'names':['a'],'formats':['O']}", "void", "str", "float"),
        *("datetime64[9999999999s]", "M8[s]x", "m8[oops]", "", "\0", "f4\n", "int"),
        *("S0000000001\0", "U9999999999", "=O", "record", "T", "StringDType()"),
        *("é", "f" * 64, "f" * 65),
    ],
)
def test_unsafe_dtype_names_are_rejected(name: str) -> None:
    label = name.encode()
    payload = codec.ARRAY_HEADER.pack(len(label), 1) + (0).to_bytes(4) + label

    with pytest.raises(PeerError, match="an array"):
        decode_array(payload)


@pytest.mark.parametrize(
    "array",
    [
        np.array([object()]),
        np.zeros(2, "i4,f4"),
        np.zeros(2, [("a", "O")]),
        np.array(["a", "bc"], np.dtypes.StringDType()),
    ],
)
def test_arrays_of_unsupported_dtypes_are_not_encoded(array: Array) -> None:
    with pytest.raises(InvalidRequest, match="with astype"):
        encode_array(array)


def test_impossible_shapes_are_rejected() -> None:
    for shape in ((2**32 - 1,) * 64, (0, *(2**32 - 1,) * 3), (2**31, 2**31)):
        payload = (
            codec.ARRAY_HEADER.pack(2, len(shape))
            + b"".join(each.to_bytes(4) for each in shape)
            + b"f8"
        )
        with pytest.raises(PeerError, match="an array of f8"):
            decode_array(payload)


def test_arrays_are_not_copied() -> None:
    array = np.arange(1000.0)

    head, numbers = encode_array(array)
    buffer = bytearray(head + numbers)
    again = decode_array(memoryview(buffer))
    again[0] = 7.0

    assert np.shares_memory(np.frombuffer(numbers, np.uint8), array)
    assert buffer[len(head) :] == again.tobytes()
    assert numbers.readonly is False


def test_read_only_payloads_give_read_only_arrays() -> None:
    assert not decode_array(packed(np.arange(3.0))).flags.writeable


def test_arrays_too_large_for_upstream_are_not_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "PAYLOAD_MAX", 100)

    with pytest.raises(TooLarge, match="split it"):
        encode_array(np.zeros(100, np.uint8))


def test_an_array_is_sent_from_its_own_memory() -> None:
    array = np.arange(1000, dtype=np.float32)

    _, numbers = encode_array(array)

    assert np.shares_memory(np.frombuffer(numbers, np.uint8), array)


def test_numpy_is_imported_only_for_arrays() -> None:
    fleet = "shoal.protocols.macfleet"
    program = (
        f"import sys, {fleet}.codec.frames, {fleet}.codec.tasks, {fleet}.ranks\n"
        "sys.exit('numpy' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
