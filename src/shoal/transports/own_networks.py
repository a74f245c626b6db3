"""The addresses of this machine, the networks that they are in, and who is near."""

import ipaddress
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import urlsplit

import psutil

IPv6_PREFIX = 64  # bits of a network's address, where the system does not say it

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class OwnAddress:
    """An address of an interface that is up.

    ``hardware`` is the interface's own address, as ``02:00:00:00:00:01``; empty: it has
    none.  ``multicast``: it carries that, as far as the system says.  ``to_one``: there
    is one machine at its other end.
    """

    interface: ipaddress.IPv4Interface | ipaddress.IPv6Interface
    hardware: str
    multicast: bool
    to_one: bool


def own_addresses() -> Iterator[OwnAddress]:
    """Yield the addresses of this machine, without those that have no network."""
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        state = states.get(name)
        if state is None or not state.isup:
            continue
        links = [each for each in addresses if int(each.family) == int(psutil.AF_LINK)]
        hardware = links[0].address.lower().replace("-", ":") if links else ""
        # Not every system reports the flags.
        multicast = "multicast" in (state.flags or "multicast")
        for each in addresses:
            try:
                interface = _interface(each.address.partition("%")[0], each.netmask)
            except ValueError:  # a hardware address
                continue
            yield OwnAddress(interface, hardware, multicast, bool(each.ptp))


def own_networks() -> frozenset[Network]:
    """Return the networks that this machine is in, with that of its own loopback."""
    return frozenset(each.interface.network for each in own_addresses())


def is_near(url: str, networks: Collection[Network]) -> bool:
    """Return whether a URL has an address that is in one of the networks.

    A name of a machine is in none: it is not resolved.
    """
    try:
        address = ipaddress.ip_address(urlsplit(url).hostname or "")
    except ValueError:
        return False
    return any(address in each for each in networks)


def _interface(
    address: str, mask: str | None
) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface:
    """Return an address with its network.  Raises ValueError."""
    if ":" not in address:
        return ipaddress.IPv4Interface(f"{address}/{mask or 32}")
    bits = int(ipaddress.IPv6Address(mask)).bit_count() if mask else IPv6_PREFIX
    return ipaddress.IPv6Interface(f"{address}/{bits}")
