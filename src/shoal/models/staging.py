"""An incoming model of a peer of another program: its chunks, and its files.

``IncomingModel`` validates the chunks; peers may be hostile.  They send each file from
beginning to end, the files in any order, and drop empty ones.  ``Staging`` assembles
the files in a hidden folder, which is renamed once complete: it blocks on the disk, so
do not call it on the event loop.
"""

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import IO

from shoal.config.private_files import try_lock
from shoal.domain.errors import InvalidRequest, LimitExceeded, PeerError
from shoal.domain.model_messages import ModelChunk, ModelDone
from shoal.models.model_folder import (
    FILES,
    LOCK,
    check_space,
    check_target,
    interrupted,
    move_into_place,
    unwritable,
)
from shoal.models.names import check_file_name, model_folder_name

UNANNOUNCED_MAX = 100 * 10**9  # bytes of a model whose size was not announced
FILES_MAX = 1000  # of one model


@dataclass(frozen=True, slots=True)
class FileWrite:
    """Append ``data`` to a file, which is new if ``offset`` is 0."""

    file_name: str
    offset: int
    data: bytes


@dataclass(slots=True)
class IncomingModel:
    """One model, requested from one peer.

    ``size`` is the announced one in bytes; None if there was none: then at most
    ``unannounced_max`` are accepted.
    """

    transfer_id: str
    model: str
    size: int | None
    unannounced_max: int = UNANNOUNCED_MAX
    received: int = 0  # bytes
    _offsets: dict[str, int] = field(default_factory=dict)  # the end of each file
    _spellings: dict[str, str] = field(default_factory=dict)  # by name in lower case

    @property
    def files(self) -> int:
        """The number of files begun."""
        return len(self._offsets)

    def belongs(self, message: ModelChunk | ModelDone) -> bool:
        """Return whether a message belongs to this transfer."""
        # Some peers change the case of the id.
        return message.transfer_id.lower() == self.transfer_id.lower()

    def add_chunk(self, chunk: ModelChunk) -> FileWrite:
        """Validate a chunk; return where to write it.

        Raises PeerError for an unsafe name, a gap, a repetition or too much data of a
        model without a size, and LimitExceeded past the announced size.
        """
        name = self._name(chunk.file_name)
        expected = self._offsets.get(name, 0)
        if chunk.offset != expected:
            raise PeerError(f"{name}: chunk at {chunk.offset}, expected {expected}")
        if not chunk.data and name in self._offsets:
            raise PeerError(f"{name}: an empty chunk at {expected}")
        received = self.received + len(chunk.data)
        if self.size is not None and received > self.size:
            raise LimitExceeded(f"model {self.model}", received, self.size)
        if self.size is None and received > self.unannounced_max:
            raise PeerError(
                f"the peer did not announce the size of {self.model}, and sends more "
                f"than {self.unannounced_max / 1e9:g} GB: if the model is larger, "
                "raise --unannounced-max"
            )
        self.received = received
        self._offsets[name] = expected + len(chunk.data)
        self._spellings[name.lower()] = name
        return FileWrite(name, expected, chunk.data)

    def complete(self, done: ModelDone) -> None:
        """Validate that the model is complete.

        The announced size is exact, except for models with folders, whose transfer
        ends before it is complete.

        Raises PeerError if data is missing, or the message names another model.
        """
        if done.model != self.model:
            raise PeerError(f"completion of {done.model!a}; expected {self.model}")
        if not self._offsets:
            raise PeerError(f"completion of {self.model} without any file")
        if self.size is not None and self.received != self.size:
            raise PeerError(
                f"{self.model} ended after {self.received} of {self.size} bytes"
            )

    def _name(self, file_name: str) -> str:
        try:
            name = check_file_name(file_name)
        except InvalidRequest as error:
            raise PeerError(str(error)) from error
        if name not in self._offsets:
            # Case-insensitive file systems would merge them.
            if (other := self._spellings.get(name.lower())) is not None:
                raise PeerError(f"{name} differs from {other} only in case")
            if len(self._offsets) >= FILES_MAX:
                raise PeerError(f"{self.model} has more than {FILES_MAX} files")
        return name


INCOMING = ".incoming"  # hidden folder beside the models
WRITEV_MAX = 64  # pieces of one writev call; the system's limit is 1,024
SYNC_INTERVAL = 256 << 20  # bytes; one sync at the end would stall the peer


class Staging:
    """A model of ``size`` bytes, on its way into ``folder``.

    The caller must call ``remove`` after ``begin``, in any case.  ``replace`` permits
    the replacement of an existing model.
    """

    def __init__(
        self, folder: Path, model: str, transfer_id: str, size: int, replace: bool
    ) -> None:
        self.target = folder / model_folder_name(model)
        self._folder = folder
        self._model = model
        self._staging_folder = folder / INCOMING / transfer_id
        self._size = size
        self._replace = replace
        self._open: tuple[str, IO[bytes]] | None = None
        self._unsynced = 0  # bytes of the open file
        self._lock = ExitStack()

    def begin(self) -> None:
        """Create and lock the staging folder.

        Removes the leftovers of killed processes.

        Raises ConfigError if the model exists and must not be replaced, the disk is
        too full, or the folder is not writable.
        """
        check_target(self.target, replace=self._replace)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for leftover in interrupted(self._folder / INCOMING):
                shutil.rmtree(leftover, ignore_errors=True)
            check_space(self._folder, self._size)
            (self._staging_folder / FILES).mkdir(parents=True)
            lock_file = self._lock.enter_context(
                (self._staging_folder / LOCK).open("wb", buffering=0)
            )
            try_lock(lock_file)
            lock_file.write(model_folder_name(self._model).encode())
        except OSError as error:
            raise unwritable(self._folder, error) from error

    def write(self, writes: Iterable[FileWrite]) -> None:
        """Write pieces, in order, each to the end of its file.

        Raises ConfigError if the disk fails or is full.
        """
        try:
            for _, group in groupby(writes, lambda each: each.file_name):
                pieces = [*group]
                stream = self._file(pieces[0])
                self._unsynced += _append(stream, [each.data for each in pieces])
                if self._unsynced >= SYNC_INTERVAL:
                    self._sync_file(stream)
        except OSError as error:
            raise unwritable(self._folder, error) from error

    def commit(self) -> Path:
        """Move the complete model to its folder; return that.

        Syncs the files first, so that a crash leaves no partial model.

        Raises ConfigError if the disk fails, or the model exists by now.
        """
        try:
            self._close_file()
            move_into_place(self._staging_folder, self.target, replace=self._replace)
        except OSError as error:
            raise unwritable(self._folder, error) from error
        return self.target

    def remove(self) -> None:
        """Remove what was not committed.  Safe to call at any time."""
        if self._open is not None:
            with suppress(OSError):
                self._open[1].close()
            self._open = None
        # Windows cannot remove an open file.
        self._lock.close()
        shutil.rmtree(self._staging_folder, ignore_errors=True)
        with suppress(OSError):  # other downloads use it
            (self._folder / INCOMING).rmdir()

    def _file(self, write: FileWrite) -> IO[bytes]:
        if self._open is None or self._open[0] != write.file_name:
            self._close_file()
            path = self._staging_folder / FILES / write.file_name
            # A new file must not follow a link, and a begun one must exist.
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


def _append(stream: IO[bytes], pieces: Sequence[bytes]) -> int:
    """Write pieces; return the number of bytes.

    In one call: after each, this thread waits milliseconds for the interpreter lock.
    """
    size = 0
    unwritten = [memoryview(piece) for piece in pieces if piece]
    while unwritten:
        if sys.platform == "win32":
            written = stream.write(unwritten[0])
        else:
            written = os.writev(stream.fileno(), unwritten[:WRITEV_MAX])
        size += written
        while unwritten and written >= len(unwritten[0]):
            written -= len(unwritten.pop(0))
        if written:  # a partial write on a nearly full disk
            unwritten[0] = unwritten[0][written:]
    return size
