"""Classification of addresses by their text alone."""

import ipaddress
from functools import lru_cache
from urllib.parse import urlsplit

LOOPBACK_NAME = "localhost"
NETWORK_OF_ONE = 48  # bits of an IPv6 address that one subscriber cannot choose


def has_space(url: str) -> bool:
    """Say whether a URL has a space or a control character, which none may have.

    Who splits a URL drops some of them, and who sends it escapes others.
    """
    return any(each <= " " or each == "\x7f" for each in url)


def host_and_port(address: str) -> tuple[str, int] | None:
    """Return the two parts of HOST:PORT; None: it is something else."""
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if parts.netloc != address or "@" in address or has_space(address):
        return None
    if not host or port is None:
        return None
    return host, port


def split_addresses(given: str) -> list[str]:
    """Return the addresses in a list with commas; one may be empty, or all."""
    found = [each for part in given.split(",") if (each := part.strip())]
    return list(dict.fromkeys(found)) or [""]


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address."""
    try:
        given = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(given, ipaddress.IPv6Address) and given.ipv4_mapped is not None:
        return given.ipv4_mapped.is_loopback
    return given.is_loopback


def is_own_host(host: str) -> bool:
    """Return whether only this machine reaches what listens on a host."""
    return host == LOOPBACK_NAME or is_loopback(host)


@lru_cache(maxsize=4096)
def network_key(address: str) -> str:
    """Return the key that groups a client's addresses: for IPv6, its network."""
    try:
        given = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(given, ipaddress.IPv4Address):
        return str(given)
    if given.ipv4_mapped is not None:
        return str(given.ipv4_mapped)
    return str(ipaddress.ip_network((int(given), NETWORK_OF_ONE), strict=False))
