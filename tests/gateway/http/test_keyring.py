from dataclasses import replace
from typing import Any

import pytest

from shoal.coordinator.credential_cache import CredentialCache
from shoal.domain.credentials import Key, Scope, digest_of, with_fingerprint
from shoal.domain.errors import ConfigError, KeyExpired, KeyRevoked, Unauthorized
from shoal.gateway.http.authentication import Keyring, authorization_in
from shoal.store.port import CredentialStore
from shoal.store.sqlite.database import SqliteStore
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
        # With the fingerprint of the coordinator, as its own programs take it.
        (f"Bearer {with_fingerprint('sk-d', bytes(32))}", "dave"),
    ],
)
def test_a_key_has_an_owner(header: str, owner: str) -> None:
    assert KEYS.authenticate(header, NOW).name == owner


@pytest.mark.parametrize(
    ("authorization", "bare", "meant"),
    [
        (None, None, None),
        ("Bearer sk-a", None, "Bearer sk-a"),
        (None, "sk-a", "Bearer sk-a"),
        (None, "", "Bearer "),  # wrong, and not the same as none
        ("Bearer sk-a", "", "Bearer sk-a"),
        ("bearer  sk-a ", "sk-a", "bearer  sk-a "),
        (f"Bearer {with_fingerprint('sk-a', bytes(32))}", "sk-a", ...),
        ("Bearer sk-a", "sk-b", Unauthorized),
        ("Basic YTpi", "sk-a", Unauthorized),
        ("", "sk-a", Unauthorized),
    ],
)
def test_a_bare_key_means_the_same_as_a_bearers(
    authorization: str | None, bare: str | None, meant: Any
) -> None:
    given = {"Authorization": authorization, "x-api-key": bare}
    headers = {name: value for name, value in given.items() if value is not None}

    if meant is Unauthorized:
        with pytest.raises(Unauthorized, match="different keys"):
            authorization_in(headers)
    else:
        assert authorization_in(headers) == (authorization if meant is ... else meant)


def test_static_keys_have_all_scopes_and_others_their_own() -> None:
    assert KEYS.authenticate("Bearer sk-a", NOW).scope is Scope.ADMIN
    assert KEYS.authenticate("Bearer sk-d", NOW) == DAVE


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic abc", "sk-a"])
def test_missing_key_is_explained(header: str | None) -> None:
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
def test_wrong_key_is_rejected(key: str) -> None:
    with pytest.raises(Unauthorized, match=r"incorrect API key.*shoal serve") as caught:
        KEYS.authenticate(f"Bearer {key}", NOW)

    assert key not in str(caught.value)


@pytest.mark.parametrize("header", ["bearer sk-a", "Bearer  sk-a"])
def test_keys_match_exactly(header: str) -> None:
    assert KEYS.authenticate("Bearer sk-a", NOW, exact=True).name == "alice"
    with pytest.raises(Unauthorized):
        KEYS.authenticate(header, NOW, exact=True)


def test_expired_key_is_reported() -> None:
    with pytest.raises(KeyExpired, match="the API key dave has expired"):
        KEYS.authenticate("Bearer sk-d", NOW + 1)


def test_revoked_key_is_reported() -> None:
    # At any time: the clock may have been set back.
    keys = keyring(replace(DAVE, revoked_at=NOW + 100))

    with pytest.raises(KeyRevoked, match=r"the key was revoked \(dave\)"):
        keys.authenticate("Bearer sk-d", NOW)


async def test_key_is_rejected_once_revoked() -> None:
    async with memory_store() as store:
        keys = keyring(DAVE, store=store.keys.keys)
        key = keys.authenticate("Bearer sk-d", NOW)
        keys.ensure_active(key, NOW)

        await keys.cache.revoke(key, NOW)

    with pytest.raises(KeyRevoked):
        keys.ensure_active(key, NOW)
    keys.ensure_active(keys.authenticate("Bearer sk-a", NOW), NOW)


def test_empty_static_key_is_an_error() -> None:
    with pytest.raises(ConfigError, match="carol is empty"):
        Keyring(
            CredentialCache("key", (), UNOPENED),
            {"carol": ""},
        )
