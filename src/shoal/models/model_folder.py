"""The folder of a model, and how a new one takes its place.

All of it blocks on the disk: do not call it on the event loop.
"""

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from shoal.config.private_files import sync_folder, try_lock
from shoal.domain.errors import ConfigError

FILES = "files"
REPLACED = "old"  # the replaced model
LOCK = "lock"  # lock file of a download; contains the model's folder name


def check_target(target: Path, *, replace: bool) -> None:
    """Raise ConfigError if a model exists and must not be replaced."""
    if not target.exists():
        return
    if not replace:
        raise ConfigError(f"{target} exists already; give --replace to replace it")
    if target.is_dir() and any(each.is_dir() for each in target.iterdir()):
        raise ConfigError(
            f"{target} contains other models, which are not replaced: give another "
            "folder"
        )


def check_space(folder: Path, size: int) -> None:
    """Raise ConfigError if a disk has no space for so many bytes; OSError."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ConfigError(
            f"{folder} has {free} bytes free, and the model has {size}: free some "
            "space, or give another folder"
        )


def move_into_place(staged: Path, target: Path, *, replace: bool) -> None:
    """Rename the complete model in ``staged`` to its folder.

    Its files are synced, so that a crash leaves no partial model.

    Raises ConfigError if the model exists by now, OSError.
    """
    files, old = staged / FILES, staged / REPLACED
    sync_folder(files)
    target.parent.mkdir(parents=True, exist_ok=True)
    check_target(target, replace=replace)
    if target.exists():
        target.rename(old)
    try:
        files.rename(target)
    except OSError:
        restore_replaced(staged, target)
        raise
    sync_folder(target.parent)


def restore_replaced(staged: Path, target: Path) -> None:
    """Put a replaced model back: its replacement was interrupted.  Raises OSError."""
    old = staged / REPLACED
    if old.exists() and not target.exists():
        old.rename(target)


def interrupted(hidden: Path) -> Iterator[Path]:
    """Yield the models staged in a hidden folder on which no process works any more.

    What one of them was about to replace is put back first.  Raises OSError.
    """
    for lock in [*hidden.glob(f"*/{LOCK}")]:
        try:
            lock_file = lock.open("r+b")
        except OSError:
            continue  # another process creates or removes it
        with lock_file:
            if not try_lock(lock_file):
                continue
            if name := lock_file.read().decode():
                restore_replaced(lock.parent, hidden.parent / name)
        yield lock.parent


def unwritable(folder: Path, error: OSError) -> ConfigError:
    """Return why a folder cannot be written, with advice."""
    advice = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = ": free some space, or give another folder"
    return ConfigError(f"cannot write to {folder}: {error.strerror or error}{advice}")
