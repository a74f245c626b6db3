"""Announces listeners on the local network and browses for peers (mDNS)."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from shoal.domain.errors import Unavailable
from shoal.peers.discovered_peers import DiscoveredPeers
from shoal.protocols.seam.endpoints import ServiceRecord
from shoal.transports.acceptor import BoundAddress
from shoal.transports.mdns import LocalNetwork, local_network

WILDCARD_ADDRESSES = ("0.0.0.0", "::")
CHECK_INTERVAL = 10.0  # seconds between looks whether this machine is on other networks
RETRY_AFTER = 30.0  # seconds until it is tried again where there is no multicast

log = logging.getLogger("shoal.app")


@dataclass(frozen=True, slots=True)
class AnnouncedService:
    """A service, and where it listens."""

    wire: str
    service: ServiceRecord
    bound: BoundAddress


class LocalDiscovery:
    """Announces this coordinator's services, and browses for other services.

    ``addresses`` returns the addresses at which others reach a listener's address; a
    listener without any is not announced.
    """

    def __init__(
        self,
        announced: Sequence[AnnouncedService],
        discovered: Sequence[DiscoveredPeers],
        addresses: Callable[[str], tuple[str, ...]],
    ) -> None:
        self._announced = announced
        self._addresses = addresses
        reachable = any(self._is_reachable(each.bound) for each in announced)
        self._discovered = [
            each for each in discovered if reachable or not each.browser.reciprocal
        ]
        self._warned = False  # that mDNS is unavailable, once

    async def run(self) -> None:
        """Announce and browse until cancelled; restart when the addresses change.

        Returns if there is nothing to announce and nothing to browse for.
        """
        while True:
            addresses = self._listen_addresses()
            if not addresses and not self._discovered and self._hidden:
                return
            try:
                await self._run_once(addresses)
            except Unavailable as error:
                self._warn_unavailable(error)
                await asyncio.sleep(RETRY_AFTER)
            finally:
                for each in self._discovered:
                    each.on_all_lost()

    @property
    def _hidden(self) -> bool:
        """Whether all that is announced listens where others never find it."""
        return all(
            each.bound.address not in WILDCARD_ADDRESSES for each in self._announced
        )

    def _is_reachable(self, bound: BoundAddress) -> bool:
        return bound.address in WILDCARD_ADDRESSES or bool(
            self._addresses(bound.address)
        )

    def _listen_addresses(self) -> tuple[str, ...]:
        """Return the addresses whose networks we take part in."""
        listening = {
            address
            for each in self._announced
            for address in self._addresses(each.bound.address)
        }
        if not listening and self._discovered:
            return self._addresses(WILDCARD_ADDRESSES[0])  # only to look
        return tuple(sorted(listening))

    async def _run_once(self, addresses: tuple[str, ...]) -> None:
        """Take part until the addresses change.  Raises Unavailable."""
        async with local_network(addresses) as network, AsyncExitStack() as browsing:
            for each in self._discovered:
                browser = network.browse(each.browser.kind, each.on_found, each.on_lost)
                await browsing.enter_async_context(browser)
            for service in self._announced:
                if self._addresses(service.bound.address):
                    await _announce(network, service, addresses)
            self._warned = False
            while self._listen_addresses() == addresses:  # noqa: ASYNC110  # no system tells
                await asyncio.sleep(CHECK_INTERVAL)

    def _warn_unavailable(self, error: Unavailable) -> None:
        if self._warned:
            return
        self._warned = True
        wires = {each.wire for each in self._announced}
        wires |= {each.wire for each in self._discovered}
        flags = " or ".join(f"--{wire}-peers HOST:PORT" for wire in sorted(wires))
        log.warning(
            "peers on the local network are not found: %s; use %s", error, flags
        )


async def _announce(
    network: LocalNetwork, service: AnnouncedService, addresses: tuple[str, ...]
) -> None:
    name = await network.announce(service.service, service.bound.port)
    log.info(
        "announced wire=%s name=%r addresses=%s port=%d",
        service.wire,
        name,
        ",".join(addresses),
        service.bound.port,
    )
