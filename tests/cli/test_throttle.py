"""``shoal throttle``: the owner's word to the workers of this machine."""

import argparse
from pathlib import Path

import pytest

from shoal.cli import throttle
from shoal.config.throttle_file import ThrottleFile
from shoal.domain.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_DATA_DIR", str(tmp_path))
    return tmp_path


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    throttle.add_arguments(parser)
    return throttle.run(parser.parse_args(words))


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
    with pytest.raises(SystemExit):
        run(share)

    assert f"from 0 to 100, got {share!r}" in capsys.readouterr().err
    assert ThrottleFile(folder).read() is None


def test_a_folder_that_cannot_be_written_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("SHOAL_DATA_DIR", str(folder / "file"))

    with pytest.raises(ConfigError, match="cannot be stored"):
        run("50")
