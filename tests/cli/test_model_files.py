"""Which file or name stands for a model that people name."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from live.programs import TINY, GatedModel
from shoal.cli.use.models import pull as model_files
from shoal.cli.use.models.pull import find_pulled, resolve_model, served_models
from shoal.engines import local_servers
from shoal.engines.local_servers import ServerLocation
from shoal.models.model_hub import HubName


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, as the only folder of models, on a machine without servers."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    monkeypatch.setattr(local_servers, "server_locations", tuple)
    return tmp_path / "hub"


@pytest.fixture
def server(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedModel]:
    """A server that has the model `tiny`."""
    model = GatedModel(pause=0)
    there = (ServerLocation(model.port, "one"),)
    monkeypatch.setattr(local_servers, "server_locations", lambda: there)
    yield model
    model.close()


def test_a_file_is_named_by_its_stem(cache: Path) -> None:
    chosen = resolve_model(str(TINY), cache, yes=False)

    assert chosen == f"tiny={TINY}"


@pytest.mark.parametrize("name", ["qwen3:8b", "qwen*", "mine=/models/mine.gguf"])
def test_other_names_are_those_of_engines(cache: Path, name: str) -> None:
    assert resolve_model(name, cache, yes=False) == name


def pulled(cache: Path, *quantizations: str) -> Path:
    """Put a model into the cache; return the folder of its files."""
    snapshot = cache / "models--org--Tiny-GGUF" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for quantization in quantizations:
        (snapshot / f"tiny-{quantization}.gguf").write_bytes(b"GGUF")
    return snapshot


@pytest.mark.parametrize("wish", ["F16", "f16", "tiny-F16.gguf"])
def test_a_model_that_was_pulled_is_found_by_its_quantization(
    cache: Path, wish: str
) -> None:
    snapshot = pulled(cache, "BF16", "F16", "Q4_K_M")

    found = resolve_model(f"org/Tiny-GGUF:{wish}", cache, yes=False)

    assert found == f"tiny={snapshot / 'tiny-F16.gguf'}"


def test_of_what_was_pulled_the_one_is_taken_that_would_be_pulled(cache: Path) -> None:
    snapshot = pulled(cache, "F16", "IQ4_XS", "Q4_K_M")

    found = resolve_model("org/Tiny-GGUF", cache, yes=False)

    assert found == f"tiny={snapshot / 'tiny-Q4_K_M.gguf'}"


def test_a_model_with_a_missing_part_is_not_there(cache: Path) -> None:
    pulled(cache, "Q4_K_M-00001-of-00002")

    assert find_pulled(HubName("org/Tiny-GGUF"), cache) is None


def test_the_smallest_of_what_was_pulled_is_taken_if_none_fits(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = pulled(cache, "F16", "Q8_0")
    (snapshot / "tiny-F16.gguf").write_bytes(b"GGUF, and more")
    monkeypatch.setattr(model_files, "largest_model", lambda: 3)

    found = resolve_model("org/Tiny-GGUF", cache, yes=False)

    assert found == f"tiny={snapshot / 'tiny-Q8_0.gguf'}"


def test_models_of_servers_are_listed(server: GatedModel) -> None:
    assert served_models() == {"tiny"}
