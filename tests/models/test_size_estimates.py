"""The size of a model by its name."""

import pytest

from shoal.models.names import estimated_size


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("qwen3-8b", 4.9),
        ("qwen3:8b", 4.9),
        ("Qwen/Qwen3-0.6B-GGUF:Q8_0", 0.64),
        ("llama-3.1-70B-Instruct-Q4_K_M.gguf", 42.9),
        ("llama3.2-1b-f16", 2.0),
        ("mixtral-8x7b", 34.3),
        ("gemma-3-270m-it-q8_0", 0.29),
        ("gpt-oss-20b-mxfp4", 10.75),
        ("bge-m3", None),
        ("gpt-4", None),
        ("model-0b", None),
        ("x99999b", None),
        ("", None),
    ],
)
def test_size_follows_from_parameters_and_bits(
    name: str, gigabytes: float | None
) -> None:
    size = estimated_size(name)

    if gigabytes is None:
        assert size is None
    else:
        assert size == pytest.approx(gigabytes * 1e9, rel=0.03)


def test_long_name_is_read_in_part() -> None:
    assert estimated_size("x" * 1_000_000 + "-8b") is None
