"""Finds the coordinator on the local network, for `shoal join` without a URL."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from shoal.domain.errors import ConfigError, Unavailable
from shoal.protocols.seam.endpoints import TLS_KEY, DiscoveredService
from shoal.transports.mdns import addresses_of, local_network

BROWSE_TIME = 3.0  # seconds; most coordinators answer within one, and may be several
BROWSE_MAX = 10.0  # seconds, if none has answered
CONNECT_TIMEOUT = 2.0  # seconds to each of a coordinator's addresses
EVERYWHERE = "0.0.0.0"  # all networks of this machine
ADVICE = (
    "start one with `shoal serve`, or give its address: shoal join http://HOST:4010"
)
LISTED_MAX = 10  # coordinators that a message names


async def find_lan_coordinator(kind: str, *, secure: bool, local_error: str) -> str:
    """Return the URL of the only coordinator that announces a service of this kind.

    It has the first of the coordinator's addresses that accepts a connection: some may
    belong to other networks.

    Raises ConfigError if there is no coordinator or several, or no address accepts.
    """
    services: dict[str, DiscoveredService] = {}
    found = asyncio.Event()

    def add(sighting: DiscoveredService) -> None:
        services[sighting.name] = sighting
        if sighting.addresses:
            found.set()

    def remove(name: str) -> None:
        services.pop(name, None)

    try:
        async with (
            local_network(addresses_of(EVERYWHERE)) as network,
            network.browse(kind, add, remove),
        ):
            await asyncio.sleep(BROWSE_TIME)
            with suppress(TimeoutError):
                await asyncio.wait_for(found.wait(), BROWSE_MAX - BROWSE_TIME)
    except Unavailable as error:
        raise ConfigError(
            f"no coordinator runs on this machine ({local_error}), and the local "
            f"network cannot be searched: {error}; {ADVICE}"
        ) from error
    coordinator = only_coordinator(
        [*services.values()], secure=secure, local_error=local_error
    )
    return await _reachable_url(coordinator)


def only_coordinator(
    services: Sequence[DiscoveredService], *, secure: bool, local_error: str
) -> DiscoveredService:
    """Return the only coordinator among the services.

    ``secure`` requires TLS: the token names a certificate.

    Raises ConfigError naming the coordinators, and what to do.
    """
    coordinators = {each.name: each for each in services if each.addresses}
    fitting = {
        name: each
        for name, each in coordinators.items()
        if TLS_KEY in each.text or not secure
    }
    if len(fitting) == 1:
        (coordinator,) = fitting.values()
        return coordinator
    if coordinators and not fitting:
        raise ConfigError(
            "the token is for a coordinator with a certificate, but none on the local "
            f"network has one; found: {_listed(coordinators)}"
        )
    if fitting:
        raise ConfigError(
            f"{len(fitting)} coordinators are on the local network; choose one: "
            + _listed(fitting)
        )
    raise ConfigError(
        f"no coordinator runs on this machine ({local_error}), and none answered on "
        f"the local network within {BROWSE_MAX:g} s: {ADVICE}"
    )


async def _reachable_url(coordinator: DiscoveredService) -> str:
    for address in _ipv4_first(coordinator):
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                _, writer = await asyncio.open_connection(address, coordinator.port)
        except (OSError, TimeoutError):
            continue
        writer.transport.abort()
        return _url(coordinator, address)
    tried = ", ".join(_url(coordinator, each) for each in _ipv4_first(coordinator))
    raise ConfigError(
        f"the coordinator {coordinator.name!a} announces itself on the local network, "
        f"but does not answer at {tried}; check for a firewall, or give its address: "
        "shoal join http://HOST:4010"
    )


def _listed(coordinators: Mapping[str, DiscoveredService]) -> str:
    return "".join(
        f"\n  shoal join {_url(each, _ipv4_first(each)[0])}  # {ascii(name)[1:-1]}"
        for name, each in sorted(coordinators.items())[:LISTED_MAX]
    )


def _ipv4_first(service: DiscoveredService) -> list[str]:
    """Return its addresses, IPv4 first: IPv6 ones may need a zone."""
    return sorted(service.addresses, key=lambda each: ":" in each)


def _url(service: DiscoveredService, address: str) -> str:
    scheme = "https" if TLS_KEY in service.text else "http"
    return replace(service, addresses=(address,)).url(scheme)
