"""Announces and finds services on the local network, by multicast DNS.

Sources: RFC 6762 (multicast DNS) and RFC 6763 (services).  ``zeroconf`` is imported
only when it is needed: that takes as long as all the rest of many commands.
"""

import asyncio
import hashlib
import ipaddress
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.domain.errors import Unavailable
from shoal.protocols.seam.endpoints import DiscoveredService, ServiceRecord
from shoal.transports.own_networks import own_addresses

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, ServiceStateChange, Zeroconf
    from zeroconf.asyncio import AsyncZeroconf

SERVICES_MAX = (
    256  # services of one kind; further ones are ignored, for anyone can announce
)
ADDRESSES_MAX = 8  # of one service
TEXTS_MAX = 32  # entries of one service's TXT record
RESOLVE_TIMEOUT = 3.0  # seconds until an incomplete service is ignored
NAME_MAX = 59  # bytes; 63 are allowed, and a number may have to be added
TEXT_MAX = 255  # bytes of one entry, with its key (RFC 6763, section 6.1)
DOMAIN = ".local."
ANY_ADDRESS = frozenset({"0.0.0.0", "::"})

log = logging.getLogger("shoal.transports")


class LocalNetwork:
    """Multicast DNS on the networks of some addresses of this machine."""

    def __init__(self, zeroconf: "AsyncZeroconf", addresses: Sequence[str]) -> None:
        self._zeroconf = zeroconf
        self._addresses = addresses

    async def announce(self, service: ServiceRecord, port: int) -> str:
        """Announce a service until the network is closed; return its actual name.

        It differs if the name is taken.  Raises Unavailable.
        """
        from zeroconf import Error, ServiceInfo

        kind = service.kind + DOMAIN
        info = ServiceInfo(
            kind,
            f"{_instance_name(service.name)}.{kind}",
            port,
            properties=_text_record(service.text),
            server=_host_name(self._addresses, port),
            parsed_addresses=list(self._addresses),
        )
        try:
            await self._zeroconf.async_register_service(info, allow_name_change=True)
        except (Error, OSError) as error:
            raise Unavailable(f"{service.name} cannot be announced: {error}") from error
        return info.name.removesuffix("." + kind)

    @asynccontextmanager
    async def browse(
        self,
        kind: str,
        on_found: Callable[[DiscoveredService], None],
        on_lost: Callable[[str], None],
    ) -> AsyncIterator[None]:
        """Browse for services of a kind for the length of the block.

        ``on_found`` gets each service, and again after a change; ``on_lost`` gets the
        name of a service that has ended.
        """
        from zeroconf.asyncio import AsyncServiceBrowser

        async with asyncio.TaskGroup() as tasks:
            resolver = _ServiceResolver(
                self._zeroconf.zeroconf, tasks, kind + DOMAIN, on_found, on_lost
            )
            browser = AsyncServiceBrowser(
                self._zeroconf.zeroconf, kind + DOMAIN, handlers=[resolver.on_change]
            )
            try:
                yield
            finally:
                await browser.async_cancel()
                resolver.stop()


@asynccontextmanager
async def local_network(addresses: Sequence[str]) -> AsyncIterator[LocalNetwork]:
    """Take part in multicast DNS for the length of the block.

    ``addresses`` are addresses of this machine: services are announced on their
    interfaces, under these addresses.

    Raises Unavailable without multicast.
    """
    if not addresses:
        raise Unavailable("this machine has no address on a network with multicast")
    from zeroconf import Error
    from zeroconf.asyncio import AsyncZeroconf

    try:
        zeroconf = AsyncZeroconf(interfaces=list(addresses))
    except (Error, OSError, RuntimeError) as error:
        raise Unavailable(f"no multicast on this machine: {error}") from error
    try:
        yield LocalNetwork(zeroconf, addresses)
    finally:
        await zeroconf.async_close()  # withdraws the announced services


def addresses_of(host: str) -> tuple[str, ...]:
    """Return the addresses at which other machines reach a listener's address.

    ``0.0.0.0`` and ``::`` stand for all addresses of their version, loopback for none.
    """
    if host in ANY_ADDRESS:
        return tuple(sorted(_addresses(version=6 if host == "::" else 4)))
    parsed = ipaddress.ip_address(host.partition("%")[0])
    return () if parsed.is_loopback else (str(parsed),)


def _addresses(version: int) -> set[str]:
    """Return this machine's addresses on interfaces that are up and have multicast."""
    return {
        str(each.interface.ip)
        for each in own_addresses()
        if each.multicast
        and each.interface.version == version
        and not each.interface.is_loopback
        # A link-local one of version 6 means nothing without its interface.
        and not (version == 6 and each.interface.is_link_local)
    }


@dataclass(slots=True, eq=False)
class _ServiceResolver:
    """Resolves the services that one browser finds."""

    _zeroconf: "Zeroconf"
    _tasks: asyncio.TaskGroup
    _kind: str
    _on_found: Callable[[DiscoveredService], None]
    _on_lost: Callable[[str], None]
    # None: nothing is known yet.
    _services: dict[str, DiscoveredService | None] = field(default_factory=dict)
    _resolving: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _warned: bool = False
    _stopped: bool = False

    def on_change(
        self,
        zeroconf: "Zeroconf",
        service_type: str,
        name: str,
        state_change: "ServiceStateChange",
    ) -> None:
        """Handle a change reported by ``zeroconf``."""
        if self._stopped:
            return
        if name in self._resolving:
            self._resolving.pop(name).cancel()
        if state_change.name == "Removed":
            if self._services.pop(name, None) is not None:
                self._on_lost(self._instance(name))
            return
        if name not in self._services and len(self._services) >= SERVICES_MAX:
            self._warn_too_many()
            return
        self._services.setdefault(name, None)
        self._resolving[name] = self._tasks.create_task(self._resolve(name))

    def stop(self) -> None:
        """Stop browsing."""
        self._stopped = True
        for task in self._resolving.values():
            task.cancel()

    async def _resolve(self, name: str) -> None:
        """Resolve a service, and report it if it is new or has changed."""
        from zeroconf import BadTypeInNameException
        from zeroconf.asyncio import AsyncServiceInfo

        try:
            info = AsyncServiceInfo(self._kind, name)
        except BadTypeInNameException:
            return  # invalid name: anyone can announce anything
        found = await info.async_request(self._zeroconf, RESOLVE_TIMEOUT * 1000)
        self._resolving.pop(name, None)
        if not found or not info.port:
            return
        service = service_of(info, self._kind)
        if service.addresses and self._services.get(name) != service:
            self._services[name] = service
            self._on_found(service)

    def _instance(self, name: str) -> str:
        return name.removesuffix("." + self._kind)

    def _warn_too_many(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "over %d services of the kind %s: more are ignored",
                SERVICES_MAX,
                self._kind,
            )


def service_of(info: "ServiceInfo", kind: str) -> DiscoveredService:
    """Return a resolved service; its fields are untrusted."""
    text = {
        key.decode(errors="replace"): (value or b"").decode(errors="replace")
        for key, value in list(info.properties.items())[:TEXTS_MAX]
    }
    # The fourth version first, as it needs no zone.
    addresses = sorted(info.parsed_scoped_addresses(), key=lambda one: ":" in one)
    return DiscoveredService(
        info.name.removesuffix("." + kind),
        tuple(addresses[:ADDRESSES_MAX]),
        info.port or 0,
        text,
    )


def _instance_name(name: str) -> str:
    """Return a name that is valid for a service instance."""
    printable = "".join(
        char if char.isprintable() and char != "." else "-" for char in name
    )
    cut = printable.encode(errors="replace")[:NAME_MAX].decode(errors="ignore").strip()
    return cut or "shoal"


def _host_name(addresses: Sequence[str], port: int) -> str:
    """Return a unique host name; the machine's own belongs to the system."""
    interfaces = f"{','.join(addresses)} {port}"
    return f"shoal-{hashlib.sha256(interfaces.encode()).hexdigest()[:12]}{DOMAIN}"


def _text_record(text: Mapping[str, str]) -> dict[str, bytes]:
    return {
        key: value.encode(errors="replace")[: TEXT_MAX - len(key.encode()) - 1]
        for key, value in text.items()
    }
