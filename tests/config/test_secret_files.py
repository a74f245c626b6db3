import stat
import subprocess
import sys
from pathlib import Path

import pytest

from harness.synced import needs_folder_sync, synced_files
from shoal.config.secret_files import (
    CERTIFICATE_FILE,
    KEY_FILE,
    SEED_FILE,
    TOKEN_FILE,
    first_key,
    first_token,
    new_secret,
    signing_seed,
    store_certificate,
)
from shoal.domain.credentials import with_fingerprint
from shoal.domain.errors import ConfigError


def test_secrets_are_created_once(tmp_path: Path) -> None:
    assert first_key(tmp_path, "") == first_key(tmp_path, "")
    assert first_token(tmp_path, None) == first_token(tmp_path, None)
    assert first_key(tmp_path, "").startswith("sk-shoal-")


@needs_folder_sync
def test_signing_key_and_its_name_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = synced_files(monkeypatch)

    signing_seed(tmp_path)

    assert synced == {SEED_FILE}


def test_secrets_are_readable_by_the_owner_only(tmp_path: Path) -> None:
    first_key(tmp_path, "")
    first_token(tmp_path, None)
    store_certificate(tmp_path, "pem")

    for name in (KEY_FILE, TOKEN_FILE, CERTIFICATE_FILE):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_configured_token_is_used_even_if_empty(tmp_path: Path) -> None:
    assert first_token(tmp_path, "mine") == "mine"
    assert first_token(tmp_path, "") == ""
    assert not (tmp_path / TOKEN_FILE).exists()


def test_first_key_has_no_fingerprint(tmp_path: Path) -> None:
    pinned = with_fingerprint("sk-mine", bytes(32))

    assert first_key(tmp_path, pinned) == "sk-mine"
    assert first_token(tmp_path, pinned) == "sk-mine"


def test_empty_file_is_not_a_secret(tmp_path: Path) -> None:
    (tmp_path / KEY_FILE).touch()

    with pytest.raises(ConfigError, match="api-key is empty: delete it"):
        first_key(tmp_path, "")


@pytest.mark.parametrize("key", ["two words", "é", "a\nb", "\x7f"])
def test_key_that_fits_no_header_is_rejected(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="--api-key: expected printable ASCII"):
        first_key(tmp_path, key)

    assert not (tmp_path / KEY_FILE).exists()


def test_certificate_file_is_removed_without_a_certificate(tmp_path: Path) -> None:
    store_certificate(tmp_path, "pem")
    store_certificate(tmp_path, None)
    store_certificate(tmp_path, None)

    assert not (tmp_path / CERTIFICATE_FILE).exists()


def test_secrets_are_safe_on_a_command_line() -> None:
    made = {new_secret() for _ in range(100)}

    assert len(made) == 100
    assert all(each.isalnum() and len(each) == 40 for each in made)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_secret_that_does_not_fit_on_the_disk_leaves_no_file(tmp_path: Path) -> None:
    # The limit is the process's, so it is one of its own that runs into it.
    program = f"""
import resource, signal
from pathlib import Path
from shoal.config.secret_files import first_key, first_token, signing_seed
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
folder = Path({str(tmp_path)!r})
for make in (
    lambda: first_key(folder, ""),
    lambda: first_token(folder, None),
    lambda: signing_seed(folder),
):
    try:
        make()
    except OSError as error:
        print(error.strerror)
"""

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines() == ["File too large"] * 3
    assert [*tmp_path.iterdir()] == []
