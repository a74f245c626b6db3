"""What the words of the join command mean."""

import pytest

from shoal.cli.join import with_scheme


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
def test_an_address_alone_is_that_of_a_coordinator(
    url: str, wire: str, meant: str
) -> None:
    assert with_scheme(url, wire) == meant
