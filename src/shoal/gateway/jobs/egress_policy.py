"""Which addresses may be called for others: none inside the coordinator's own network.

Whoever names a URL to be called could else have the coordinator ask what only it can
reach: its own ports, the router, or what a cloud tells its machines.
"""

import errno
import ipaddress
import socket
from collections.abc import Callable
from enum import Enum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from aiohttp import AddrInfoType


class EgressPolicy(Enum):
    """Which addresses webhooks may be at."""

    PUBLIC = "public"
    ANY = "any"
    OFF = "off"


# Source: IANA's special-purpose address registries.  What Python takes for global, but
# is nobody's server: what translates between IPv4 and IPv6.
_ODD_4 = (IPv4Network("192.0.0.0/24"), IPv4Network("192.88.99.0/24"))
_ODD_6 = (IPv6Network("2001::/23"), IPv6Network("2002::/16"))
_UNICAST = IPv6Network("2000::/3")  # all of IPv6 that is given out as yet
_NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address


def is_public(address: str) -> bool:
    """Say whether an IP address is one of the internet's, and of one machine there.

    What is no IP address is not.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address) and parsed in _NAT64:
        parsed = IPv4Address(parsed.packed[-4:])
    if not parsed.is_global or parsed.is_multicast or parsed.is_reserved:
        return False
    if isinstance(parsed, IPv4Address):
        return not any(parsed in network for network in _ODD_4)
    return parsed in _UNICAST and not any(parsed in network for network in _ODD_6)


def is_denied(host: str, policy: EgressPolicy) -> bool:
    """Say whether a host can never be called; what a name stands for is seen later."""
    if policy is not EgressPolicy.PUBLIC:
        return policy is EgressPolicy.OFF
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return not is_public(host)


def _public_socket(info: AddrInfoType) -> socket.socket:
    """Make a socket for a connection to an address, if that is public.

    Asked for each address just before it is connected to, whether it was written in the
    URL or came from the DNS: no second look-up could tell another one.
    """
    family, kind, protocol, _, place = info
    if not is_public(str(place[0])):
        raise PermissionError(
            errno.EACCES, f"{place[0]} is not a public address (--webhooks public)"
        )
    return socket.socket(family, kind, protocol)


SOCKET_FACTORIES: dict[EgressPolicy, Callable[[AddrInfoType], socket.socket] | None] = {
    EgressPolicy.PUBLIC: _public_socket,
    EgressPolicy.ANY: None,
}
"""What makes the sockets of connections, as aiohttp's connectors take it."""
