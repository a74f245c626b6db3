"""Fixtures with shards."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from engines.shards import fake_rpc_server


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a fake rpc-server, which is a Python program."""
    folder = tmp_path / "programs"
    folder.mkdir()
    shutil.copy(fake_rpc_server.__file__, folder / "fake.py")
    write_program(
        folder / "rpc-server",
        f'exec "{os.path.realpath(sys.executable)}" -I -S "{folder}/fake.py" "$@"',
    )
    # Shards may read where libraries are: here, those of Python.
    monkeypatch.setenv("LD_LIBRARY_PATH", sys.base_prefix)
    return folder


def write_program(path: Path, command: str) -> None:
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)
