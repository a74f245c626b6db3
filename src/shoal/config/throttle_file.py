"""The file with the throttle that the owner of this machine last set.

``shoal throttle`` writes it and running workers read it.  A file needs no port and no
permissions of its own, works on every platform, and is still there after a restart.
"""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from shoal.config.private_files import FOLDER_MODE
from shoal.domain.errors import ConfigError
from shoal.domain.worker import THROTTLE_MAX

FILE = "throttle"
TEXT_MAX = 16  # characters that are read of the file


def check_throttle(percent: int) -> int:
    """Return the percentage; raises ConfigError unless it is from 0 to 100."""
    if not 0 <= percent <= THROTTLE_MAX:
        raise ConfigError(f"throttle {percent}: expected 0 to {THROTTLE_MAX} percent")
    return percent


class ThrottleFile:
    """The throttle in a data folder, for all workers that use the folder."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        self._seen = self._version()

    def write(self, percent: int) -> None:
        """Set the throttle of all workers, also of those that start later.

        Raises ConfigError unless it is from 0 to 100, and OSError.
        """
        check_throttle(percent)
        folder = self._file.parent
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        # Atomic: a reader never sees half a number.
        number, name = tempfile.mkstemp(prefix=f".{FILE}.", dir=folder)
        try:
            with open(number, "w") as new:
                new.write(f"{percent}\n")
            os.replace(name, self._file)
        finally:
            Path(name).unlink(missing_ok=True)

    def read(self) -> int | None:
        """Return the throttle; None if none was set, or the file is damaged."""
        with suppress(OSError, ValueError), self._file.open() as kept:
            percent = int(kept.read(TEXT_MAX))
            if 0 <= percent <= THROTTLE_MAX:
                return percent
        return None

    def poll(self) -> int | None:
        """Return the throttle if it was written since the last call, else None.

        The first call counts from the creation of this object.
        """
        version = self._version()
        if version == self._seen:
            return None
        self._seen = version
        return self.read()

    def _version(self) -> tuple[int, int] | None:
        """Return what differs after each ``write``; None without a file."""
        try:
            status = self._file.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino
