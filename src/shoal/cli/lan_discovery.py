"""Finds the coordinator on the local network, for workers that were given none."""

import asyncio
from collections.abc import Mapping, Sequence

from shoal.domain.errors import ConfigError, Unavailable
from shoal.protocols.seam.multi_peer import DiscoveredService
from shoal.transports.mdns import addresses_of, local_network

BROWSE_TIME = 3.0  # seconds: most answer within one
CONNECT_TIMEOUT = 2.0  # seconds to each of a coordinator's addresses
MARK = "shoal"  # the key in the TXT record of coordinators that are ours
EVERYWHERE = "0.0.0.0"  # on all networks that this machine is on
WHAT_TO_DO = (
    "start one with `shoal serve`, or say where it is: shoal join http://HOST:4010"
)
ZONE = "%25"  # what begins an address's zone in URLs (RFC 6874)
LISTED_MAX = 10  # coordinators that a message names


async def find_lan_coordinator(kind: str, *, secure: bool, why_not_here: str) -> str:
    """Return the address of the coordinator that is announced as a service of a kind.

    Of its addresses it is one that answers: some are of networks that we are not on.

    Raises ConfigError if there is not just one coordinator, or none of its addresses
    answers.
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
            f"no coordinator is on this machine ({why_not_here}), and none can be "
            f"looked for on the local network: {error}; {WHAT_TO_DO}"
        ) from error
    one = only_coordinator([*seen.values()], secure=secure, why_not_here=why_not_here)
    return await _answering(one)


def only_coordinator(
    seen: Sequence[DiscoveredService], *, secure: bool, why_not_here: str
) -> DiscoveredService:
    """Return the one coordinator that was seen, if it is one.

    ``secure``: nothing is to be sent but over TLS, as there is a token that names a
    certificate.

    Raises ConfigError naming those that were seen, and what to do.
    """
    ours = {each.name: each for each in seen if MARK in each.text and each.addresses}
    if len(ours) == 1 and not secure:
        (one,) = ours.values()
        return one
    if secure and ours:
        # Where a coordinator announces itself, there is no TLS.
        raise ConfigError(
            "the token is for a coordinator that has a certificate; say where it is, "
            f"with its port: {_listed(ours, 'https://{host}:PORT')}"
        )
    if ours:
        raise ConfigError(
            f"{len(ours)} coordinators are on the local network; say which: "
            + _listed(ours, "tcp://{host}:{port}")
        )
    raise ConfigError(
        f"no coordinator is on this machine ({why_not_here}), and none was seen on the "
        f"local network within {BROWSE_TIME:g} s: {WHAT_TO_DO}"
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
        f"the coordinator {one.name!a} was seen on the local network, but does not "
        f"answer at {tried}: if a firewall is in between, say where it is: shoal join "
        "http://HOST:4010"
    )


def _listed(ours: Mapping[str, DiscoveredService], url: str) -> str:
    return "".join(
        f"\n  shoal join {url.format(host=_host(_by_version(each)[0]), port=each.port)}"
        f"  # {ascii(name)[1:-1]}"
        for name, each in sorted(ours.items())[:LISTED_MAX]
    )


def _by_version(seen: DiscoveredService) -> list[str]:
    """Return its addresses: IPv4 first, for the others may need a zone."""
    return sorted(seen.addresses, key=lambda each: ":" in each)


def _url(address: str, port: int) -> str:
    return f"tcp://{_host(address)}:{port}"


def _host(address: str) -> str:
    return f"[{address.replace('%', ZONE)}]" if ":" in address else address
