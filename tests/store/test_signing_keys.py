"""The keys of the log, and what they have shown, wherever a crash interrupts them."""

import asyncio
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from harness.synced import needs_folder_sync, synced_files
from shoal.config import private_files
from shoal.config.private_files import replace_private
from shoal.config.secret_files import SEED_FILE, SIGNING_LOG_FILE, signing_seed
from shoal.domain.errors import StoreBroken, StoreError
from shoal.ledger import checkpoint
from shoal.ledger.keys import Signer
from shoal.store import signing_keys
from shoal.store.ledger import LogHead
from shoal.store.signing_keys import (
    SigningKeys,
    begin_new_log,
    has_signed,
    open_keys,
)
from shoal.store.sqlite.database import SqliteStore
from store.test_ledger import StoredLog

AT = 1_700_000_000.0


def head(keys: SigningKeys, size: int, root: bytes = b"r" * 32) -> LogHead:
    return LogHead(size, root, checkpoint.make(keys.signer, size, root, AT), AT)


def shown(keys: SigningKeys) -> list[int]:
    note = keys._record.shown
    return [] if note is None else [checkpoint.read(note).size]


async def test_the_newest_checkpoint_that_was_shown_is_kept(tmp_path: Path) -> None:
    assert not has_signed(tmp_path)
    keys = open_keys(tmp_path, AT)
    assert has_signed(tmp_path)
    for size in (3, 5, 4):
        await keys.show(head(keys, size))
    await keys.show(None)

    assert shown(open_keys(tmp_path, AT)) == [5]


@needs_folder_sync
async def test_what_is_shown_is_synced_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = open_keys(tmp_path, AT)
    synced = synced_files(monkeypatch)

    await keys.show(head(keys, 1))

    assert synced == {SIGNING_LOG_FILE}


async def test_a_checkpoint_that_cannot_be_recorded_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = open_keys(tmp_path, AT)

    def fail(file: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(signing_keys, "replace_private", fail)
        with pytest.raises(StoreError, match="No space left") as caught:
            await keys.show(head(keys, 1))
    assert caught.value.temporary
    assert shown(keys) == []
    await keys.show(head(keys, 1))
    assert shown(keys) == [1]


async def test_a_client_that_leaves_interrupts_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = open_keys(tmp_path, AT)
    begun, may_write = threading.Event(), threading.Event()

    def write_late(file: Path, text: str) -> None:
        begun.set()
        may_write.wait()
        replace_private(file, text)

    with monkeypatch.context() as patch:
        patch.setattr(signing_keys, "replace_private", write_late)
        left = asyncio.create_task(keys.show(head(keys, 1)))
        await asyncio.to_thread(begun.wait)
        left.cancel()
        newer = asyncio.create_task(keys.show(head(keys, 2)))
        may_write.set()
        with suppress(asyncio.CancelledError):
            await left
        assert shown(keys)
        await newer

    assert shown(open_keys(tmp_path, AT)) == [2]


async def test_a_database_with_another_history_is_noticed(
    tmp_path: Path, store: SqliteStore
) -> None:
    keys = open_keys(tmp_path, AT)
    log = StoredLog(store)
    for number in range(3):
        await log.add(f"j{number}")
    assert await keys.problem(store.ledger) is None
    at = await store.ledger.head(2)
    assert at is not None
    await keys.show(
        LogHead(2, at.root, checkpoint.make(keys.signer, 2, at.root, AT), AT)
    )
    assert await keys.problem(store.ledger) is None

    other = open_keys(tmp_path, AT)
    await other.show(head(other, 3))
    assert "has another log of receipts" in str(await other.problem(store.ledger))
    await other.show(head(other, 4))
    assert "has 3 receipts" in str(await other.problem(store.ledger))


def test_a_new_log_is_linked_to_the_one_before(tmp_path: Path) -> None:
    first = open_keys(tmp_path, AT)
    last = head(first, 7)

    second = begin_new_log(tmp_path, last, AT)

    assert second.signer.public_key != first.signer.public_key
    (link,) = second.links
    assert link.checkpoint == last.note
    assert link.successor is not None
    begun = checkpoint.verify(link.successor, second.signer.public_key)
    assert (begun.size, begun.root) == (7, last.root)
    assert second.successor_of(last.note) == link.successor
    assert shown(second) == [7]
    old = second.signer_of(last.note)
    assert old is not None
    assert old.public_key == first.signer.public_key
    assert second.signer_of(link.successor) is second.signer
    again = open_keys(tmp_path, AT)
    assert again.signer.public_key == second.signer.public_key
    assert again.links == second.links


@pytest.mark.parametrize("writes", range(3))
def test_a_new_log_that_was_interrupted_never_uses_the_old_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    first = open_keys(tmp_path, AT)
    last = head(first, 7)
    left = writes

    def killed(file: Path, text: str) -> None:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        replace_private(file, text)

    with monkeypatch.context() as patch:
        patch.setattr(signing_keys, "replace_private", killed)
        patch.setattr(private_files, "replace_private", killed)
        with pytest.raises(KeyboardInterrupt):
            begin_new_log(tmp_path, last, AT)

    # Before the first write, nothing has happened; the command is given again.
    keys = open_keys(tmp_path, AT) if writes else begin_new_log(tmp_path, last, AT)
    repeated = begin_new_log(tmp_path, last, AT)
    for found in (keys, repeated):
        assert found.signer.public_key != first.signer.public_key
        link = found.links[-1]
        assert link.successor is not None
        assert checkpoint.verify(link.successor, found.signer.public_key).size == 7


def test_a_key_that_has_ended_is_not_used_when_it_is_put_back(tmp_path: Path) -> None:
    before = open_keys(tmp_path, AT)
    seed = signing_seed(tmp_path)
    begin_new_log(tmp_path, None, AT)
    put_seed(tmp_path, seed)

    assert open_keys(tmp_path, AT).signer.public_key != before.signer.public_key


async def test_a_key_of_an_operators_own_begins_with_nothing_shown(
    tmp_path: Path,
) -> None:
    keys = open_keys(tmp_path, AT)
    await keys.show(head(keys, 3))
    put_seed(tmp_path, b"s" * 32)

    keys = open_keys(tmp_path, AT)

    assert keys.signer.public_key == Signer.from_seed(b"s" * 32).public_key
    assert shown(keys) == []


def put_seed(folder: Path, seed: bytes) -> None:
    (folder / SEED_FILE).write_text(seed.hex())
    assert signing_seed(folder) == seed


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"shown": "x"}', '{"retired": ["ab"]}', '{"links": [{}]}', "\xff"],
)
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / SIGNING_LOG_FILE).write_text(text, encoding="latin-1")

    with pytest.raises(StoreBroken, match="is damaged") as caught:
        open_keys(tmp_path, AT)

    assert caught.value.path == str(tmp_path / SIGNING_LOG_FILE)
