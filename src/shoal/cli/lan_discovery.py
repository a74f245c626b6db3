"""Finds the coordinator on the local network, for `shoal join` without a URL."""

import asyncio
from collections.abc import Mapping, Sequence

from shoal.domain.errors import ConfigError, Unavailable
from shoal.protocols.seam.endpoints import DiscoveredService
from shoal.transports.mdns import addresses_of, local_network

BROWSE_TIME = 3.0  # seconds; most coordinators answer within one
CONNECT_TIMEOUT = 2.0  # seconds to each of a coordinator's addresses
MARK = "shoal"  # key in the TXT record of Shoal's coordinators
EVERYWHERE = "0.0.0.0"  # all networks of this machine
WHAT_TO_DO = (
    "start one with `shoal serve`, or give its address: shoal join http://HOST:4010"
)
ZONE = "%25"  # prefix of an address's zone in URLs (RFC 6874)
LISTED_MAX = 10  # coordinators that a message names


async def find_lan_coordinator(kind: str, *, secure: bool, why_not_here: str) -> str:
    """Return the URL of the only coordinator that announces a service of this kind.

    It has the first of the coordinator's addresses that accepts a connection: some may
    belong to other networks.

    Raises ConfigError if there is no coordinator or several, or no address accepts.
    """
    seen: dict[str, DiscoveredService] = {}

    def note(sighting: DiscoveredService) -> None:
        seen[sighting.name] = sighting

    def forget(name: str) -> None:
        seen.pop(name, None)

    try:
        async with (
            local_network(addresses_of(EVERYWHERE)) as network,
            network.browse(kind, note, forget),
        ):
            await asyncio.sleep(BROWSE_TIME)
    except Unavailable as error:
        raise ConfigError(
            f"no coordinator runs on this machine ({why_not_here}), and the local "
            f"network cannot be searched: {error}; {WHAT_TO_DO}"
        ) from error
    one = only_coordinator([*seen.values()], secure=secure, why_not_here=why_not_here)
    return await _answering(one)


def only_coordinator(
    seen: Sequence[DiscoveredService], *, secure: bool, why_not_here: str
) -> DiscoveredService:
    """Return the only coordinator among the services.

    ``secure`` requires TLS: the token names a certificate.

    Raises ConfigError naming the coordinators, and what to do.
    """
    ours = {each.name: each for each in seen if MARK in each.text and each.addresses}
    if len(ours) == 1 and not secure:
        (one,) = ours.values()
        return one
    if secure and ours:
        # Announced ports have no TLS.
        raise ConfigError(
            "the token is for a coordinator with a certificate; give its address and "
            f"port: {_listed(ours, 'https://{host}:PORT')}"
        )
    if ours:
        raise ConfigError(
            f"{len(ours)} coordinators are on the local network; choose one: "
            + _listed(ours, "tcp://{host}:{port}")
        )
    raise ConfigError(
        f"no coordinator runs on this machine ({why_not_here}), and none answered on "
        f"the local network within {BROWSE_TIME:g} s: {WHAT_TO_DO}"
    )


async def _answering(one: DiscoveredService) -> str:
    for address in _by_version(one):
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                _, writer = await asyncio.open_connection(address, one.port)
        except (OSError, TimeoutError):
            continue
        writer.transport.abort()
        return _url(address, one.port)
    tried = ", ".join(_url(each, one.port) for each in _by_version(one))
    raise ConfigError(
        f"the coordinator {one.name!a} announces itself on the local network, but does "
        f"not answer at {tried}; check for a firewall, or give its address: shoal join "
        "http://HOST:4010"
    )


def _listed(ours: Mapping[str, DiscoveredService], url: str) -> str:
    return "".join(
        f"\n  shoal join {url.format(host=_host(_by_version(each)[0]), port=each.port)}"
        f"  # {ascii(name)[1:-1]}"
        for name, each in sorted(ours.items())[:LISTED_MAX]
    )


def _by_version(seen: DiscoveredService) -> list[str]:
    """Return its addresses, IPv4 first: IPv6 ones may need a zone."""
    return sorted(seen.addresses, key=lambda each: ":" in each)


def _url(address: str, port: int) -> str:
    return f"tcp://{_host(address)}:{port}"


def _host(address: str) -> str:
    return f"[{address.replace('%', ZONE)}]" if ":" in address else address
