"""Where an incoming model is assembled: a hidden folder, renamed once complete.

All of it waits for the disk, and is not for the event loop.
"""

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from itertools import groupby
from pathlib import Path
from typing import IO

from shoal.config.file_lock import try_lock
from shoal.domain.errors import ConfigError
from shoal.models.names import model_folder_name
from shoal.models.transfer import FileWrite

INCOMING = ".incoming"  # beside the models
LOCK = "lock"  # of a folder below, held by who fills it; says where the model belongs
FILES = "files"
REPLACED = "old"  # the model that is being replaced
WRITEV_MAX = 64  # pieces that are written by one call; the system takes 1,024
SYNC_INTERVAL = (
    256 << 20
)  # bytes: a disk that takes all at the end keeps the peer waiting


class Staging:
    """A model of ``size`` bytes that is being received into ``folder``.

    ``remove`` has to follow ``begin``, whatever happens between.  ``replace`` says
    whether a model of that name that is there already is to go.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        transfer_id: str,
        size: int,
        replace: bool,
    ) -> None:
        self.target = folder / model_folder_name(model)
        self._folder = folder
        self._model = model
        self._own = folder / INCOMING / transfer_id
        self._size = size
        self._replace = replace
        self._open: tuple[str, IO[bytes]] | None = None
        self._unsynced = 0  # bytes of the open file
        self._held = ExitStack()

    def begin(self) -> None:
        """Make room for the model, and hold it.

        What a process that was killed left behind is removed.

        Raises ConfigError if the model is there already and not to be replaced, if
        there is too little room, or the disk does not let us.
        """
        self._check_target()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _sweep(self._folder)
            free = shutil.disk_usage(self._folder).free
            if self._size > free:
                raise ConfigError(
                    f"{self._folder} has room for {free} bytes, and the model has "
                    f"{self._size}: make room, or name another folder"
                )
            (self._own / FILES).mkdir(parents=True)
            held = self._held.enter_context((self._own / LOCK).open("wb", buffering=0))
            try_lock(held)
            held.write(model_folder_name(self._model).encode())
        except OSError as error:
            raise _unwritable(self._folder, error) from error

    def write(self, writes: Iterable[FileWrite]) -> None:
        """Write pieces, in order, each to the end of its file.

        Raises ConfigError if the disk does not take them.
        """
        try:
            for _, group in groupby(writes, lambda each: each.file_name):
                pieces = [*group]
                stream = self._file(pieces[0])
                self._unsynced += _append(stream, [each.data for each in pieces])
                if self._unsynced >= SYNC_INTERVAL:
                    self._sync_file(stream)
        except OSError as error:
            raise _unwritable(self._folder, error) from error

    def commit(self) -> Path:
        """Put the whole model where it belongs; return where that is.

        It is on the disk before it is there under its name, so that no crash leaves a
        half one.

        Raises ConfigError if the disk does not let us, or another has come before us.
        """
        try:
            self._close_file()
            _sync(self._own / FILES)
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._check_target()
            self._swap()
            _sync(self.target.parent)
        except OSError as error:
            raise _unwritable(self._folder, error) from error
        return self.target

    def remove(self) -> None:
        """Remove what was not committed.  Safe to call at any time."""
        if self._open is not None:
            with suppress(OSError):
                self._open[1].close()
            self._open = None
        # Closed before it is removed, which Windows asks for.
        self._held.close()
        shutil.rmtree(self._own, ignore_errors=True)
        with suppress(OSError):  # others are being received
            (self._folder / INCOMING).rmdir()

    def _check_target(self) -> None:
        if not self.target.exists():
            return
        if not self._replace:
            raise ConfigError(f"{self.target} is there already; --replace gets it anew")
        if self.target.is_dir() and any(
            each.is_dir() for each in self.target.iterdir()
        ):
            raise ConfigError(
                f"{self.target} has other models in it, which are not replaced: name "
                "another folder"
            )

    def _swap(self) -> None:
        old = self._own / REPLACED
        if self.target.exists():
            self.target.rename(old)
        try:
            (self._own / FILES).rename(self.target)
        except OSError:
            if old.exists():
                old.rename(self.target)
            raise

    def _file(self, write: FileWrite) -> IO[bytes]:
        if self._open is None or self._open[0] != write.file_name:
            self._close_file()
            path = self._own / FILES / write.file_name
            # What is new must not follow a link, and what goes on must be there.
            mode = "xb" if write.offset == 0 else "r+b"
            stream = path.open(mode, buffering=0)
            stream.seek(write.offset)
            self._open = (write.file_name, stream)
        return self._open[1]

    def _close_file(self) -> None:
        if self._open is not None:
            _, stream = self._open
            self._open = None
            with stream:
                self._sync_file(stream)

    def _sync_file(self, stream: IO[bytes]) -> None:
        os.fsync(stream.fileno())
        self._unsynced = 0


def _sweep(folder: Path) -> None:
    """Remove what processes left that are no more."""
    incoming = folder / INCOMING
    if not incoming.is_dir():
        return
    for each in incoming.iterdir():
        try:
            held = (each / LOCK).open("r+b")
        except OSError:
            continue  # it is being made, or unmade
        with held:
            if not try_lock(held):
                continue
            target = folder / model_folder_name(held.read().decode() or each.name)
        # It was killed after it had put one away, and before it put the new one there.
        if (each / REPLACED).exists() and not target.exists():
            (each / REPLACED).rename(target)
        shutil.rmtree(each, ignore_errors=True)


def _append(stream: IO[bytes], pieces: Sequence[bytes]) -> int:
    """Write pieces; return how many bytes that were.

    Together, for after each write this thread has to wait for the interpreter, which
    the loop's keeps for milliseconds at a time.
    """
    size = 0
    rest = [memoryview(piece) for piece in pieces if piece]
    while rest:
        if sys.platform == "win32":
            taken = stream.write(rest[0])
        else:
            taken = os.writev(stream.fileno(), rest[:WRITEV_MAX])
        size += taken
        while rest and taken >= len(rest[0]):
            taken -= len(rest.pop(0))
        if taken:  # a disk that is nearly full takes a part
            rest[0] = rest[0][taken:]
    return size


def _sync(folder: Path) -> None:
    """See to it that the names in a folder are on the disk."""
    if sys.platform == "win32":
        return  # which cannot open folders
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write to {folder}: {error.strerror or error}")
