from dataclasses import replace

import pytest

from shoal.coordinator.credential_cache import CredentialCache
from shoal.domain.credentials import Key, Scope, digest_of
from shoal.domain.errors import ConfigError, KeyExpired, KeyRevoked, Unauthorized
from shoal.gateway.http.authentication import Keyring
from shoal.store.port import CredentialStore
from shoal.store.sqlite.store import SqliteStore
from store.in_memory import MEMORY, memory_store

NOW = 1000.0
DAVE = Key("key_1", "dave", digest_of("sk-d"), "sk-d", Scope.READ, 0.0, NOW + 1)


UNOPENED = SqliteStore(MEMORY).keys.keys


def keyring(*made: Key, store: CredentialStore[Key] = UNOPENED) -> Keyring:
    book = CredentialCache("key", made, store)
    return Keyring(book, {"alice": "sk-a", "bob": "ut-bob"})


KEYS = keyring(DAVE)


@pytest.mark.parametrize(
    ("header", "owner"),
    [
        ("Bearer sk-a", "alice"),
        ("bearer ut-bob", "bob"),
        ("BEARER  sk-a ", "alice"),
        ("Bearer sk-d", "dave"),
    ],
)
def test_a_key_has_an_owner(header: str, owner: str) -> None:
    assert KEYS.authenticate(header, NOW).name == owner


def test_first_keys_may_do_everything_and_others_what_they_are_for() -> None:
    assert KEYS.authenticate("Bearer sk-a", NOW).scope is Scope.ADMIN
    assert KEYS.authenticate("Bearer sk-d", NOW) == DAVE


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic abc", "sk-a"])
def test_without_a_key_one_is_told_how_to_send_it(header: str | None) -> None:
    with pytest.raises(Unauthorized, match="Authorization: Bearer KEY"):
        KEYS.authenticate(header, NOW)


@pytest.mark.parametrize(
    "key",
    [
        "x",
        "constructor",
        "toString",
        "__proto__",
        "alice",
        "dave",
        "key_1",
        "sk-a\udcff",
        "sk-\ud800",
        digest_of("sk-d").hex(),
    ],
)
def test_a_wrong_key_is_refused_whatever_it_is_called(key: str) -> None:
    with pytest.raises(Unauthorized, match=r"incorrect API key.*shoal serve") as caught:
        KEYS.authenticate(f"Bearer {key}", NOW)

    assert key not in str(caught.value)


@pytest.mark.parametrize("header", ["bearer sk-a", "Bearer  sk-a"])
def test_exactly_means_exactly(header: str) -> None:
    assert KEYS.authenticate("Bearer sk-a", NOW, exact=True).name == "alice"
    with pytest.raises(Unauthorized):
        KEYS.authenticate(header, NOW, exact=True)


def test_key_that_has_expired_is_said_to_have() -> None:
    with pytest.raises(KeyExpired, match="the API key dave has expired"):
        KEYS.authenticate("Bearer sk-d", NOW + 1)


def test_key_that_was_revoked_is_said_to_be() -> None:
    # Whatever the clock says: it may have been put back.
    keys = keyring(replace(DAVE, revoked_at=NOW + 100))

    with pytest.raises(KeyRevoked, match=r"the key was revoked \(dave\)"):
        keys.authenticate("Bearer sk-d", NOW)


async def test_key_that_is_revoked_meanwhile_is_no_longer_good() -> None:
    async with memory_store() as store:
        keys = keyring(DAVE, store=store.keys.keys)
        key = keys.authenticate("Bearer sk-d", NOW)
        keys.ensure_active(key)

        await keys.cache.revoke(key, NOW)

    with pytest.raises(KeyRevoked):
        keys.ensure_active(key)
    keys.ensure_active(keys.authenticate("Bearer sk-a", NOW))


def test_an_empty_key_would_let_anybody_in() -> None:
    with pytest.raises(ConfigError, match="carol is empty"):
        Keyring(
            CredentialCache("key", (), UNOPENED),
            {"carol": ""},
        )
