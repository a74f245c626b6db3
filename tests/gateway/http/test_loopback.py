"""Detection of local programs, and of pages in a local browser."""

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from shoal.gateway.http.authentication import is_local

HOST = "127.0.0.1:4010"


def local(address: str = "127.0.0.1", *headers: tuple[str, str]) -> bool:
    return is_local(address, CIMultiDictProxy(CIMultiDict(headers)))


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:4010",
        "127.0.0.1",
        "localhost",
        "LOCALHOST:1",
        "[::1]:4010",
        "127.9.9.9",
    ],
)
def test_request_to_a_loopback_name_is_local(host: str) -> None:
    assert local("127.0.0.1", ("Host", host))
    assert local("::1", ("Host", host))


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",  # DNS rebinding
        "evil.example:4010",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "localhost.",
        "0.0.0.0",
        "192.168.1.2",
        "127.0.0.1@evil.example",
        "127.0.0.1:99999",
        "127.0.0.1/",
        "[::1",
        "2130706433",
        "0x7f.1",
        "",
        " ",
    ],
)
def test_request_to_another_name_is_not_local(host: str) -> None:
    assert not local("127.0.0.1", ("Host", host))


def test_request_without_exactly_one_host_is_not_local() -> None:
    assert not local("127.0.0.1")
    assert not local("127.0.0.1", ("Host", HOST), ("Host", "evil.example"))


@pytest.mark.parametrize("address", ["192.168.1.2", "10.0.0.1", "fe80::1", "", "unix"])
def test_request_from_another_address_is_not_local(address: str) -> None:
    assert not local(address, ("Host", HOST))


@pytest.mark.parametrize(
    ("origin", "own"),
    [
        (f"http://{HOST}", True),
        (f"https://{HOST}", True),
        ("https://evil.example", False),
        ("http://127.0.0.1:3000", False),  # a page of another program
        ("http://localhost:4010", False),
        ("null", False),
        ("", False),
        (f"http://{HOST}.evil.example", False),
    ],
)
def test_page_is_local_only_from_the_same_origin(origin: str, own: bool) -> None:
    assert local("127.0.0.1", ("Host", HOST), ("Origin", origin)) == own


@pytest.mark.parametrize(
    ("site", "own"),
    [
        ("none", True),
        ("same-origin", True),
        ("cross-site", False),
        ("same-site", False),
    ],
)
def test_fetch_metadata_is_trusted(site: str, own: bool) -> None:
    assert local("127.0.0.1", ("Host", HOST), ("Sec-Fetch-Site", site)) == own


@pytest.mark.parametrize(
    "header", ["Forwarded", "X-Forwarded-For", "x-forwarded-for", "X-Real-IP", "Via"]
)
def test_proxied_request_is_not_local(header: str) -> None:
    assert not local("127.0.0.1", ("Host", HOST), (header, "127.0.0.1"))
