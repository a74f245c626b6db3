"""The file by which commands find the coordinator of this machine."""

from pathlib import Path

import pytest

from shoal.config.runtime_file import URL_FILE, local_url, publish_url


@pytest.mark.parametrize(
    ("host", "secure", "url"),
    [
        ("127.0.0.1", False, "http://127.0.0.1:7"),
        ("0.0.0.0", True, "https://127.0.0.1:7"),
        ("::", False, "http://[::1]:7"),
        ("fe80::1", False, "http://[fe80::1]:7"),
        ("192.168.1.10", False, "http://192.168.1.10:7"),
    ],
)
def test_url_exists_while_the_coordinator_runs(
    tmp_path: Path, host: str, secure: bool, url: str
) -> None:
    with publish_url(tmp_path, host, 7, secure=secure):
        assert local_url(tmp_path) == url
        assert (tmp_path / URL_FILE).stat().st_mode & 0o777 == 0o600

    assert local_url(tmp_path) == "http://127.0.0.1:4010"
    assert not (tmp_path / URL_FILE).exists()


@pytest.mark.parametrize("kept", [b"", b"ftp://pool", b"\xff\xfe"])
def test_file_without_a_url_is_ignored(tmp_path: Path, kept: bytes) -> None:
    (tmp_path / URL_FILE).write_bytes(kept)

    assert local_url(tmp_path) == "http://127.0.0.1:4010"
