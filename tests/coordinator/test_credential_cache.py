import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from shoal.coordinator import credential_cache as module
from shoal.coordinator.credential_cache import CredentialCache
from shoal.domain.credentials import Key, Scope, digest_of
from shoal.domain.errors import InvalidRequest, NotFound, StoreError
from shoal.store.sql.keys import KEY_TABLE, SqlCredentials
from shoal.store.sqlite.database import SqliteStore
from store.in_memory import memory_store


class FullDisk(SqlCredentials[Key]):
    """A table that rejects writes while its disk is full."""

    full = True

    async def add(self, new: Key) -> None:
        self._check_space()
        await super().add(new)

    async def revoke(self, id_: str, at: float) -> None:
        self._check_space()
        await super().revoke(id_, at)

    def _check_space(self) -> None:
        if self.full:
            raise StoreError("database or disk is full")


@pytest.fixture
async def opened_store() -> AsyncIterator[SqliteStore]:
    async with memory_store() as store:
        yield store


@pytest.fixture
async def store(opened_store: SqliteStore) -> SqlCredentials[Key]:
    return opened_store.keys.keys


@pytest.fixture
async def full_disk(opened_store: SqliteStore) -> FullDisk:
    return FullDisk(opened_store.database, KEY_TABLE)


def key(name: str, number: int = 1) -> Key:
    secret = f"sk-{number}"
    return Key(f"key_{number}", name, digest_of(secret), "", Scope.USE, 0.0)


def opened(store: SqlCredentials[Key], *kept: Key) -> CredentialCache[Key]:
    return CredentialCache("key", kept, store, ("default",))


async def test_key_is_found_by_its_secret_its_id_and_its_name(
    store: SqlCredentials[Key],
) -> None:
    book = opened(store)
    alice = key("alice")

    await book.add(alice)

    assert book.by_secret("sk-1") == book.by_id("key_1") == alice
    assert book.find("alice") == book.find("key_1") == alice
    assert (book.by_name("alice"), book.by_name("bob")) == (alice, None)
    assert (book.by_secret("sk-2"), book.by_id("key_2")) == (None, None)
    with pytest.raises(NotFound, match="there is no key bob"):
        book.find("bob")


async def test_added_key_is_stored(store: SqlCredentials[Key]) -> None:
    await opened(store).add(key("alice"))

    assert list(opened(store, *await store.all())) == [key("alice")]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "expected up to 64 letters"),
        ("a b", "expected up to 64 letters"),
        ("x" * 10_000, "expected up to 64 letters"),
        ("default", "default is reserved"),
        ("alice", "there is a key alice already; revoke it first"),
    ],
)
async def test_invalid_name_is_rejected(
    store: SqlCredentials[Key], name: str, said: str
) -> None:
    book = opened(store, key("alice"))

    with pytest.raises(InvalidRequest, match=said) as caught:
        await book.add(key(name, 2))

    assert caught.value.field == "name"
    assert len(str(caught.value)) < 200
    assert len(list(book)) == 1


async def test_concurrent_keys_of_one_name_do_not_both_succeed(
    store: SqlCredentials[Key],
) -> None:
    book = opened(store)

    results = await asyncio.gather(
        *(book.add(key("alice", number)) for number in range(5)),
        return_exceptions=True,
    )

    assert sum(result is None for result in results) == 1
    assert len(list(book)) == 1


async def test_revoked_key_is_known_and_frees_its_name(
    store: SqlCredentials[Key],
) -> None:
    book = opened(store)
    await book.add(key("alice"))

    revoked = await book.revoke(book.find("alice"), 5.0)

    assert revoked.revoked_at == 5.0
    assert book.by_secret("sk-1") == book.find("key_1") == revoked
    with pytest.raises(NotFound):
        book.find("alice")
    await book.add(key("alice", 2))
    assert book.find("alice").id == "key_2"
    assert await book.revoke(revoked, 9.0) == revoked
    assert [each.revoked_at for each in await store.all()] == [5.0, None]


def test_key_that_was_revoked_earlier_does_not_keep_its_name(
    store: SqlCredentials[Key],
) -> None:
    book = opened(store, replace(key("alice"), revoked_at=5.0))

    assert book.by_name("alice") is None
    book.check_name("alice")


async def test_key_that_cannot_be_stored_is_not_created(full_disk: FullDisk) -> None:
    book = opened(full_disk)

    with pytest.raises(StoreError, match="full"):
        await book.add(key("alice"))

    assert book.by_secret("sk-1") is None
    book.check_name("alice")


async def test_key_is_revoked_in_memory_if_the_store_fails(
    full_disk: FullDisk,
) -> None:
    book = opened(full_disk, key("alice"))

    with pytest.raises(StoreError, match="full"):
        await book.revoke(book.find("alice"), 5.0)

    found = book.by_secret("sk-1")
    assert found is not None
    assert found.revoked_at == 5.0
    assert book.by_name("alice") is None


async def test_revocation_is_retried_until_stored(
    full_disk: FullDisk, store: SqlCredentials[Key]
) -> None:
    await store.add(key("alice"))
    book = opened(full_disk, key("alice"))
    with pytest.raises(StoreError, match="full"):
        await book.revoke(book.find("alice"), 5.0)
    with pytest.raises(InvalidRequest, match="already"):
        book.check_name("alice")

    with pytest.raises(StoreError, match="full"):
        await book.revoke(book.find("alice"), 6.0)
    full_disk.full = False
    await book.revoke(book.find("alice"), 7.0)

    (kept,) = await store.all()
    assert kept.revoked_at is not None
    book.check_name("alice")


async def test_number_of_keys_is_bounded(
    store: SqlCredentials[Key], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CREDENTIALS_MAX", 2)
    book = opened(store, key("a", 1), key("b", 2))

    with pytest.raises(InvalidRequest, match="revoke some"):
        await book.add(key("c", 3))


def test_old_expired_keys_are_forgotten(store: SqlCredentials[Key]) -> None:
    expired = replace(key("a", 1), expires_at=5.0)
    revoked = replace(key("b", 2), revoked_at=8.0)
    book = opened(store, expired, revoked, key("c", 3))

    book.drop_ended(6.0)
    assert [each.name for each in book] == ["b", "c"]
    book.drop_ended(9.0)
    assert [each.name for each in book] == ["c"]

    assert book.by_secret("sk-1") is None
    book.check_name("a")


async def test_repeated_revocation_leaves_the_next_key_of_the_name_alone(
    store: SqlCredentials[Key],
) -> None:
    old, new = key("alice"), key("alice", 2)
    book = opened(store)
    await book.add(old)
    revoked = await book.revoke(old, 1.0)
    await book.add(new)

    assert await book.revoke(revoked, 2.0) == revoked

    assert book.find("alice") == new
    with pytest.raises(InvalidRequest, match="there is a key alice"):
        book.check_name("alice")
