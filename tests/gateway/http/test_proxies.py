import pytest

from shoal.domain.errors import ConfigError
from shoal.gateway.http.proxies import TrustedProxies, trusted_proxies

PROXY, CLIENT, OTHER = "10.1.0.9", "192.0.2.7", "198.51.100.1"


@pytest.mark.parametrize(
    ("peer", "forwarded_for", "client"),
    [
        (PROXY, [CLIENT], CLIENT),
        (PROXY, [], PROXY),
        (PROXY, [""], PROXY),
        (OTHER, [CLIENT], OTHER),  # not trusted
        (PROXY, [f"{OTHER}, {CLIENT}"], CLIENT),  # the rest is the client's claim
        (PROXY, [OTHER, CLIENT], CLIENT),  # one line is like several
        (PROXY, [f"{CLIENT}, 10.1.0.1"], CLIENT),  # proxies in a row
        (PROXY, ["10.1.0.1,10.1.0.2"], "10.1.0.1"),
        (PROXY, [f"{CLIENT}, unknown"], PROXY),
        (PROXY, [f"{CLIENT}, 127.0.0.1"], "127.0.0.1"),
        (f"::ffff:{PROXY}", [CLIENT], CLIENT),
        ("2001:db8::1", ["2001:db8::2,2001:db8:1::1"], "2001:db8:1::1"),
        ("", [CLIENT], ""),
    ],
)
def test_client_is_the_last_address_that_no_trusted_proxy_has(
    peer: str, forwarded_for: list[str], client: str
) -> None:
    proxies = trusted_proxies(["10.1.0.0/16", "2001:db8::/48"])

    assert proxies.client_of(peer, forwarded_for) == client
    assert TrustedProxies().client_of(peer, forwarded_for) == peer


@pytest.mark.parametrize("given", ["proxy.lan", "10.1.0.1/16", "*", ""])
def test_invalid_proxy_is_named(given: str) -> None:
    with pytest.raises(ConfigError, match=r"--trusted-proxy .*expected an address or"):
        trusted_proxies([given])
