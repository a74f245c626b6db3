"""Which file of a repository fits a machine."""

import pytest

from shoal.domain.errors import ConfigError
from shoal.models.names import HubFile, choose_model, gguf_models

GB = 1_000_000_000


def files(**sizes: float) -> list[HubFile]:
    """Return the files of a model, by quantization and size in GB."""
    return [
        HubFile(f"Model-7B-{name}.gguf", int(size * GB)) for name, size in sizes.items()
    ]


MODEL = files(Q2_K=2.5, Q3_K_M=3.3, Q4_0=3.8, Q4_K_M=4.1, Q5_K_M=4.8, Q8_0=7.2, F16=14)


@pytest.mark.parametrize(
    ("memory", "wanted", "chosen"),
    [
        (None, "", "Q4_K_M"),
        (64, "", "Q4_K_M"),
        (4.0, "", "Q4_0"),
        (3.5, "", "Q3_K_M"),
        (2.6, "", "Q2_K"),
        (1.0, "q8_0", "Q8_0"),
        (1.0, "model-7b-f16.GGUF", "F16"),
    ],
)
def test_the_largest_of_four_bits_or_less_that_fits_is_chosen(
    memory: float | None, wanted: str, chosen: str
) -> None:
    room = None if memory is None else int(memory * GB)

    assert choose_model(gguf_models(MODEL), room, wanted).quantization == chosen


def test_a_small_model_has_eight_bits() -> None:
    small = files(Q4_K_M=0.1, Q8_0=0.15, F16=0.27)

    assert choose_model(gguf_models(small), GB).quantization == "Q8_0"
    assert choose_model(gguf_models(small), GB // 8).quantization == "Q4_K_M"


def test_models_of_other_quantizations_are_chosen_by_size() -> None:
    other = files(Q5_K_M=4.8, F16=14)

    assert choose_model(gguf_models(other), 9 * GB).quantization == "Q5_K_M"


def test_nothing_that_fits_is_an_error_with_the_sizes() -> None:
    with pytest.raises(ConfigError, match=r"up to 1.0 GB .* Q2_K \(2.5 GB\), Q3"):
        choose_model(gguf_models(MODEL), GB)
    with pytest.raises(ConfigError, match=r"no quantization Q9; there are: Q2_K"):
        choose_model(gguf_models(MODEL), GB, "Q9")


def test_what_quantizations_were_made_with_is_no_model() -> None:
    matrix = HubFile("Model-7B-imatrix.gguf", 5_000_000)

    with pytest.raises(ConfigError, match="no quantization fits"):
        choose_model(gguf_models([*MODEL, matrix]), GB)
    assert choose_model(gguf_models([matrix]), GB).files == (matrix,)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("a-Q4_K_M.gguf", "Q4_K_M"),
        ("a.q4_k_m.gguf", "Q4_K_M"),
        ("Q4_K_M/a-00001-of-00001.gguf", "Q4_K_M"),
        ("a-UD-Q2_K_XL.gguf", "UD-Q2_K_XL"),
        ("a-IQ3_XXS.gguf", "IQ3_XXS"),
        ("a-mxfp4.gguf", "MXFP4"),
        ("a-MXFP4_MOE.gguf", "MXFP4_MOE"),
        ("a-NVFP4.gguf", "NVFP4"),
        ("BF16/a.gguf", "BF16"),
        ("a-7b-chat.gguf", ""),
    ],
)
def test_quantizations_are_read_from_names(name: str, quantization: str) -> None:
    (model,) = gguf_models([HubFile(name, 1)])

    assert model.quantization == quantization


def test_parts_are_one_model() -> None:
    parts = [HubFile(f"a-Q8_0-{n:05}-of-00002.gguf", 5) for n in (2, 1)]
    lost = HubFile("b-Q8_0-00001-of-00003.gguf", 1)

    (model,) = gguf_models([*parts, HubFile("README.md", 1), lost])

    assert model.size == 10
    assert model.files[0].name == "a-Q8_0-00001-of-00002.gguf"


def test_models_have_the_projector_of_their_folder() -> None:
    names = ("a-Q4_0", "a-Q8_0", "mmproj-F16", "mmproj-F32", "BF16/a-BF16", "x/mmproj")
    found = [HubFile(f"{name}.gguf", size) for size, name in enumerate(names, start=1)]

    four, bf16, eight = gguf_models(found)

    assert [each.name for each in four.files] == ["a-Q4_0.gguf", "mmproj-F16.gguf"]
    assert [each.name for each in eight.files] == ["a-Q8_0.gguf", "mmproj-F16.gguf"]
    assert [each.name for each in bf16.files] == ["BF16/a-BF16.gguf"]
    assert four.size == 1 + 3
