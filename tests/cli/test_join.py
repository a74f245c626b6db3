"""Arguments of the join command."""

import pytest

from shoal.cli.join import normalize_url, parse_privacy
from shoal.domain.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "wire", "meant"),
    [
        ("", "auto", ""),
        ("127.0.0.1:4010", "auto", "http://127.0.0.1:4010"),
        ("localhost:4010", "auto", "http://localhost:4010"),
        ("https://host", "auto", "https://host"),
        ("nonsense", "auto", "nonsense"),
        ("192.0.2.7:50051", "macfleet", "192.0.2.7:50051"),
    ],
)
def test_bare_address_means_a_coordinator(url: str, wire: str, meant: str) -> None:
    assert normalize_url(url, wire) == meant


@pytest.mark.parametrize("given", ["private", "PRIVATE"])
def test_privacy_class_is_read_in_any_case(given: str) -> None:
    assert parse_privacy(given) == "private"


def test_unknown_privacy_class_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected any, public or private"):
        parse_privacy("secret")
