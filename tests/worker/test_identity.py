"""The file that holds a worker's key."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from harness.synced import needs_folder_sync, synced_files
from shoal.domain.errors import ConfigError
from shoal.ledger.keys import Signer, verify
from shoal.worker.identity import created_at, identity_file, load_identity

posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "identities" / "otter.json"


def write_key(file: Path, content: object) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    file.chmod(0o600)
    return file


def pair(seed: bytes) -> dict[str, list[int]]:
    """Return a key pair as other programs store it."""
    public_key = Signer.from_seed(seed).public_key
    return {"publicKey": [*public_key], "secretKey": [*seed, *public_key]}


def test_key_is_created_once(file: Path) -> None:
    first, second = load_identity(file), load_identity(file)

    assert first.public_key == second.public_key
    assert verify(first.public_key, second.sign(b"said"), b"said")


@needs_folder_sync
def test_key_and_its_name_are_synced(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = synced_files(monkeypatch)

    load_identity(file)

    assert file.name in synced


def test_no_temporary_file_remains(file: Path) -> None:
    load_identity(file)

    assert os.listdir(file.parent) == [file.name]


@posix
def test_key_keeps_the_time_at_which_it_was_made(file: Path) -> None:
    assert created_at(file) is None
    load_identity(file)
    os.utime(file, (1776441600.0, 1776441600.0))

    load_identity(file)

    assert created_at(file) == 1776441600.0
    assert created_at(None) is None


def test_key_file_is_private(file: Path) -> None:
    load_identity(file)

    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@posix
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_file_readable_by_others_is_rejected(file: Path, mode: int) -> None:
    load_identity(file)
    file.chmod(mode)

    with pytest.raises(ConfigError, match=f"chmod 600 {file}"):
        load_identity(file)


def test_key_file_of_another_program_is_accepted(file: Path) -> None:
    seed = bytes(range(32))
    write_key(file, pair(seed))

    assert load_identity(file).public_key == Signer.from_seed(seed).public_key


@pytest.mark.parametrize(
    "content",
    [
        "",
        "nonsense",
        "[" * 2000,
        {},
        {"publicKey": [], "secretKey": []},
        pair(bytes(32)) | {"publicKey": [1] * 32},
        pair(bytes(32)) | {"secretKey": [0] * 64},
        pair(bytes(32)) | {"secretKey": [0] * 32},
        pair(bytes(32)) | {"secretKey": [256] * 64},
        pair(bytes(32)) | {"secretKey": "0" * 64},
        json.dumps(pair(bytes(32)))[:-1],
    ],
)
def test_damaged_file_is_rejected_and_kept(file: Path, content: object) -> None:
    write_key(file, content)
    before = file.read_text()

    with pytest.raises(ConfigError, match=r"otter\.json is damaged"):
        load_identity(file)

    assert file.read_text() == before


def test_concurrent_workers_create_one_key(file: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from shoal.worker.identity import load_identity\n"
        "print('ready', flush=True)\nsys.stdin.readline()\n"
        "print(load_identity(Path(sys.argv[1])).public_key.hex())\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, file],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    keys = {process.communicate()[0] for process in processes}

    assert keys == {load_identity(file).public_key.hex() + "\n"}


def test_error_names_an_unwritable_location(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=r"otter\.json.*--identity"):
        load_identity(tmp_path / "file" / "otter.json")


def test_folder_is_rejected_as_key_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--identity"):
        load_identity(tmp_path)


@pytest.mark.parametrize(
    "name", ["otter", "../../otter", "a/b", "", ".", "Ötter é\0", "\udc80", "a%2Fb"]
)
def test_every_name_has_its_own_file(name: str, tmp_path: Path) -> None:
    file = identity_file(name, tmp_path)

    assert file.parent == tmp_path
    assert file.resolve().parent == tmp_path.resolve()
    assert (
        load_identity(file).public_key
        != load_identity(identity_file("b", tmp_path)).public_key
    )
    assert len(os.listdir(tmp_path)) == 2


def test_overlong_file_name_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give another file with --identity"):
        load_identity(identity_file("x" * 300, tmp_path))
