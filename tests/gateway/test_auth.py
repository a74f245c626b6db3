import pytest

from shoal.domain.errors import ConfigError, Unauthorized
from shoal.gateway.auth import Keyring

KEYS = Keyring({"alice": "sk-a", "bob": "ut-bob"})


@pytest.mark.parametrize(
    ("header", "owner"),
    [
        ("Bearer sk-a", "alice"),
        ("bearer ut-bob", "bob"),
        ("BEARER  sk-a ", "alice"),
    ],
)
def test_a_key_has_an_owner(header: str, owner: str) -> None:
    assert KEYS.owner(header) == owner


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic abc", "sk-a"])
def test_without_a_key_one_is_told_how_to_send_it(header: str | None) -> None:
    with pytest.raises(Unauthorized, match="Authorization: Bearer KEY"):
        KEYS.owner(header)


@pytest.mark.parametrize(
    "key",
    ["x", "constructor", "toString", "__proto__", "alice", "sk-a\udcff", "sk-\ud800"],
)
def test_a_wrong_key_is_refused_whatever_it_is_called(key: str) -> None:
    with pytest.raises(Unauthorized, match="shoal serve"):
        KEYS.owner(f"Bearer {key}")


@pytest.mark.parametrize("header", ["bearer sk-a", "Bearer  sk-a"])
def test_exactly_means_exactly(header: str) -> None:
    assert KEYS.owner("Bearer sk-a", exact=True) == "alice"
    with pytest.raises(Unauthorized):
        KEYS.owner(header, exact=True)


def test_an_empty_key_would_let_anybody_in() -> None:
    with pytest.raises(ConfigError, match="carol is empty"):
        Keyring({"carol": ""})
