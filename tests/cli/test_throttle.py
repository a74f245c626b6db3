"""``shoal throttle``: the owner's word to the workers of this machine."""

from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.config.throttle_file import ThrottleFile


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_DATA_DIR", str(tmp_path))
    return tmp_path


def run(*words: str) -> int:
    return main(["throttle", *words])


def test_the_throttle_is_set_and_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == run("0") == run() == run("40%") == run() == 0

    assert ThrottleFile(folder).read() == 40
    assert capsys.readouterr().out.splitlines() == [
        "no share was set: the workers of this machine lend 100% of their speed",
        "the workers of this machine are paused; to resume: shoal throttle 100",
        "0%",
        "the workers of this machine lend 40% of their speed",
        "40%",
    ]


@pytest.mark.parametrize("share", ["101", "abc", "12.5", "", "%"])
def test_an_impossible_share_is_refused(
    share: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(share) == 2

    assert f"from 0 to 100, got {share!r}" in capsys.readouterr().err
    assert ThrottleFile(folder).read() is None


def test_a_folder_that_cannot_be_written_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("SHOAL_DATA_DIR", str(folder / "file"))

    assert run("50") == 1

    assert "shoal throttle: the throttle cannot be stored" in capsys.readouterr().err
