"""Runs a coordinator: opens the store, the hub, the gateway and the listeners."""

import asyncio
import importlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

from aiohttp import web

from shoal.app.background import check_at_stop, start_background
from shoal.app.core import Core, open_core
from shoal.app.database import contents_at, shared_secrets
from shoal.app.endpoints import anonymous_http, make_endpoints, plain_peers
from shoal.app.network import NetworkContext, PortsByWire, open_network
from shoal.app.node import Node
from shoal.app.parts import (
    HTTP_SOCKET,
    LINK_SOCKET,
    OLLAMA_SOCKET,
    RETURN_SECONDS,
    HubPart,
)
from shoal.app.settings import NO_X402, open_payments
from shoal.app.setup import Setup, read_setup
from shoal.app.websocket_router import STOPPING, WebSocketRouter
from shoal.batches.client_files import ClientFiles
from shoal.batches.runner import BatchRunner
from shoal.config import ServeConfig, X402Config, secret_files
from shoal.config.runtime_file import publish_url
from shoal.coordinator.admission import WorkerAdmission, load_join_tokens
from shoal.coordinator.auth_throttle import AuthThrottle
from shoal.coordinator.hub import Hub
from shoal.domain.addresses import is_own_host
from shoal.domain.errors import StoreError
from shoal.front.hub_links import FrontLinks
from shoal.gateway.accounts.invitations import printed_token
from shoal.gateway.accounts.sign_in import new_link
from shoal.gateway.all_operations import OLLAMA_API
from shoal.gateway.app import Gateway, first_look, make_app, make_ollama_app
from shoal.gateway.context import AccountsGateway
from shoal.gateway.http.access import FIRST_KEY, Access, key_cache
from shoal.gateway.http.authentication import Keyring
from shoal.gateway.http.body import BodyReader
from shoal.gateway.http.browser_sessions import BrowserSessions
from shoal.gateway.http.ids import new_id
from shoal.gateway.metrics.monitoring import METRICS
from shoal.models.file_hashes import FileHashes
from shoal.models.library_server import LibraryServer
from shoal.peers.connections import PeerConnections
from shoal.peers.inbound_jobs import PeerJobPolicy
from shoal.protocols.seam.endpoints import MembershipProber
from shoal.protocols.seam.protocol import Endpoint
from shoal.protocols.seam.relay import RelayRoute
from shoal.transports.acceptor import BoundAddress
from shoal.transports.http_server import http_listener, public_urls, unix_listener
from shoal.transports.strangers import Strangers, bounded_strangers
from shoal.worker.hardware import this_machine

NO_WIRES: Mapping[str, object] = {}

log = logging.getLogger("shoal.app")


@dataclass(frozen=True, slots=True)
class RunningCoordinator:
    """A running coordinator."""

    hub: Hub
    url: str
    port: int
    ollama_port: int | None
    """The port of Ollama's API, if it has one of its own."""
    ports: PortsByWire
    """The ports of wires beside that of HTTP."""
    api_key: str
    invite: Callable[[], Awaitable[str]]
    """Returns the command that adds a worker; the token in it may be a new one."""
    pinned_key: str
    """The API key with the fingerprint of the TLS key; empty without TLS."""
    authority: Path | None
    """The file of the local authority that signed the certificate."""
    dashboard: str
    """The link that opens the dashboard and signs in, once, as the first key."""
    hand_over: Callable[[], None] = lambda: None
    """Cuts the links to fronts, whose clients go on where the next hub is."""


def preload(config: ServeConfig) -> None:
    """Import what a coordinator otherwise imports while it starts.

    Raises ConfigError.
    """
    with contents_at(config, 0):
        shared_secrets(config)
    importlib.import_module("shoal.transports.local_authority")


@asynccontextmanager
async def run_coordinator(
    config: ServeConfig,
    wires: Mapping[str, object] = NO_WIRES,
    x402: X402Config = NO_X402,
    part: HubPart | None = None,
    node: Node | None = None,
) -> AsyncIterator[RunningCoordinator]:
    """Run a coordinator for the length of the block.

    ``part``: its HTTP is served by fronts, in other processes.  ``node``: other nodes
    stand by; raises InUse if one of them has the pool.

    ``wires`` holds protocols' configurations by name; a protocol without one gets its
    defaults.

    Raises ConfigError if a setting, port or folder cannot be used, StoreError if the
    database cannot; within the block, StoreBroken once it can be written no more.
    """
    setup = await read_setup(config, wires, x402, part, node)
    async with (
        open_core(setup) as core,
        _open_gateway(setup, core) as gateway,
        _open_workers(setup, gateway) as workers,
        AsyncExitStack() as published,
    ):
        strangers, handle = workers.strangers, workers.websockets.handle
        app = make_app(gateway, handle, strangers, from_fronts=part is not None)
        clock, counted = setup.clock, app[METRICS].requests.add_counted
        text_secret = b"" if part is None else secret_files.new_secret().encode()
        links = FrontLinks(gateway.hub, gateway.access, clock, counted, text_secret)
        # Clients that still wait at the end are disconnected after the hub has stopped:
        # their jobs must not be cancelled, because they continue after the next start.
        async with (
            _http_listener(setup, gateway, app, strangers, config.port) as http,
            _ollama_listener(setup, gateway, app, strangers) as ollama_port,
            _link_listener(links, part),
            asyncio.TaskGroup() as tasks,
        ):
            background = start_background(tasks, setup, gateway)
            admission = gateway.admission
            where = config.host, http.port
            secure = setup.https is not None
            admission.urls = partial(public_urls, *where, secure=secure)
            if node is not None:
                admission.urls = partial(getattr, node, "all_urls")
                admission.addresses = admission.urls
            async with open_network(
                workers.endpoints, replace(workers.network, http=http)
            ) as admission.ports:
                workers.websockets.open(tasks)
                if node is not None:
                    await published.enter_async_context(
                        node.entrance(_named(admission.ports), strangers)
                    )
                published.enter_context(
                    publish_url(config.data_dir, *where, secure=secure)
                )
                # Only now: a start that is slow takes nothing of the clients' time.
                clock.call_at(clock.now() + RETURN_SECONDS, gateway.hub.end_return)
                yield await _running(setup, gateway, http.port, ollama_port, links)
                drain = 0.0 if links.is_handed_over else config.drain
                await _end_jobs(gateway, workers, drain)
            for each in background:
                each.cancel()
            await check_at_stop(gateway)


@asynccontextmanager
async def _open_gateway(setup: Setup, core: Core) -> AsyncIterator[Gateway]:
    """Make the gateway, which takes payments for the length of the block."""
    config, settings, clock = setup.config, setup.settings, setup.clock
    store, hub, https = core.store, core.hub, setup.https
    uploads = ClientFiles(
        store.files, core.contents, new_id, settings.file_max, settings.files_max
    )
    await uploads.open()
    async with open_payments(setup.x402, settings.prices) as payments:
        unencrypted = _unencrypted(setup)
        keyring = Keyring(await key_cache(store.keys), {FIRST_KEY: setup.api_key})
        failures = AuthThrottle()
        admission = WorkerAdmission(
            *(await load_join_tokens(store.keys), store.keys, clock, failures),
            join_token=setup.token,
            prints_limited_tokens=config.join_token is None,
            fingerprint=None if https is None else https.fingerprint,
            loopback_only=is_own_host(config.host),
        )
        bodies = BodyReader()
        sessions = BrowserSessions(store.sign_ins, settings.pages)
        await sessions.open()
        access = Access(
            *(hub, clock, keyring, store.keys, sessions),
            open_loopback=config.open_loopback,
            failures=failures,
        )
        yield Gateway(
            *(hub, core.calls, store, clock, access, admission),
            settings.limits,
            uploads,
            BatchRunner(store.batches, uploads, clock, hub.store_health, bodies.share),
            secret_files.new_secret,
            core.signing,
            settings.moderation,
            prices=settings.prices,
            anonymous=anonymous_http(setup.wires)
            | ({OLLAMA_API} if config.ollama_open else set()),
            pages=settings.pages,
            proxies=settings.proxies,
            lists_loadable=settings.lists_loadable,
            placement=settings.placement,
            egress_policy=settings.reach,
            payments=payments,
            unencrypted=unencrypted,
            bodies=bodies,
            sharing=LibraryServer(
                *(settings.library, FileHashes(config.data_dir)),
                round(config.share_rate * 1e6),
            ),
            created_at=secret_files.signing_key_created_at(config.data_dir),
            started_at=clock.wall(),
            spans=core.spans,
        )


def _unencrypted(setup: Setup) -> Mapping[str, str]:
    """Return the peers of other machines whose connections are not encrypted.

    They are by wire, and logged.
    """
    if is_own_host(setup.config.host):
        return {}
    # Whether some need no credential.
    anyone = not setup.token or bool(setup.settings.contacts)
    unencrypted = plain_peers(setup.wires, tls=setup.https is not None, anyone=anyone)
    listed = ", ".join(f"{peers} ({wire})" for wire, peers in unencrypted.items())
    if listed:
        log.warning("not encrypted, if any connect: %s", listed)
    return unencrypted


@dataclass(frozen=True, slots=True)
class _Workers:
    """What workers and peers connect to."""

    endpoints: Sequence[tuple[str, Endpoint]]
    peers: PeerConnections
    websockets: WebSocketRouter
    strangers: Strangers  # on all ports
    network: NetworkContext


@asynccontextmanager
async def _open_workers(setup: Setup, gateway: Gateway) -> AsyncIterator[_Workers]:
    """Make the endpoints of all wires, and share models for the length of the block."""
    config, settings, clock = setup.config, setup.settings, setup.clock
    admission = gateway.admission
    endpoints = make_endpoints(
        *(clock, admission, setup.wires, setup.token, gateway.signing.signer),
        secrets.token_bytes,
        setup.name,
        await asyncio.to_thread(this_machine),
        settings.contacts,
        gateway.created_at,
        relay_open=config.relay_open,
        plain=config.plain,
    )
    gateway.relays.extend(
        (wire, each.relay) for wire, each in endpoints if isinstance(each, RelayRoute)
    )
    gateway.probers.extend(
        (wire, each) for wire, each in endpoints if isinstance(each, MembershipProber)
    )
    policy = PeerJobPolicy(settings.limits, settings.prices, settings.moderation)
    async with gateway.sharing as sharing:
        peers = PeerConnections(
            *(gateway.hub, clock, admission, policy, sharing, gateway.directory),
            share=gateway.bodies.share,
        )
        ports = 1 if setup.part is None else config.fronts + 1
        strangers = bounded_strangers(clock, ports)
        websockets = WebSocketRouter(
            *(clock, admission, endpoints, peers.serve, strangers, sharing.bulk)
        )
        network = NetworkContext(
            *(peers.serve, admission, clock, Random(), config.host),
            None if setup.https is None else setup.https.presented,
            hidden=config.no_discovery,
            strangers=strangers,
        )
        yield _Workers(endpoints, peers, websockets, strangers, network)


@asynccontextmanager
async def _http_listener(
    setup: Setup,
    gateway: Gateway,
    app: web.Application,
    strangers: Strangers,
    port: int,
    unix_socket: str = HTTP_SOCKET,
    flag: str = "--port",
) -> AsyncIterator[BoundAddress]:
    """Serve HTTP for the length of the block; gives where it is, or the main port is.

    Fronts, if there are any, reach it at ``unix_socket``.
    """
    if setup.part is not None:
        async with unix_listener(app, setup.part.socket(unix_socket)):
            yield setup.part.bound
        return
    async with http_listener(
        *(app, setup.config.host, port),
        None if setup.https is None else setup.https.context,
        strangers,
        look=first_look(gateway),
        flag=flag,
    ) as bound:
        yield bound


@asynccontextmanager
async def _ollama_listener(
    setup: Setup, gateway: Gateway, app: web.Application, strangers: Strangers
) -> AsyncIterator[int | None]:
    """Serve Ollama's API for the length of the block; gives its port, if it has one."""
    part, port = setup.part, setup.config.ollama_port
    if port is None:
        yield None
        return
    ollama = make_ollama_app(app, gateway, strangers, from_fronts=part is not None)
    where = port, OLLAMA_SOCKET, "--ollama-port"
    async with _http_listener(setup, gateway, ollama, strangers, *where) as bound:
        yield bound.port if part is None else part.ollama_port


@asynccontextmanager
async def _link_listener(
    links: FrontLinks, part: HubPart | None
) -> AsyncIterator[None]:
    """Accept links of fronts for the length of the block, if there are any."""
    if part is None:
        yield
        return
    async with links.listening(part.socket(LINK_SOCKET)):
        yield


def _named(ports: PortsByWire) -> dict[str, int]:
    """Return the ports of wires by one name each."""
    return {
        f"{wire} {label}": port
        for wire, labelled in ports.items()
        for label, port in labelled.items()
    }


async def _running(
    setup: Setup,
    gateway: Gateway,
    port: int,
    ollama_port: int | None,
    links: FrontLinks,
) -> RunningCoordinator:
    admission, https, key = gateway.admission, setup.https, setup.api_key
    first = next(iter(gateway.access.keyring.first))
    link = await new_link(gateway.select(AccountsGateway), first)
    return RunningCoordinator(
        *(gateway.hub, admission.urls()[0], port, ollama_port, admission.ports, key),
        partial(_invite, gateway),
        "" if https is None else admission.with_fingerprint(key),
        None if https is None else https.authority,
        link.url,
        links.hand_over,
    )


async def _invite(gateway: Gateway) -> str:
    token = ""
    with suppress(StoreError):  # `shoal join-line` makes one later
        token = await printed_token(gateway.select(AccountsGateway))
    return gateway.admission.invitation(token)


async def _end_jobs(gateway: Gateway, workers: _Workers, drain: float) -> None:
    """Let jobs end for ``drain`` seconds, then disconnect the workers."""
    workers.peers.drain(STOPPING)
    gateway.calls.stop()
    gateway.batches.stop()
    with suppress(TimeoutError, StoreError):
        async with asyncio.timeout(drain):
            await gateway.hub.drain()
            await gateway.calls.stored()
    if gateway.hub.store_health.failing_for:
        log.warning(
            "stopped while the store was failing: jobs without stored results run "
            "again after the next start"
        )
    gateway.hub.leave_all(STOPPING)
    workers.peers.disconnect_all(STOPPING)
    await workers.websockets.close()
