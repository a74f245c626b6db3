"""The key that signs the log of receipts, earlier keys, and the last published state.

One key signs one history.  A database that was restored from a copy lacks the newest
receipts; if the same key signed further ones, there would be two logs of one size.  So
the newest checkpoint that was published (*shown*) is stored beside the key, and a
database without it is refused.  Decision 52 says when it is written.
"""

import asyncio
from itertools import chain
from pathlib import Path

import msgspec

from shoal.config.private_files import replace_private, restrict
from shoal.config.secret_files import (
    SEED_FILE,
    SIGNING_LOG_FILE,
    new_signing_seed,
    signing_seed,
)
from shoal.domain.errors import StoreBroken
from shoal.ledger import checkpoint
from shoal.ledger.keys import Signer
from shoal.store.blobs import disk_error
from shoal.store.ledger import LedgerStore, LogHead
from shoal.store.run_to_end import run_to_end


class KeyLink(msgspec.Struct, frozen=True):
    """The change from one key to the next: checkpoints of one size and root.

    ``checkpoint`` is signed by the earlier key, ``successor`` by the next one; None:
    not signed yet.
    """

    checkpoint: str
    successor: str | None = None


class _Record(msgspec.Struct):
    """The contents of the file.

    ``shown`` is the newest checkpoint that was published, ``retired`` the seeds of
    earlier keys in hexadecimal.
    """

    shown: str | None = None
    retired: list[str] = msgspec.field(default_factory=list)
    links: list[KeyLink] = msgspec.field(default_factory=list)


class SigningKeys:
    """The keys of the log in a data folder."""

    def __init__(
        self, signer: Signer, record: _Record | None = None, file: Path | None = None
    ) -> None:
        """``file`` stores the ``record``; None: it is not stored."""
        self.signer = signer
        self._record = record or _Record()
        self._file = file
        self._writing = asyncio.Lock()

    @property
    def links(self) -> list[KeyLink]:
        """The changes of the key, the oldest first."""
        return self._record.links

    def signer_of(self, note: str) -> Signer | None:
        """Return the key that has signed a checkpoint; None if it is gone."""
        retired = (Signer.from_seed(bytes.fromhex(x)) for x in self._record.retired)
        name = checkpoint.origin_of(note)
        return next(
            (
                each
                for each in chain((self.signer,), retired)
                if checkpoint.name_of(each.public_key) == name
            ),
            None,
        )

    def successor_of(self, note: str) -> str | None:
        """Return the checkpoint with which the next key continued this one, if any."""
        return next(
            (
                each.successor
                for each in reversed(self.links)
                if each.checkpoint == note
            ),
            None,
        )

    async def problem(self, ledger: LedgerStore) -> str | None:
        """Return why the key has not signed this database's log; None: it has.

        Raises StoreError.
        """
        if (shown := self._shown) is None:
            return None
        head, at = await ledger.head(), await ledger.head(shown.size)
        size = 0 if head is None else head.size
        return history_problem(shown, size, None if at is None else at.root)

    async def show(self, head: LogHead | None) -> None:
        """Record a checkpoint before it is published.

        Raises StoreError; then it must not be published.
        """
        if self._file is None or head is None or self._has_shown(head):
            return
        # Not cancelled with a request: its thread would write on beside the next one.
        await run_to_end(self._record_shown(head))

    async def _record_shown(self, head: LogHead) -> None:
        async with self._writing:
            if not self._has_shown(head):
                await asyncio.to_thread(self._write_shown, head)

    def _has_shown(self, head: LogHead) -> bool:
        shown = self._shown
        return shown is not None and head.size <= shown.size

    @property
    def _shown(self) -> checkpoint.Checkpoint | None:
        note = self._record.shown
        return None if note is None else checkpoint.read(note)

    def _write_shown(self, head: LogHead) -> None:
        assert self._file is not None, "there is a file"
        record = _Record(head.note, self._record.retired, self._record.links)
        try:
            _write(self._file, record)
        except OSError as error:
            raise disk_error(error, self._file) from error
        self._record = record


def shown_checkpoint(folder: Path) -> checkpoint.Checkpoint | None:
    """Return the newest checkpoint that was published, if there is one.

    Raises StoreBroken if the record is damaged, OSError.
    """
    note = _read(folder / SIGNING_LOG_FILE).shown
    return None if note is None else checkpoint.read(note)


def retired_seeds(record: str) -> list[str]:
    """Return the seeds of earlier keys in the contents of a record, in hexadecimal.

    Raises StoreBroken if it is damaged.
    """
    try:
        return msgspec.json.decode(record, type=_Record).retired
    except msgspec.DecodeError as error:
        raise StoreBroken(f"is damaged: {error}", SIGNING_LOG_FILE) from error


def history_problem(
    shown: checkpoint.Checkpoint, size: int, root: bytes | None
) -> str | None:
    """Return why a log of ``size`` receipts does not contain ``shown``, if so.

    ``root`` is the log's root at the size of ``shown``; None: unknown.
    """
    if size < shown.size:
        return (
            f"has {size} receipts, and its signing key has shown a log of "
            f"{shown.size}: it is older than that"
        )
    if root != shown.root:
        return (
            f"has another log of receipts than the one of {shown.size} that its "
            "signing key has shown"
        )
    return None


def has_signed(folder: Path) -> bool:
    """Return whether a data folder has a signing key, and so had a database."""
    return (folder / SEED_FILE).exists() or (folder / SIGNING_LOG_FILE).exists()


def open_keys(folder: Path, at: float) -> SigningKeys:
    """Load the keys of a data folder; replace the present one if it is retired.

    ``at`` is the Unix time.  Raises StoreBroken if the record is damaged, ConfigError
    if the key is, OSError.
    """
    file, record = folder / SIGNING_LOG_FILE, _read(folder / SIGNING_LOG_FILE)
    seed = signing_seed(folder)
    if seed.hex() in record.retired:
        seed = new_signing_seed(folder)
    signer = Signer.from_seed(seed)
    if record.links and record.links[-1].successor is None:
        note = record.links[-1].checkpoint
        begun = checkpoint.read(note)
        record.shown = checkpoint.make(signer, begun.size, begun.root, at)
        record.links[-1] = KeyLink(note, record.shown)
    name = checkpoint.name_of(signer.public_key)
    if record.shown is not None and checkpoint.origin_of(record.shown) != name:
        record.shown = None  # another key was put into the place of the one that signed
    _write(file, record)
    return SigningKeys(signer, record, file)


def begin_new_log(folder: Path, head: LogHead | None, at: float) -> SigningKeys:
    """Retire the present key; the next one continues from the database's checkpoint.

    ``head`` is that checkpoint; None: the log is empty.  After an interruption, the
    call can be repeated.  Raises as ``open_keys``.
    """
    record = _read(folder / SIGNING_LOG_FILE)
    if (folder / SEED_FILE).exists():
        seed = signing_seed(folder).hex()
        if seed not in record.retired:
            record.retired.append(seed)
    if record.links and record.links[-1].successor is None:
        record.links.pop()  # of an attempt that was interrupted
    if head is not None:
        record.links.append(KeyLink(head.note))
    record.shown = None
    _write(folder / SIGNING_LOG_FILE, record)
    return open_keys(folder, at)


def _read(file: Path) -> _Record:
    try:
        restrict(file)
        record = msgspec.json.decode(file.read_bytes(), type=_Record)
        for note in (record.shown, *(each.checkpoint for each in record.links)):
            if note is not None:
                checkpoint.read(note)
        for seed in record.retired:
            Signer.from_seed(bytes.fromhex(seed))
    except FileNotFoundError:
        return _Record()
    except ValueError as error:  # of msgspec and UTF-8 as well
        raise StoreBroken(f"is damaged: {error}", str(file)) from error
    return record


def _write(file: Path, record: _Record) -> None:
    replace_private(file, msgspec.json.format(msgspec.json.encode(record)).decode())
