"""The networks of this machine, and which addresses are in them."""

from ipaddress import ip_network
from types import SimpleNamespace

import psutil
import pytest

from shoal.transports.own_networks import is_near, own_addresses, own_networks

HERE = [
    ip_network("192.168.1.0/24"),
    ip_network("fd00::/64"),
    ip_network("127.0.0.0/8"),
]


@pytest.mark.parametrize(
    ("url", "near"),
    [
        ("http://192.168.1.9:4010", True),
        ("http://[fd00::9]:4010", True),
        ("http://127.0.0.1:4010", True),
        ("http://192.168.2.9:4010", False),
        ("https://[fd00:0:0:1::9]", False),
        ("https://huggingface.co", False),  # a name is not resolved
        ("192.168.1.9:41234", False),  # no URL
        ("http://[", False),
        ("", False),
    ],
)
def test_what_is_in_a_network_of_this_machine_is_near(url: str, near: bool) -> None:
    assert is_near(url, HERE) is near


def test_networks_are_those_of_interfaces_that_are_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = SimpleNamespace(
        family=psutil.AF_LINK, address="02-00-00-00-00-01", netmask=None, ptp=None
    )
    version_6 = "ffff:ffff:ffff:ffff::"
    addresses = {
        "eth0": [
            SimpleNamespace(
                family=2, address="10.1.2.3", netmask="255.255.0.0", ptp=None
            ),
            SimpleNamespace(
                family=10, address="fe80::5%eth0", netmask=version_6, ptp=None
            ),
            link,
        ],
        "vpn": [SimpleNamespace(family=2, address="10.8.0.1", netmask=None, ptp="x")],
        "off": [SimpleNamespace(family=2, address="10.9.0.1", netmask=None, ptp=None)],
    }
    states = {
        "eth0": SimpleNamespace(isup=True, flags="up,broadcast,multicast"),
        "vpn": SimpleNamespace(isup=True, flags="up"),
        "off": SimpleNamespace(isup=False, flags=""),
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)

    found = [
        (str(each.interface), each.hardware, each.multicast, each.to_one)
        for each in own_addresses()
    ]

    assert found == [
        ("10.1.2.3/16", "02:00:00:00:00:01", True, False),
        ("fe80::5/64", "02:00:00:00:00:01", True, False),
        ("10.8.0.1/32", "", False, True),
    ]
    assert ip_network("10.1.0.0/16") in own_networks()
