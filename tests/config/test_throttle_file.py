"""The file by which the owner changes the throttle of running workers."""

from pathlib import Path

import pytest

from shoal.config.throttle_file import FILE, ThrottleFile
from shoal.domain.errors import ConfigError


def test_each_write_is_noticed_once(tmp_path: Path) -> None:
    folder = tmp_path / "data"  # created by the first write
    owner, worker = ThrottleFile(folder), ThrottleFile(folder)
    assert (worker.read(), worker.poll()) == (None, None)

    for percent in (0, 100, 100, 37):
        owner.write(percent)
        assert worker.poll() == percent
        assert worker.poll() is None

    assert worker.read() == 37
    assert [each.name for each in folder.iterdir()] == [FILE]


def test_what_was_written_before_the_start_is_read_but_no_change(
    tmp_path: Path,
) -> None:
    ThrottleFile(tmp_path).write(20)

    worker = ThrottleFile(tmp_path)

    assert worker.poll() is None
    assert worker.read() == 20


@pytest.mark.parametrize("percent", [-1, 101, 2**40])
def test_other_numbers_are_refused(tmp_path: Path, percent: int) -> None:
    with pytest.raises(ConfigError, match="expected 0 to 100 percent"):
        ThrottleFile(tmp_path).write(percent)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"half", b"\xff\xfe", b"101\n", b"-1\n"])
def test_a_damaged_file_is_no_throttle(tmp_path: Path, content: bytes) -> None:
    worker = ThrottleFile(tmp_path)

    (tmp_path / FILE).write_bytes(content)

    assert worker.poll() is None
    assert worker.read() is None
