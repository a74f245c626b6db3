"""Trained models in the models folder."""

import json
import sys
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from engines.test_gguf_export import CONFIG, tensors
from shoal.cli.main import main
from shoal.domain.errors import ConfigError
from shoal.models.trained import add_trained_model


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), folder / "model.safetensors")
    return folder


@pytest.mark.long  # it imports PyTorch
def test_added_model_is_listed_and_can_be_replaced(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = tmp_path / "models"
    command = ["models", "add", "org/mine:1", str(trained), "--to", str(models)]

    assert main([*command, "--bytes"]) == 0
    file = models / "org" / "mine-1" / "mine-1.gguf"
    assert f"to offer it: shoal join --model org/mine:1={file}" in (
        capsys.readouterr().out
    )
    assert main([*command, "--bytes"]) == 1
    assert "exists already; give --replace" in capsys.readouterr().err
    assert main([*command, "--bytes", "--replace", "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["gguf"] == str(file)
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_a_model_that_cannot_be_written_leaves_nothing(
    trained: Path, tmp_path: Path
) -> None:
    config = {**CONFIG, "architectures": ["MambaForCausalLM"]}
    (trained / "config.json").write_text(json.dumps(config))

    with pytest.raises(ConfigError, match="names MambaForCausalLM"):
        add_trained_model(tmp_path / "models", "mine", trained)

    assert [*(tmp_path / "models").iterdir()] == []


def test_a_tokenizer_is_missing(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json.*--bytes"):
        add_trained_model(tmp_path / "models", "mine", trained)


def test_without_the_extra_a_model_that_exists_stays(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "models"
    stored = add_trained_model(models, "mine", trained, of_bytes=True)
    monkeypatch.setitem(sys.modules, "gguf", None)

    with pytest.raises(ConfigError, match=r"to write models: .*\[train\]"):
        add_trained_model(models, "mine", trained, of_bytes=True, replace=True)
    with pytest.raises(ConfigError, match=r"to write models: .*\[train\]"):
        add_trained_model(models, "other", trained, of_bytes=True)

    assert [each.name for each in models.iterdir()] == ["mine"]
    assert stored.name == "mine"
