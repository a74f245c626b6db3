import pytest

from shoal.domain.addresses import has_space, is_loopback, network_key


@pytest.mark.parametrize(
    ("address", "own"),
    [
        ("127.0.0.1", True),
        ("127.255.255.254", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("fe80::1%lo", False),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("localhost", False),
        ("", False),
        ("?", False),
    ],
)
def test_loopback_addresses_are_local(address: str, own: bool) -> None:
    assert is_loopback(address) == own


@pytest.mark.parametrize("odd", [" ", "\t", "\n", "\0", "\x7f"])
def test_no_url_has_a_space_or_a_control_character(odd: str) -> None:
    assert not has_space("http://[::1]:4010/a%20b?c=\u00e9~")
    for url in (f"http://ho{odd}st", f"{odd}http://host", f"http://host/{odd}"):
        assert has_space(url)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", True),
        ("2001:db8::1", "2001:db8:1::1", False),
        ("::ffff:192.0.2.7", "192.0.2.7", True),
        ("192.0.2.7", "192.0.2.8", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("no address", "no address", True),
    ],
)
def test_owner_of_an_address_is_its_network(one: str, other: str, same: bool) -> None:
    assert (network_key(one) == network_key(other)) == same
