"""The contents of clients' files on the disk."""

import os
import sys
from pathlib import Path

import pytest

from shoal.store.file_folder import FileFolder


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot sync folders")
def test_finished_file_and_its_name_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, synced = os.fsync, []

    def recorded(number: int) -> None:
        sync(number)
        synced.append((os.fstat(number).st_ino, sorted(os.listdir(tmp_path))))

    folder = FileFolder(tmp_path)
    folder.open()
    writer = folder.begin("file-a")
    writer.write(b"results")
    monkeypatch.setattr(os, "fsync", recorded)

    writer.finish()

    assert (tmp_path.stat().st_ino, ["file-a"]) in synced
    file = (tmp_path / "file-a").stat().st_ino
    assert file in [number for number, _ in synced]
    assert (tmp_path / "file-a").read_bytes() == b"results"
