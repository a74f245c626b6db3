"""The coordinator on the local network, for workers that were told of none."""

import asyncio
from collections.abc import Mapping, Sequence

from shoal.domain.errors import ConfigError, Unavailable
from shoal.protocols.crowd import Sighting
from shoal.transports.bonjour import addresses_of, local_network

LOOK_FOR = 3.0  # seconds: most answer within one
MARK = "shoal"  # the key in the TXT record of coordinators that are ours
EVERYWHERE = "0.0.0.0"  # on all networks that this machine is on
WHAT_TO_DO = (
    "start one with `shoal serve`, or say where it is: shoal join http://HOST:4010"
)
ZONE = "%25"  # what begins an address's zone in URLs (RFC 6874)
NAMED_MAX = 10  # coordinators that a message names


async def the_one_nearby(kind: str, *, secure: bool, why_not_here: str) -> str:
    """Look for coordinators that are announced as services of a kind; return the one.

    As ``the_one``.
    """
    seen: dict[str, Sighting] = {}

    def note(sighting: Sighting) -> None:
        seen[sighting.name] = sighting

    def forget(name: str) -> None:
        seen.pop(name, None)

    try:
        async with (
            local_network(addresses_of(EVERYWHERE)) as network,
            network.browse(kind, note, forget),
        ):
            await asyncio.sleep(LOOK_FOR)
    except Unavailable as error:
        raise ConfigError(
            f"no coordinator is on this machine ({why_not_here}), and none can be "
            f"looked for on the local network: {error}; {WHAT_TO_DO}"
        ) from error
    return the_one([*seen.values()], secure=secure, why_not_here=why_not_here)


def the_one(seen: Sequence[Sighting], *, secure: bool, why_not_here: str) -> str:
    """Return the address of the one coordinator that was seen, if it is one.

    ``secure``: nothing is to be sent but over TLS, as there is a token that names a
    certificate.

    Raises ConfigError naming those that were seen, and what to do.
    """
    ours = {each.name: each for each in seen if MARK in each.text and each.addresses}
    if len(ours) == 1 and not secure:
        (one,) = ours.values()
        return f"tcp://{_host(one)}:{one.port}"
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
        f"local network within {LOOK_FOR:g} s: {WHAT_TO_DO}"
    )


def _listed(ours: Mapping[str, Sighting], url: str) -> str:
    return "".join(
        f"\n  shoal join {url.format(host=_host(each), port=each.port)}"
        f"  # {ascii(name)[1:-1]}"
        for name, each in sorted(ours.items())[:NAMED_MAX]
    )


def _host(seen: Sighting) -> str:
    """Return where it is: IPv4 first, for the others may need a zone."""
    address = min(seen.addresses, key=lambda each: ":" in each)
    return f"[{address.replace('%', ZONE)}]" if ":" in address else address
