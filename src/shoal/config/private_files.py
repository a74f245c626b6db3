"""Files and folders that only their owner can read, and how they are kept and locked.

On Windows, files have the permissions of the folder that they are in, and nothing here
changes those.
"""

import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

from filelock import lock_descriptor

from shoal.domain.errors import ConfigError

FILE_MODE = 0o600
FOLDER_MODE = 0o700
OTHERS = 0o077  # permissions of the group and of all others


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to disk.  Raises OSError."""
    if sys.platform == "win32":
        return  # Windows cannot open folders
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_lock_file(file: Path) -> IO[bytes]:
    """Open a file to lock it; creates it for its owner alone.  Raises OSError."""
    return open(file, "a+b", opener=open_private)


def try_lock(file: IO[bytes]) -> bool:
    """Lock a file until it is closed; return False if another process has it."""
    with suppress(OSError):  # a file system without locks
        return lock_descriptor(file.fileno(), blocking=False)
    return False


def make_private_folder(folder: Path) -> None:
    """Create a folder, or restrict an existing one to its owner.

    Raises ConfigError if other users could read it nevertheless, OSError.
    """
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    if sys.platform == "win32":
        return
    own = f"use a folder of your own, such as {folder / 'shoal'}"
    about = folder.stat()
    if about.st_uid != os.geteuid():
        raise ConfigError(
            f"{folder} belongs to another user (uid {about.st_uid}), who could read "
            f"the keys in it: {own}"
        )
    if about.st_mode & stat.S_ISVTX:  # as of /tmp: others need it as it is
        raise ConfigError(f"{folder} is shared with other users: {own}")
    restrict(folder)
    if readable_by_others(folder):
        raise ConfigError(
            f"other users can read {folder}, and its file system does not allow "
            "changing that: use a folder on another file system"
        )


def restrict(path: Path) -> None:
    """Take all permissions from the group and from others.  Raises OSError."""
    if readable_by_others(path):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~OTHERS)


def readable_by_others(path: Path) -> bool:
    """Return whether the group or others have any permission.  Raises OSError."""
    return sys.platform != "win32" and bool(path.stat().st_mode & OTHERS)


def create_private(file: Path) -> None:
    """Create a file, or restrict an existing one to its owner.  Raises OSError.

    An existing file is not opened: closing it would end SQLite's locks of this process.
    """
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE))
    except FileExistsError:
        restrict(file)


def open_private(path: str, flags: int) -> int:
    """Open a file that only its owner can read: an opener for ``open``.

    Raises OSError, also if another user owns it.
    """
    number = os.open(path, flags, FILE_MODE)
    try:
        if sys.platform != "win32" and os.fstat(number).st_mode & OTHERS:
            os.fchmod(number, FILE_MODE)  # it existed
    except OSError:
        os.close(number)
        raise
    return number


def create_with(file: Path, text: str) -> None:
    """Create a file that only its owner can read, with a text, and sync it to disk.

    Raises FileExistsError, and OSError, as on a full disk; then there is no file.
    """
    try:
        with open(file, "x", encoding="utf-8", opener=open_private) as new:
            new.write(text)
            new.flush()
            os.fsync(new.fileno())
        sync_folder(file.parent)
    except FileExistsError:
        raise
    except OSError:
        file.unlink(missing_ok=True)
        raise


def replace_private(file: Path, text: str) -> None:
    """Replace a file that only its owner can read, and sync it to disk.

    A process that is killed leaves the old file or the new one.  Raises OSError; then
    the old one is left.
    """
    part = file.with_name(f"{file.name}.part")
    try:
        with open(part, "w", encoding="utf-8", opener=open_private) as new:
            new.write(text)
            new.flush()
            os.fsync(new.fileno())
        os.replace(part, file)
        sync_folder(file.parent)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def write_private(file: Path, text: str) -> None:
    """Write a file that only its owner can read.  Raises OSError."""
    with open(file, "w", encoding="utf-8", opener=open_private) as kept:
        kept.write(text)
