"""The clients behind trusted reverse proxies, and behind fronts of this coordinator.

A proxy connects from its own address, so without this all of its clients are one client
to the limits of wrong secrets, and one of them could have the others blocked.  Only
``X-Forwarded-For`` is read: every usual proxy appends to it, and a header that a proxy
passes on unread would be the client's own claim.

Requests of a front come over a socket that only this user's processes reach.
"""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from aiohttp import web

from shoal.domain.errors import ConfigError

FORWARDED_FOR = "X-Forwarded-For"

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

CLIENT = "x-shoal-client"
"""The first header of a request from a front: its client's scheme and address."""

ADMITTED = "x-shoal-admitted"
"""The header of a response to an authenticated client; it is not sent on."""


@dataclass(frozen=True, slots=True)
class TrustedProxies:
    """The networks of proxies that are trusted to name their clients."""

    networks: tuple[Network, ...] = ()

    def with_client(self, request: web.Request) -> web.Request:
        """Return a request whose ``remote`` is the client, not the proxy."""
        if not self.networks:
            return request
        client = self.address_of(request)
        return (
            request
            if client == (request.remote or "")
            else request.clone(remote=client)
        )

    def address_of(self, request: web.Request) -> str:
        """Return the address of the client that sent a request."""
        forwarded_for = request.headers.getall(FORWARDED_FOR, [])
        return self.client_of(request.remote or "", forwarded_for)

    def client_of(self, peer: str, forwarded_for: Iterable[str]) -> str:
        """Return the address of the client for which a peer forwards a request.

        Each proxy appends the address that connected to it, so from the end, the first
        that is not a trusted proxy is the client.  What stands before is its own claim.
        """
        if not self.networks:
            return peer
        hops = [hop.strip() for line in forwarded_for for hop in line.split(",")]
        while hops and self._trusts(peer) and _is_address(hops[-1]):
            peer = hops.pop()
        return peer

    def _trusts(self, address: str) -> bool:
        if not _is_address(address):
            return False
        given = ipaddress.ip_address(address)
        if isinstance(given, ipaddress.IPv6Address) and given.ipv4_mapped is not None:
            given = given.ipv4_mapped
        return any(given in network for network in self.networks)


def trusted_proxies(given: Iterable[str]) -> TrustedProxies:
    """Return the proxies of these addresses and networks.  Raises ConfigError."""
    return TrustedProxies(tuple(_network(each) for each in given))


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        raise ConfigError(
            f"--trusted-proxy {text!a}: expected an address or a network, such as "
            "127.0.0.1 or 10.1.0.0/16"
        ) from None


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def client_header(address: str, scheme: str) -> str:
    """Return what ``CLIENT`` says."""
    return f"{scheme} {address}"


def with_front_client(request: web.Request) -> web.Request:
    """Return the request of a front as that of its client."""
    # The first one: a client can send the header, too.
    scheme, _, address = request.headers.get(CLIENT, "http ").partition(" ")
    return request.clone(scheme=scheme, remote=address)
