"""Addresses that webhooks may reach."""

import socket

import pytest

from shoal.gateway.jobs.webhooks import SOCKET_FACTORIES, EgressPolicy, is_public

PUBLIC = [
    "8.8.8.8",
    "1.1.1.1",
    "172.32.0.1",
    "2606:4700::1111",
    "2a00:1450:4001::1",
    "64:ff9b::808:808",  # 8.8.8.8, as networks without IPv4 reach it
]

INSIDE = {
    "loopback": "127.0.0.1",
    "loopback, another": "127.255.255.254",
    "loopback of IPv6": "::1",
    "this machine": "0.0.0.0",
    "this machine, of IPv6": "::",
    "private, 10": "10.0.0.1",
    "private, 172.16": "172.16.0.1",
    "private, 192.168": "192.168.1.1",
    "unique local": "fd00:ec2::254",
    "carrier's": "100.64.0.1",
    "link-local, where clouds tell secrets": "169.254.169.254",
    "link-local of IPv6": "fe80::1",
    "link-local with a zone": "fe80::1%lo",
    "site-local": "fec0::1",
    "multicast": "224.0.0.1",
    "multicast, its own": "239.1.1.1",
    "multicast of IPv6": "ff0e::1",
    "broadcast": "255.255.255.255",
    "reserved": "240.0.0.1",
    "protocol assignments": "192.0.0.8",
    "for documents": "192.0.2.1",
    "for measurements": "198.18.0.1",
    "6to4 relay": "192.88.99.1",
    "IPv4-mapped loopback": "::ffff:127.0.0.1",
    "IPv4-mapped public": "::ffff:8.8.8.8",
    "IPv4-compatible": "::127.0.0.1",
    "6to4 of a private address": "2002:0a00:0001::1",
    "Teredo": "2001:0:7f00:1::1",
    "NAT64 of loopback": "64:ff9b::7f00:1",
    "NAT64 of a private address": "64:ff9b::10.0.0.1",
    "NAT64, a network's own": "64:ff9b:1::808:808",
    "discard": "100::1",
    "for documents, of IPv6": "2001:db8::1",
    "no address": "localhost",
    "nothing": "",
    "a number": "2130706433",
}


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("address", INSIDE.values(), ids=INSIDE)
def test_private_addresses_are_rejected(address: str) -> None:
    assert not is_public(address)


def test_no_socket_is_created_for_a_private_address() -> None:
    make = SOCKET_FACTORIES[EgressPolicy.PUBLIC]
    assert make is not None
    info = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 80))

    with pytest.raises(PermissionError, match=r"10\.0\.0\.1 is not a public address"):
        make(info)


def test_socket_is_created_for_a_public_address() -> None:
    make = SOCKET_FACTORIES[EgressPolicy.PUBLIC]
    assert make is not None
    info = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", 443))

    with make(info) as made:
        assert made.family is socket.AF_INET
