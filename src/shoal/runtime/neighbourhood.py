"""Takes part in the local network: announces what listens, and looks for others."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from shoal.domain.errors import Unavailable
from shoal.protocols.crowd import Service
from shoal.runtime.meeting import Meetings
from shoal.transports.bonjour import LocalNetwork, local_network
from shoal.transports.tcp_listening import Bound

EVERYWHERE = ("0.0.0.0", "::")
LOOK_EVERY = 10.0  # seconds between looks whether this machine is on other networks
AGAIN_AFTER = 30.0  # seconds until it is tried again where there is no multicast

log = logging.getLogger("shoal.neighbourhood")


@dataclass(frozen=True, slots=True)
class Announced:
    """A service, and where it listens."""

    wire: str
    service: Service
    bound: Bound


class Neighbourhood:
    """The services that we announce, and the browsers that look for others.

    ``addresses`` says at which addresses others find what listens on one; what nobody
    finds is not announced.
    """

    def __init__(
        self,
        announced: Sequence[Announced],
        meetings: Sequence[Meetings],
        addresses: Callable[[str], tuple[str, ...]],
    ) -> None:
        self._announced = announced
        self._addresses = addresses
        found = any(self._may_be_found(each.bound) for each in announced)
        self._meetings = [each for each in meetings if found or not each.browser.shy]
        self._told = False  # that it cannot be, which is said once

    async def take_part(self) -> None:
        """Announce and look until cancelled, anew when this machine's addresses change.

        Returns if there is nothing to announce and nobody looks.
        """
        while True:
            places = self._places()
            if not places and not self._meetings and self._hidden:
                return
            try:
                await self._take_part(places)
            except Unavailable as error:
                self._complain(error)
                await asyncio.sleep(AGAIN_AFTER)
            finally:
                for each in self._meetings:
                    each.lose_all()

    @property
    def _hidden(self) -> bool:
        """Whether all that is announced listens where others never find it."""
        return all(each.bound.address not in EVERYWHERE for each in self._announced)

    def _may_be_found(self, bound: Bound) -> bool:
        return bound.address in EVERYWHERE or bool(self._addresses(bound.address))

    def _places(self) -> tuple[str, ...]:
        """Return the addresses whose networks we take part in."""
        listening = {
            place
            for each in self._announced
            for place in self._addresses(each.bound.address)
        }
        if not listening and self._meetings:
            return self._addresses(EVERYWHERE[0])  # only to look
        return tuple(sorted(listening))

    async def _take_part(self, places: tuple[str, ...]) -> None:
        """Take part until the addresses change.  Raises Unavailable."""
        async with local_network(places) as network, AsyncExitStack() as browsing:
            for each in self._meetings:
                browser = network.browse(each.browser.kind, each.saw, each.lost)
                await browsing.enter_async_context(browser)
            for one in self._announced:
                if self._addresses(one.bound.address):
                    await _announce(network, one, places)
            self._told = False
            while self._places() == places:  # noqa: ASYNC110  # no system tells
                await asyncio.sleep(LOOK_EVERY)

    def _complain(self, error: Unavailable) -> None:
        if self._told:
            return
        self._told = True
        wires = {each.wire for each in self._announced}
        wires |= {each.wire for each in self._meetings}
        flags = " or ".join(f"--{wire}-peers HOST:PORT" for wire in sorted(wires))
        log.warning(
            "peers on the local network are not found: %s; use %s", error, flags
        )


async def _announce(
    network: LocalNetwork, one: Announced, places: tuple[str, ...]
) -> None:
    name = await network.announce(one.service, one.bound.port)
    log.info(
        "announced wire=%s name=%r addresses=%s port=%d",
        one.wire,
        name,
        ",".join(places),
        one.bound.port,
    )
