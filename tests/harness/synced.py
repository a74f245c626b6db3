"""What a program syncs to the disk, as it would be found after a loss of power."""

import os
import stat
import sys

import pytest

needs_folder_sync = pytest.mark.skipif(
    sys.platform == "win32", reason="Windows cannot sync folders"
)


def synced_files(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the names of files that are synced after their contents, and of folders.

    Adds to the set from now on.
    """
    sync = os.fsync
    contents: set[int] = set()  # by inode
    synced: set[str] = set()

    def recorded(number: int) -> None:
        sync(number)
        about = os.fstat(number)
        if not stat.S_ISDIR(about.st_mode):
            contents.add(about.st_ino)
            return
        with os.scandir(number) as entries:
            synced.update(
                each.name
                for each in entries
                if each.is_dir() or each.inode() in contents
            )

    monkeypatch.setattr(os, "fsync", recorded)
    return synced
