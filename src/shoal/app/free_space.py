"""Waits until the data folder has space for a start.

A coordinator that was killed on a full disk cannot even read its database: SQLite needs
files beside it.  An exit would leave the healing to a supervisor, which gives up after
a few starts.
"""

import asyncio
import logging
import shutil
from pathlib import Path

SPACE_MIN = 16 << 20  # bytes: SQLite's files, and the leases of jobs that were open
LOOK_EVERY = 1.0  # seconds

log = logging.getLogger("shoal.app")


async def wait_for_space(
    folder: Path, stop: asyncio.Event, needed: int = SPACE_MIN
) -> None:
    """Wait until the disk of a folder has so many bytes free, or until ``stop``."""
    waits = False
    while (free := _free(folder)) < needed and not stop.is_set():
        if not waits:
            log.error(
                "not started yet: --data-dir %s: %.1f MB are free, and a start needs "
                "%.1f MB: free some space, and the start goes on by itself, or stop "
                "and give a folder on another disk",
                *(folder, free / 1e6, needed / 1e6),
            )
            waits = True
        try:
            async with asyncio.timeout(LOOK_EVERY):
                await stop.wait()
        except TimeoutError:
            continue
    if waits and not stop.is_set():
        log.warning("%.1f MB are free: starting", free / 1e6)


def _free(folder: Path) -> int:
    """Return the bytes that are free where a folder is, or will be."""
    for each in (folder, *folder.absolute().parents):
        if each.exists():
            return shutil.disk_usage(each).free
    raise AssertionError("the root exists")
