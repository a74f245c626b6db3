"""The layouts of MacFleet's first version, as its programs write and read them."""

from typing import Any

import numpy as np
import pytest

from protocols.macfleet.recorded import Case, case_of, recorded
from shoal.domain.errors import InvalidRequest, PeerError, TooLarge
from shoal.protocols.macfleet.codec import legacy_tensors as codec
from shoal.protocols.macfleet.codec.frames import Flag, FrameType, frame_header
from shoal.protocols.macfleet.codec.legacy_tensors import (
    SparseTensor,
    decode_sparse,
    decode_tensor,
    encode_sparse,
    encode_tensor,
)

STRICTER = {
    "v1compdec/truncated values": "12 bytes, of which 10 were received",
    "v1compdec/unknown dtype code": "dtype codes 0 and 99",
}
"""What upstream accepts although it is malformed: fewer numbers than indices, and a
dtype without a name, which it takes for float32."""


def given_tensor(case: Case) -> np.ndarray[Any, np.dtype[Any]]:
    said = case["input"]
    # NumPy has no bfloat16; upstream sends it as float16.
    name = said["dtype"].removeprefix("torch.").replace("bfloat16", "float16")
    return np.array(said["values"], name).reshape(said["shape"])


@recorded("v1_tensor")
def test_tensors_are_laid_out_as_recorded(case: Case) -> None:
    array, expected = given_tensor(case), case["expect"]
    kind = FrameType(case["input"]["msg_type"])

    if "error" in expected:
        with pytest.raises(InvalidRequest, match="has no code"):
            encode_tensor(array, kind)
        return
    written = encode_tensor(array, kind)

    assert written.hex() == expected["bytes_hex"]
    found, again = decode_tensor(written)
    assert found is kind
    assert f"torch.{again.dtype}" == expected["decoded_dtype"]
    assert list(again.shape) == expected["decoded_shape"]
    assert np.array_equal(again, array)


@recorded("v1_compressed")
def test_compressed_gradients_are_laid_out_as_recorded(case: Case) -> None:
    said, expected = case["input"], case["expect"]
    tensor = SparseTensor(
        np.array(said["indices"], np.int32),
        np.array(said["values"], np.float32),
        said["original_numel"],
        said["original_dtype"].removeprefix("torch."),
    )

    written = encode_sparse(tensor)

    assert written.hex() == expected["bytes_hex"]
    head = frame_header(
        FrameType.COMPRESSED_GRADIENT, written, flags=int(Flag.COMPRESSED)
    )
    frame = head + written
    assert frame.hex() == expected["compressed_gradient_frame_hex"]
    assert encode_sparse(decode_sparse(written)) == written


@recorded("v1_compressed_decode")
def test_compressed_gradients_are_read_as_recorded(case: Case) -> None:
    payload = bytes.fromhex(case["input"]["bytes_hex"])

    if case["name"] in STRICTER:
        with pytest.raises(PeerError, match=STRICTER[case["name"]]):
            decode_sparse(payload)
        return
    if "error" in case["expect"]:
        with pytest.raises(PeerError, match="a compressed gradient of"):
            decode_sparse(payload)
        return
    accepted, tensor = case["expect"]["accepted"], decode_sparse(payload)
    assert tensor.indices.tolist() == accepted["indices"]
    assert tensor.values.tolist() == accepted["values"]
    assert tensor.size == accepted["numel"]
    assert f"torch.{tensor.dtype}" == accepted["dtype"]


GOOD = bytes.fromhex(case_of("v1compdec/good")["input"]["bytes_hex"])


@pytest.mark.parametrize(
    ("at", "word", "problem"),
    [
        (1, 9, "dtype code 9"),
        (2, 1, "1 dimensions"),
        (3, 13, "2 numbers of a compressed gradient in 13 bytes"),
        (5, 3, "3 numbers of a compressed gradient in 12 bytes"),
        (6, 1, "dtype codes 0 and 1"),
        (7, 0x0A000000, r"indices from 3 to 10 of 10 numbers"),
        (7, 0xFFFFFFFF, r"indices from -1 to 3 of 10 numbers"),
        (8, 0, "an index that is repeated"),
    ],
)
def test_malformed_compressed_gradients_are_rejected(
    at: int, word: int, problem: str
) -> None:
    payload = GOOD[: 4 * at] + word.to_bytes(4) + GOOD[4 * at + 4 :]

    with pytest.raises(PeerError, match=problem):
        decode_sparse(payload)


TENSOR = encode_tensor(np.arange(4, dtype=np.float32))


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (TENSOR[:15], "15 bytes has no header"),
        (b"\0\0\0\5" + TENSOR[4:], "message type 5"),
        (TENSOR[:7] + b"\x08" + TENSOR[8:], "dtype code 8"),
        (TENSOR[:-1], "in a payload of 35 bytes"),
        (TENSOR + b"\0", "in a payload of 37 bytes"),
        (TENSOR[:8] + b"\xff" * 4 + TENSOR[12:], "4294967295 dimensions"),
        (TENSOR[:19] + b"\5" + TENSOR[20:], r"shape \(5,\) in 16 bytes"),
        (
            b"".join(each.to_bytes(4) for each in (4, 6, 64, 0, 0, *(2**32 - 1,) * 63)),
            "a tensor of shape",
        ),
    ],
)
def test_malformed_tensors_are_rejected(payload: bytes, problem: str) -> None:
    with pytest.raises(PeerError, match=problem):
        decode_tensor(payload)


@pytest.mark.parametrize(
    "tensor",
    [
        SparseTensor(np.arange(2), np.zeros(3), 5),
        SparseTensor(np.arange(2), np.zeros(2), 1),
        SparseTensor(np.zeros(2, int), np.zeros(2), 5),
        SparseTensor(np.arange(2), np.zeros(2), 2_000_000_001),
        SparseTensor(np.arange(2), np.zeros(2), 5, "bool"),
    ],
)
def test_what_would_be_rejected_is_not_encoded(tensor: SparseTensor) -> None:
    with pytest.raises(InvalidRequest):
        encode_sparse(tensor)


def test_a_tensor_too_large_for_a_frame_is_not_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec, "PAYLOAD_MAX", 100)

    with pytest.raises(TooLarge, match="exceeds 100"):
        encode_tensor(np.zeros(100, np.uint8))


def test_other_byte_orders_are_converted() -> None:
    array = np.arange(4, dtype=">f4")

    assert encode_tensor(array) == TENSOR
