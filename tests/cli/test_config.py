"""``shoal config``: what applies, and where it comes from."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.app.fleet_files import FILE, save_fleet
from shoal.cli.main import main
from shoal.client.coordinator import find_coordinator
from shoal.config.loader import USER_FILE
from shoal.config.secret_files import KEY_FILE
from shoal.protocols import discover
from shoal.protocols.macfleet.addresses import FLEETS

SECRET = "9f2c71d4e8a6b03597c1d5e2"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "shoal.toml"
    data = json.dumps(str(tmp_path / "data"))
    file.write_text(f'[serve]\nport = 5\ndata_dir = {data}\n[join]\ntoken = "{SECRET}"')
    file.chmod(0o600)
    return file


def settings(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return what is shown, by section and name."""
    assert main(["config", "show", "--json", *arguments]) == 0
    shown = json.loads(capsys.readouterr().out)["settings"]
    return {f"{each['section']}.{each['name']}": each for each in shown}


def test_each_setting_is_shown_with_its_source(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_QUEUE_MAX", "7")
    monkeypatch.setenv("SHOAL_TEALENET_PEERS", "a:1,b:2")
    monkeypatch.setenv("SHOAL_PORT", "6")

    shown = settings(capsys, "--config", str(file))

    assert {name.partition(".")[0] for name in shown} == {
        *("serve", "join", "x402"),
        *discover(),
    }
    assert shown["serve.port"] == {
        "section": "serve",
        "name": "port",
        "flag": "--port",
        "variable": "SHOAL_PORT",
        "value": 6,
        "source": "SHOAL_PORT",
    }
    assert shown["tealenet.peers"]["value"] == ["a:1", "b:2"]
    assert shown["serve.data_dir"]["source"] == f"{file}: [serve] data_dir"
    assert (shown["serve.host"]["value"], shown["serve.host"]["source"]) == (
        "127.0.0.1",
        "default",
    )


def test_secrets_are_masked(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_TEALENET_PASSCODE", SECRET)
    monkeypatch.setenv("SHOAL_STORE", f"postgresql://shoal:{SECRET}@db/shoal")

    shown = settings(capsys, "--config", str(file))
    assert main(["config", "show", "--config", str(file)]) == 0

    assert SECRET not in capsys.readouterr().out + json.dumps(shown)
    assert shown["join.token"]["value"] == "********"
    assert shown["tealenet.passcode"]["value"] == "********"
    assert shown["serve.store"]["value"] == "********"
    assert shown["serve.api_key"]["value"] == ""


def test_only_what_is_set_is_shown_on_request(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", "serve", "--set", "--config", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    file.write_text("")
    assert main(["config", "show", "x402", "--set", "--config", str(file)]) == 0

    assert [line.split()[:2] for line in lines] == [
        ["SETTING", "VALUE"],
        ["serve.port", "5"],
        ["serve.data_dir", str(file.parent / "data")],
    ]
    assert capsys.readouterr().out == "all settings have their defaults\n"


def test_fleet_that_was_paired_is_the_source_of_its_token(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = file.parent / "data"
    save_fleet(folder, FLEETS, SECRET, "den")

    shown = settings(capsys, "macfleet", "--config", str(file))

    assert shown["macfleet.token"]["value"] == "********"
    assert shown["macfleet.token"]["source"] == str(folder / FILE)
    assert shown["macfleet.fleet"]["value"] == "den"
    assert shown["macfleet.open"]["source"] == "default"


def test_wrong_file_is_an_error_that_names_it(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("[server]\n")

    assert main(["config", "show", "--config", str(file)]) == 1

    assert "unknown table [server]" in capsys.readouterr().err


def test_paths_are_printed_with_those_that_do_not_exist(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = file.parent / "data"
    monkeypatch.setenv("SHOAL_DATA_DIR", str(data))
    data.mkdir()

    assert main(["config", "path", "--config", str(file)]) == 0
    text = capsys.readouterr().out
    assert main(["config", "path", "--config", str(file), "--json"]) == 0
    paths = json.loads(capsys.readouterr().out)

    assert (
        f"config  {file}\ndata    {data}\nlog     {data / 'serve.log'}  (does" in text
    )
    assert paths["config"] == [str(file)]
    assert (paths["data"], paths["clients"]) == ([str(data)], [])
    assert str(data / "models") in paths["models"]


def test_data_folder_of_the_settings_is_that_of_all_commands(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shoal.config.USER_FILE", file)
    folder = file.parent / "data"

    assert main(["status"]) == 1

    assert f"({folder / KEY_FILE}: No such file" in capsys.readouterr().err


def test_clients_read_no_other_setting_of_a_server(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.config.USER_FILE", file)
    monkeypatch.setenv("SHOAL_PORT", "8000x")
    file.write_text(file.read_text().replace("port = 5", "of_a_newer_release = 5"))

    found = find_coordinator("http://127.0.0.1:1", "sk-x")

    assert found.url == "http://127.0.0.1:1"


def test_data_folder_of_other_commands_may_be_another(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--config", str(file), "--data-dir", str(file.parent / "mine"), "--json"]

    assert main(["config", "path", *flags]) == 0

    paths = json.loads(capsys.readouterr().out)
    assert paths["data"] == [str(file.parent / "data")]
    assert paths["clients"] == [str(file.parent / "mine")]


def test_default_file_may_be_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "path", "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["config"] == [str(USER_FILE)]
