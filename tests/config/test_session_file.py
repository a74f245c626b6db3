"""The file of browsers' sessions: private, whole, and without a secret."""

import stat
import sys
from pathlib import Path

import pytest

from shoal.config.session_file import SessionFile
from shoal.domain.credentials import BrowserSession, digest_of

SESSIONS = [
    BrowserSession(digest_of("cookie"), digest_of("key"), 1_700_000_000.5),
    BrowserSession(digest_of("another"), digest_of("key"), 1_800_000_000.0),
]


def test_sessions_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = SessionFile(tmp_path)
    assert file.read() == []

    for sessions in (SESSIONS, SESSIONS[:1], []):
        file.write(sessions)
        assert SessionFile(tmp_path).read() == sessions

    assert [each.name for each in tmp_path.iterdir()] == [file.path.name]


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of POSIX")
def test_file_is_private_and_has_no_secret(tmp_path: Path) -> None:
    file = SessionFile(tmp_path)

    file.write(SESSIONS)

    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert not {"cookie", "another"} & set(file.path.read_text().split('"'))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "{}x",
        '{"a": 1}',
        "[1]",
        "[{}]",
        '[{"session": "zz", "key": "", "expires_at": 1}]',
        '[{"session": 1, "key": "", "expires_at": 1}]',
        "[" * 100_000,
        "\xff",
    ],
)
def test_damaged_file_is_an_error(tmp_path: Path, text: str) -> None:
    file = SessionFile(tmp_path)
    file.path.write_text(text, "latin-1")

    with pytest.raises(ValueError):  # noqa: PT011  # of several parsers
        file.read()
