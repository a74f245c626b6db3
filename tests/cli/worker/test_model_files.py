"""Which file or name stands for a model that people name."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from live.programs import TINY, GatedModel
from shoal.cli.worker.model_files import resolve_model, served_models
from shoal.engines import local_servers
from shoal.engines.local_servers import ServerLocation


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


def test_a_model_that_was_pulled_is_found_by_its_quantization(cache: Path) -> None:
    snapshot = cache / "models--org--Tiny-GGUF" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for quantization in ("Q4_K_M", "Q8_0"):
        (snapshot / f"tiny-{quantization}.gguf").write_bytes(b"GGUF")

    found = resolve_model("org/Tiny-GGUF:q8_0", cache, yes=False)
    first = resolve_model("org/Tiny-GGUF", cache, yes=False)

    assert found == f"tiny={snapshot / 'tiny-Q8_0.gguf'}"
    assert first == f"tiny={snapshot / 'tiny-Q4_K_M.gguf'}"


def test_models_of_servers_are_listed(server: GatedModel) -> None:
    assert served_models() == {"tiny"}
