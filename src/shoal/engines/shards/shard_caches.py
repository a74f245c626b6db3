"""The layers that shards keep on disk, so that a model need not be sent again.

Each model has a folder of its own in one that has nothing else.  What is in it was
written by code that its client may have chosen: names, links and sizes prove nothing.
"""

import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path


def trim_caches(folder: Path, most: int, kept: Collection[Path] = ()) -> None:
    """Remove the caches used longest ago, until all take at most so many bytes.

    Those that are ``kept`` count as used now.  A shard that runs misses nothing: it
    reads its cache only while layers are loaded.  What cannot be removed stays.
    """
    for each in kept:
        if each.is_dir():
            os.utime(each)
    caches = [each for each in _entries(folder) if each.is_dir(follow_symlinks=False)]
    caches.sort(key=lambda each: each.stat(follow_symlinks=False).st_mtime_ns)
    sizes = {each.path: _size_of(each.path) for each in caches}
    left = sum(sizes.values())
    for path, size in sizes.items():
        if left <= most:
            break
        if Path(path) not in kept or size > most:
            # It follows no links, not even those that are made meanwhile.
            with suppress(RecursionError):  # thousands of folders, one in another
                shutil.rmtree(path, ignore_errors=True)
            left -= size


def _size_of(folder: str) -> int:
    """Return the bytes that files take on disk; links count as what they are."""
    size, folders = 0, [folder]
    while folders:
        for each in _entries(folders.pop()):
            if each.is_dir(follow_symlinks=False):
                folders.append(each.path)
                continue
            with suppress(FileNotFoundError):
                status = each.stat(follow_symlinks=False)
                # A file may have holes; Windows does not say.
                blocks = getattr(status, "st_blocks", None)
                size += status.st_size if blocks is None else 512 * blocks
    return size


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []  # it is not there, or not readable
