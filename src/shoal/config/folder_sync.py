"""Keeping the names of new and renamed files through a loss of power."""

import os
import sys
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to disk.  Raises OSError."""
    if sys.platform == "win32":
        return  # Windows cannot open folders
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
