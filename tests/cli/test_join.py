"""Arguments of the join command."""

import pytest

from shoal.cli.join import normalize_url


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
