"""Compressions, as other programs compute them."""

from base64 import b64decode
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from protocols.macfleet.recorded import Case, recorded
from shoal.domain.errors import InvalidRequest
from shoal.training.compression.presets import (
    PRESETS,
    CompressedGradient,
    Compression,
    GradientCompressor,
    Quantized,
    decode_half,
    dequantize,
    encode_half,
    largest,
    quantize_half,
    quantize_int8,
)

Array = np.ndarray[Any, np.dtype[Any]]

# Which of equal numbers NumPy takes depends on the processor.  These are the recorded
# indices (u16), on one with AVX-512; the recorded hashes verify them.
MODERATE_INDICES = (
    "8QMAAOIH7gb9AvoF9AAJAuUEFQHZBQYF6AHNBhIE3AIhAMEHDwfQAx4DKgIbBsQE0wAnBTYBuAXHAawG"
    "MwRCALsCoAc/A68DMAc8BqMESwKyAEgFVwGXBaYBYwCaAosGVASOA1EHfwdgA10GkQCCBGwChQFpBXgB"
    "dgV5AoQAdQRqBl4HbQNyB4EDfgaNAnAAYQSZAWQBigVVBVgClgRJBqUAPQeTB6IDTAOuAkAETwCfBroB"
    "NAVDAasFxgA3ArcEKAbDA7QHKwMcB8AGHwTPAi4AzAUiARMF2wHYBOcABwYWAgoD5AP7BtUHDQD+A+EG"
    "8ALvB+0F8gQBAfwB9QH5BAgB5gXpAgUE9gcUANoGEQPdA84HAgcOBtEEHQLgANQBKQHFBRoFNQDIAiYE"
    "uQa8AzIDIwetBy8GPgKwBL8ApAU7BbMBSgFHBJgGVgCnApsDRAdTA4wHjwRfAlAGngCDBZIBawFcBYYC"
    "dwBoBHcGegNlB3QDawd9AIACcQZuBGIFfQWMAXEBZQJWBpgAiQRKB4YHlQNZA1wA"
)
AGGRESSIVE_INDICES = "8QPiBwAA/QLuBuUE9AAJAvoF2QUVAegBBgXcAhIEzQYhAMEH0AMeAw=="
INDICES = {"moderate": MODERATE_INDICES, "aggressive": AGGRESSIVE_INDICES}


def floats(text: str) -> Array:
    return np.frombuffer(bytes.fromhex(text), "<f4")


def digest(array: Array) -> str:
    return sha256(array.tobytes()).hexdigest()


@recorded("topk")
def test_the_largest_numbers_are_kept_and_the_others_follow_later(case: Case) -> None:
    compressor = GradientCompressor(Compression(case["input"]["ratio"]), numbers_min=0)

    for text, expected in zip(
        case["input"]["rounds_f32le_hex"], case["expect"]["rounds"], strict=True
    ):
        gradient = floats(text)
        compressed = compressor.compress(gradient)

        assert compressed is not None
        assert compressed.indices is not None
        assert compressor.residual is not None
        assert compressed.indices.tobytes().hex() == expected["indices_i32le_hex"]
        assert compressed.values.tobytes().hex() == expected["values_f32le_hex"]
        assert gradient.size == expected["numel"]
        assert compressor.residual.tobytes().hex() == expected["residual_f32le_hex"]
        assert compressed.dense().tobytes().hex() == expected["dense_f32le_hex"]


@recorded("fp16")
def test_numbers_become_float16_with_a_scale(case: Case) -> None:
    encoded = encode_half(floats(case["input"]["array_f32le_hex"]))

    assert encoded.numbers.tobytes().hex() == case["expect"]["fp16_le_hex"]
    assert encoded.scale == case["expect"]["scale"]
    assert decode_half(encoded).tobytes().hex() == case["expect"]["decoded_f32le_hex"]


@recorded("adaptive")
def test_presets_compress_as_recorded(case: Case) -> None:
    level, count, expected = case["input"]["level"], case["input"]["n"], case["expect"]
    at = np.arange(count)
    gradient = (((at * 7919) % 1009 - 504) / 64).astype(np.float32)

    compressed = GradientCompressor(PRESETS[level]).compress(gradient)

    if compressed is None:
        assert expected == {"uncompressed": True}
        return
    assert compressed.nbytes == expected["compressed_size"]
    assert gradient.nbytes == expected["original_size"]
    assert compressed.scale == expected["scale"]
    assert (compressed.values.dtype == np.float16) is expected["is_fp16"]
    if level in INDICES:
        compressed = at_recorded_indices(compressed, gradient, level)
        assert compressed.indices is not None
        assert compressed.indices.size == expected["topk_k"]
        assert digest(compressed.indices) == expected["indices_sha256"]
    assert digest(compressed.values) == expected["values_sha256"]
    assert digest(compressed.dense()) == expected["dense_sha256"]
    assert compressed.dense().dtype == expected["dense_dtype"]


def at_recorded_indices(
    compressed: CompressedGradient, gradient: Array, level: str
) -> CompressedGradient:
    """Return the recorded choice among equal numbers, if this one is as good."""
    indices = np.frombuffer(b64decode(INDICES[level]), "<u2").astype(np.int32)
    encoded = encode_half(gradient[indices])
    assert np.array_equal(np.abs(encoded.numbers), np.abs(compressed.values))
    assert compressed.indices is not None
    assert np.unique(compressed.indices).size == indices.size
    chosen = encode_half(gradient[compressed.indices])
    assert np.array_equal(chosen.numbers, compressed.values)
    return CompressedGradient(*encoded, indices, gradient.shape)


@recorded("v1_quant")
def test_numbers_are_quantized_as_recorded(case: Case) -> None:
    numbers, expected = floats(case["input"]["array_f32le_hex"]), case["expect"]

    for name, quantized in (
        ("fp16", quantize_half(numbers)),
        ("int8", quantize_int8(numbers)),
    ):
        raw = quantized.numbers.tobytes().hex()
        assert raw == expected.get(f"{name}_le_hex", expected.get(f"{name}_hex"))
        assert quantized.scale == expected[f"{name}_scale"]
        decoded = dequantize(quantized).tobytes().hex()
        assert decoded == expected[f"{name}_decoded_f32le_hex"]


@pytest.mark.parametrize("level", ["light", "moderate", "aggressive"])
def test_nothing_of_a_gradient_is_lost_in_the_long_run(level: str) -> None:
    random = np.random.default_rng(1)
    compressor = GradientCompressor(PRESETS[level])
    given, sent = np.zeros((2, 40, 50))

    for _ in range(50):
        gradient = random.standard_normal((40, 50)).astype(np.float32)
        compressed = compressor.compress(gradient)
        assert compressed is not None
        assert compressed.dense().shape == gradient.shape
        given += gradient
        sent += compressed.dense()

    assert compressor.residual is not None
    assert np.allclose(given, sent + compressor.residual, atol=1e-3)


def test_a_gradient_that_would_spoil_the_next_ones_is_refused() -> None:
    compressor = GradientCompressor(PRESETS["moderate"])
    compressor.compress(np.ones(2048, np.float32))

    with pytest.raises(InvalidRequest, match="not finite"):
        compressor.compress(np.full(2048, np.inf, np.float32))
    with pytest.raises(InvalidRequest, match="that of the last step"):
        compressor.compress(np.ones(4096, np.float32))
    assert compressor.residual is not None
    assert np.isfinite(compressor.residual).all()


@pytest.mark.parametrize("ratio", [0.0, 1.5, float("nan")])
def test_a_ratio_is_more_than_nothing_and_at_most_all(ratio: float) -> None:
    with pytest.raises(InvalidRequest, match="expected more than 0"):
        GradientCompressor(Compression(ratio))


def test_the_smallest_numbers_have_a_scale_too() -> None:
    tiny = np.full(3, 1e-45, np.float32)

    for encoded in (encode_half(tiny), encode_half(tiny[:0])):
        assert encoded.scale == 1.0
        assert isinstance(encoded, Quantized)
    assert largest(tiny, 0.5).tolist() != []
