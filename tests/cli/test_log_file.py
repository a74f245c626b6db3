"""The log of a command in a file."""

import logging
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path

import pytest

from shoal.cli.log_file import OLDER, SIZE_MAX, log_to_file
from shoal.domain.errors import ConfigError

no_modes = pytest.mark.skipif(sys.platform == "win32", reason="no such permissions")


@contextmanager
def logging_to(file: Path) -> Iterator[tuple[logging.Logger, StringIO]]:
    """Log to a file within the block; gives the log and what the screen shows."""
    root = logging.getLogger()
    before, level, screen = root.handlers[:], root.level, StringIO()
    root.handlers[:] = [logging.StreamHandler(screen)]
    root.setLevel(logging.INFO)
    try:
        log_to_file(file, "info", "text")
        yield root, screen
    finally:
        for each in root.handlers:
            with suppress(OSError):  # as logging itself does at the end
                each.close()
        root.handlers[:] = before
        root.setLevel(level)


@no_modes
def test_file_has_the_log_and_the_screen_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "x.log"

    with logging_to(file) as (log, screen):
        log.info("well")
        log.warning("ill")

    assert screen.getvalue() == "ill\n"
    first, second = file.read_text().splitlines()
    assert first.endswith("INFO root well")
    assert second.endswith("WARNING root ill")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@no_modes
def test_log_is_limited_and_every_part_of_it_private(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    line = "x" * (SIZE_MAX // 2)

    with logging_to(file) as (log, _):
        for _ in range(3 * (OLDER + 2)):
            log.info(line)

    parts = sorted(tmp_path.iterdir())
    assert [each.name for each in parts] == ["x.log", "x.log.1", "x.log.2", "x.log.3"]
    assert all(each.stat().st_size <= SIZE_MAX for each in parts)
    assert {stat.S_IMODE(each.stat().st_mode) for each in parts} == {0o600}


@no_modes
def test_permissions_of_a_file_that_exists_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    file.touch(0o640)
    file.chmod(0o640)

    with logging_to(file) as (log, _):
        log.info("well")

    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert file.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_full_disk_is_told_once_and_stops_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with logging_to(Path("/dev/full")) as (log, screen):
        log.info("one")
        log.warning("two")

    told = "the log is incomplete: /dev/full: No space left on device\n"
    assert capsys.readouterr().err == told
    assert screen.getvalue() == "two\n"


def test_folder_that_does_not_exist_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"No such file.*`--log-file -` logs to"),
        logging_to(tmp_path / "none" / "x.log"),
    ):
        pass
