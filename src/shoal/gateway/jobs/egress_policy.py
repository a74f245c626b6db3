"""The addresses that webhooks may have: none inside the coordinator's own network.

Otherwise a client could make the coordinator send requests to addresses that only it
can reach: its own ports, the router, or a cloud's metadata service (SSRF).
"""

import errno
import ipaddress
import socket
from collections.abc import Callable
from enum import Enum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from aiohttp import AddrInfoType


class EgressPolicy(Enum):
    """The addresses that webhooks may have."""

    PUBLIC = "public"
    ANY = "any"
    OFF = "off"


# Source: IANA's special-purpose address registries.  Global to Python, but no servers:
# they translate between IPv4 and IPv6.
_ODD_4 = (IPv4Network("192.0.0.0/24"), IPv4Network("192.88.99.0/24"))
_ODD_6 = (IPv6Network("2001::/23"), IPv6Network("2002::/16"))
_UNICAST = IPv6Network("2000::/3")  # all of IPv6 that is allocated
_NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address


def is_public(address: str) -> bool:
    """Say whether an IP address is a public unicast address.

    False for anything that is not an IP address.
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
    """Say whether a policy denies a host; names are checked when they are resolved."""
    if policy is not EgressPolicy.PUBLIC:
        return policy is EgressPolicy.OFF
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return not is_public(host)


def _public_socket(info: AddrInfoType) -> socket.socket:
    """Create a socket for a connection to a public address.

    Called for each address just before the connection, whether it is from the URL or
    from DNS: there is no second look-up that could return another address.

    Raises PermissionError for an address that is not public.
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
"""The socket factories of aiohttp's connectors."""
