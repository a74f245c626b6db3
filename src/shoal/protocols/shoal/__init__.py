"""Shoal's own wire: the vocabulary itself, over the HTTP port of a coordinator.

A WebSocket, encrypted by ``seam.encrypted_stream``, carries everything between a worker
and its coordinator: see ``docs/protocols/shoal.md``.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from shoal import __version__
from shoal.domain.errors import ConfigError
from shoal.domain.vocabulary import TextRoute, TextSent
from shoal.domain.work import JobKind
from shoal.protocols.seam.context import ProtocolContext, WorkerProfile
from shoal.protocols.seam.endpoints import (
    TLS_KEY,
    AcceptedConnection,
    BulkRoute,
    DiscoveredService,
    OutgoingConnection,
    ServiceBrowser,
    ServiceRecord,
    UpgradeRequest,
    WebSocketRoute,
)
from shoal.protocols.seam.peer_addresses import AddressDialer, split_url
from shoal.protocols.seam.peer_session import PeerSession
from shoal.protocols.seam.protocol import Endpoint, WireProtocol
from shoal.protocols.seam.session import Session
from shoal.protocols.seam.worker_session import (
    AcceptedJobs,
    MembershipState,
    WorkerSession,
)
from shoal.protocols.shoal.codec import EVENTS
from shoal.protocols.shoal.ranks import ShoalRanks
from shoal.protocols.shoal.session import (
    ADDRESS_MAX,
    ADDRESSES_MAX,
    LocalEnd,
    ShoalSession,
)
from shoal.protocols.shoal.streams import FRAME_MAX
from shoal.protocols.shoal.text import TEXT_PATH, TextSender

__all__ = ["PROTOCOL", "Config"]

WORKER_PATH = "/shoal"
POOL_PATH = "/shoal/pool"
BULK_PATH = "/shoal/bulk"
SERVICE = "_shoal._tcp"
MARK = "shoal"  # in the record of the service: the release
RANK = 0  # no other protocol has a path of its own that begins so
SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
MESSAGE_MAX = FRAME_MAX + 1024  # bytes, with the records that encrypt it


@dataclass(frozen=True, slots=True)
class Config:
    """How this pool meets other pools of Shoal."""

    passcode: str = field(
        default="",
        metadata={
            "help": "passcode of a group of pools; pools that have it serve each other "
            "and submit jobs to each other",
            "secret": True,
        },
    )
    peers: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "pools to connect to: http://HOST:PORT, separated by commas; the "
            "passcode may be a join token of theirs, with which this pool only serves",
            "metavar": "URLS",
        },
    )
    browse: bool = field(
        default=False,
        metadata={
            "help": "discovery of pools with this passcode on the local network, and "
            "connections to those found"
        },
    )
    workers: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "workers to connect to that listen (shoal join --listen): "
            "http://HOST:PORT, separated by commas; they have this pool's join token",
            "metavar": "URLS",
        },
    )


def endpoints(config: Config, context: ProtocolContext) -> Sequence[Endpoint]:
    """Return the paths for workers and pools, and connections to others of both.

    Raises ConfigError for an address that cannot be dialled, if pools are looked for
    without a passcode, and if workers are to be dialled without a join token.
    """
    if config.workers and not context.token:
        raise ConfigError(
            "--shoal-workers: a worker that listens admits a coordinator that proves "
            "its token, and this pool has none: give --join-token"
        )
    if config.browse and not config.passcode:
        raise ConfigError(
            "--shoal-browse: anyone can announce a pool, so give the passcode of "
            "yours: --shoal-passcode"
        )
    local = LocalEnd(
        *(context.name, context.identity, False, context.hardware, context.plain),
        *(config.passcode, context.epoch),
        verify=context.verify,
        admission=context.admission,
        throttle=context.throttle,
        addresses=context.addresses,
    )

    def route(path: str, service: ServiceRecord | None = None) -> WebSocketRoute:
        def accept(request: UpgradeRequest, now: float) -> AcceptedConnection:
            with_pool = path == POOL_PATH
            return AcceptedConnection(
                ShoalSession(local, request.address, with_pool=with_pool)
            )

        return WebSocketRoute(
            *(RANK, lambda request: request.path == path, accept, MESSAGE_MAX),
            encrypts=True,
            service=service,
        )

    service = ServiceRecord(SERVICE, context.name, {MARK: __version__})
    enabled: list[Endpoint] = [route(WORKER_PATH, service), route(POOL_PATH)]
    enabled.append(BulkRoute(RANK, lambda request: request.path == BULK_PATH))
    enabled += [_dial_pool(local, url) for url in config.peers]
    with_token = replace(local, token=context.token)
    enabled += [_dial_worker(with_token, url) for url in config.workers]
    if context.peer_addresses:
        dial = partial(_dial_pool, local)
        enabled.append(AddressDialer("shoal", context.peer_addresses, dial))
    if config.browse:
        enabled.append(ServiceBrowser(SERVICE, partial(_dial_found, local)))
    return enabled


def _dial_pool(local: LocalEnd, address: str) -> OutgoingConnection:
    """Return a connection to the pool at a URL, or HOST:PORT.

    Its certificate may be any if it has to prove the passcode on the connection.

    Raises ConfigError if it cannot be dialled.
    """
    address = address if "://" in address else f"http://{address}"
    url = _websocket_url(address, POOL_PATH, plain=local.plain)
    if local.token and not local.plain and local.admission is not None:
        url = url.replace("+wss://", "+wss-any://")
    return OutgoingConnection(
        url,
        lambda now: ShoalSession(local, address, dialled=True, with_pool=True),
        message_max=MESSAGE_MAX,
        bulk_url=url.removeprefix("noise+").removesuffix(POOL_PATH) + BULK_PATH,
    )


def _dial_worker(local: LocalEnd, address: str) -> OutgoingConnection:
    """Return a connection to a worker that listens at a URL, or HOST:PORT.

    Raises ConfigError if it cannot be dialled.
    """
    address = address if "://" in address else f"http://{address}"
    return OutgoingConnection(
        _websocket_url(address, WORKER_PATH, plain=local.plain),
        lambda now: ShoalSession(local, address, dialled=True),
        message_max=MESSAGE_MAX,
    )


def worker_endpoints(config: Config, context: ProtocolContext) -> Sequence[Endpoint]:
    """Return the path of a worker at which coordinators connect to it."""
    local = LocalEnd(
        *(context.name, context.identity, True, context.hardware, context.plain),
        epoch=context.epoch,
        verify=context.verify,
        admission=context.admission,
    )

    def accept(request: UpgradeRequest, now: float) -> AcceptedConnection:
        return AcceptedConnection(ShoalSession(local, request.address))

    def is_ours(request: UpgradeRequest) -> bool:
        return request.path == WORKER_PATH

    return [WebSocketRoute(RANK, is_ours, accept, MESSAGE_MAX, encrypts=True)]


def _dial_found(
    local: LocalEnd, service: DiscoveredService, now: float
) -> OutgoingConnection | None:
    """Return a connection to a pool that was discovered; None: there is one."""
    if service.name == local.name or local.is_connected(service.name, now):
        return None
    if not service.addresses:
        return None
    scheme = "https" if TLS_KEY in service.text else "http"
    return _dial_pool(local, service.url(scheme))


def dial_peer(url: str, profile: WorkerProfile) -> OutgoingConnection:
    """Return a connection to a pool, for a peer that serves nothing.

    Raises ConfigError if the URL cannot be dialled.
    """
    local = LocalEnd(
        *(profile.name, profile.identity, False, profile.hardware, profile.plain),
        *(profile.token or profile.passcode, profile.epoch),
    )
    return _dial_pool(local, url)


def _websocket_url(url: str, path: str, *, plain: bool) -> str:
    """Return the URL of a path below that of a coordinator.

    Raises ConfigError if the URL is invalid.
    """
    expected = "expected the coordinator's address, as http://HOST:PORT"
    parts = split_url(url, SCHEMES, expected)
    noise = "" if plain else "noise+"
    # As in the address of the OpenAI-compatible API.
    path = parts.path.rstrip("/").removesuffix("/v1") + path
    return f"{noise}{SCHEMES[parts.scheme]}://{parts.netloc}{path}"


class ShoalDialer:
    """Joins one coordinator of a pool, and rejoins it or another one.

    It knows the addresses that were given, and those that coordinators have named: at
    the latter only one with the same key is accepted.
    """

    message_max = MESSAGE_MAX
    headers: Mapping[str, str] = {}
    keeps_calls: Literal[True] = True

    def __init__(self, url: str, profile: WorkerProfile) -> None:
        address_of = partial(_websocket_url, path=WORKER_PATH, plain=profile.plain)
        self.url = address_of(url)
        self._given = [self.url, *map(address_of, profile.addresses)]
        self._named: dict[str, str] = {}  # the keys of those that named them
        self._membership = MembershipState(
            AcceptedJobs(keeps=True), restriction=profile.restriction
        )
        self._local = LocalEnd(
            *(profile.name, profile.identity, True, profile.hardware, profile.plain),
            *(profile.token, profile.epoch),
            offers=profile.first_offers,
            models=profile.expected_models,
            on_refused=self._on_refused,
            verify=profile.verify,
            coordinator=profile.coordinator_key,
            on_coordinator=profile.on_coordinator,
            on_addresses=self._on_addresses,
            wake=profile.wake,
        )

    def start_session(self, headers: Mapping[str, str]) -> WorkerSession:
        return WorkerSession(self._session, EVENTS, self._membership)

    def text_url(self, route: TextRoute) -> str | None:
        scheme = self.url.partition("://")[0]
        if not scheme.startswith("noise+"):
            return None  # the ends could not prove the ticket
        if not route.address:
            return self.url.removesuffix(WORKER_PATH) + TEXT_PATH
        with suppress(ConfigError):
            url = _websocket_url(route.address[:ADDRESS_MAX], TEXT_PATH, plain=False)
            if url.partition("://")[0] == scheme:
                return url
        return None

    def start_text(self, route: TextRoute) -> Session[object, TextSent]:
        return TextSender(route)

    def final_reason(self, code: int, text: str) -> str | None:
        membership, url = self._membership, self.url
        membership.admitted = False  # until the next admission
        known = list(dict.fromkeys((*self._given, *self._named)))
        self.url = known[(known.index(url) + 1) % len(known)]
        if url not in self._given and membership.refusal:
            membership.refusal = ""  # another pool's by now
            del self._named[url]
        return membership.final_reason("--token")

    def _session(self, now: float) -> PeerSession:
        return ShoalSession(
            self._local,
            dialled=True,
            running=self._membership.jobs.names,
            expected="" if self.url in self._given else self._named[self.url],
        )

    def _on_addresses(self, addresses: Sequence[str], key: str) -> None:
        """Note the addresses of a pool, of those that are as safe as the given ones."""
        scheme = self.url.partition("://")[0]
        named: dict[str, str] = {}
        for each in addresses[:ADDRESSES_MAX] if key else ():
            with suppress(ConfigError):
                url = _websocket_url(each[:ADDRESS_MAX], WORKER_PATH, plain=False)
                if url.partition("://")[0] == scheme:
                    named[url] = key
        if self.url not in self._given:
            named.setdefault(self.url, key)  # it is connected there
        if named:
            self._named = named

    def _on_refused(self, reason: str) -> None:
        self._membership.refusal = reason


PROTOCOL = WireProtocol(
    name="shoal",
    config=Config,
    endpoints=endpoints,
    token=lambda config: "",
    schemes=frozenset({"http", "https", "ws", "wss"}),
    dial=ShoalDialer,
    peers="Shoal's workers and pools",
    kinds=frozenset(JobKind),
    has_keys=True,
    joint=True,
    preferred=True,
    service=SERVICE,
    encrypts=True,
    worker_endpoints=worker_endpoints,
    ranks=ShoalRanks,
    peering=dial_peer,
)
