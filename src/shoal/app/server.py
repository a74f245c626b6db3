"""Runs a coordinator: opens the store, the hub, the gateway and the listeners."""

import asyncio
import importlib
import logging
import os
import random
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

from aiohttp import web

from shoal.app.database import check_store, contents_at, shared_secrets, store_at
from shoal.app.endpoints import anonymous_http, make_endpoints, plain_peers
from shoal.app.fleet_files import with_fleets
from shoal.app.https import Https, keep_valid, open_https
from shoal.app.memory_trim import trim_memory_regularly
from shoal.app.network import NetworkContext, PortsByWire, open_network
from shoal.app.node import Node
from shoal.app.parts import (
    HTTP_SOCKET,
    LINK_SOCKET,
    OLLAMA_SOCKET,
    RETURN_SECONDS,
    HubPart,
)
from shoal.app.settings import (
    NO_X402,
    CoordinatorSettings,
    open_payments,
    read_settings,
)
from shoal.app.websocket_router import STOPPING, WebSocketRouter
from shoal.batches.client_files import ClientFiles
from shoal.batches.runner import BatchRunner
from shoal.calls.durable import DurableCalls
from shoal.config import ServeConfig, X402Config, check_x402, secret_files
from shoal.config.loader import check_secret, check_secrets
from shoal.config.private_files import make_private_folder
from shoal.config.runtime_file import publish_url
from shoal.coordinator.admission import WorkerAdmission, load_join_tokens
from shoal.coordinator.auth_throttle import AuthThrottle
from shoal.coordinator.blob_transfer import BlobTransfer
from shoal.coordinator.hub import Hub
from shoal.coordinator.spot_checks import SpotChecks
from shoal.coordinator.store_health import StoreHealth
from shoal.domain.addresses import is_own_host
from shoal.domain.errors import ConfigError, Fenced, StoreBroken, StoreError
from shoal.domain.ids import JobId
from shoal.front.hub_links import FrontLinks
from shoal.gateway.accounts.invitations import printed_token
from shoal.gateway.accounts.sign_in import new_link
from shoal.gateway.accounts.usage import record_open_jobs
from shoal.gateway.all_operations import OLLAMA_API
from shoal.gateway.app import Gateway, first_look, make_app, make_ollama_app
from shoal.gateway.batches.line_runner import PoolLineJobs
from shoal.gateway.context import AccountsGateway, JobsGateway
from shoal.gateway.http.access import FIRST_KEY, Access, key_cache
from shoal.gateway.http.authentication import Keyring
from shoal.gateway.http.body import BodyReader
from shoal.gateway.http.browser_sessions import BrowserSessions
from shoal.gateway.http.ids import new_id
from shoal.gateway.jobs.endpoints import encode_job
from shoal.gateway.jobs.payments import Payments
from shoal.gateway.jobs.webhook_sender import WebhookSender
from shoal.gateway.jobs.webhooks import EgressPolicy
from shoal.gateway.metrics.monitoring import METRICS
from shoal.models.library_server import LibraryServer
from shoal.peers.connections import PeerConnections
from shoal.peers.inbound_jobs import PeerJobPolicy
from shoal.protocols.seam.endpoints import MembershipProber
from shoal.protocols.seam.relay import RelayRoute
from shoal.store import signing_keys
from shoal.store.port import Store
from shoal.transports.acceptor import BoundAddress
from shoal.transports.clock import LoopClock
from shoal.transports.http_server import http_listener, public_urls, unix_listener
from shoal.transports.spans import SpanSink, open_spans
from shoal.transports.strangers import Strangers, bounded_strangers
from shoal.worker.hardware import this_machine

SIGNATURES_INLINE_MAX = (
    4  # signatures that may hold up the loop: half a millisecond of checking them
)
PRUNE_EVERY = 3600.0  # seconds
RECORD_EVERY = 60.0  # seconds between counts of open jobs
CHECK_EVERY = 2.0  # seconds between looks at the database's files
UNCHECKED = "cannot check the database: %s"
BROKEN_NOTICE = 5.0  # seconds in which /healthz says why the process will end
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


@dataclass(frozen=True, slots=True)
class _StoredSecrets:
    """The secrets in the data directory."""

    api_key: str
    token: str  # empty: any worker may join


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
    settings = read_settings(config)
    check_x402(x402)
    clock = LoopClock()
    check_store(config.store)
    shared = shared_secrets(config)
    if shared is not None:
        await asyncio.to_thread(shared.fetch)
    wires = with_fleets(wires, config.data_dir)
    if not is_own_host(config.host):
        check_secrets("serve", config)
        for wire, wire_config in wires.items():
            check_secrets(wire, wire_config)
    https = open_https(config, settings.pages.hosts, clock.wall())
    stored = _secrets(config, https)
    async with AsyncExitStack() as finally_:
        contents, blobs = finally_.enter_context(
            contents_at(config, settings.blobs_max)
        )
        store = (
            store_at(config.store, config.data_dir, blobs)
            if node is None
            else node.make_store(blobs)
        )
        try:
            signing = await finally_.enter_async_context(
                _opened(
                    *(store, config, clock.wall()),
                    lacked_witness=shared is not None and shared.lacked_witness,
                )
            )
        except BaseException:
            if shared is not None:  # as where another node has the pool
                await asyncio.to_thread(shared.take_back)
            raise
        if shared is not None:
            await asyncio.to_thread(shared.publish)
        if node is not None:
            await finally_.enter_async_context(node.holding())
        await asyncio.to_thread(blobs.open)
        spans = await finally_.enter_async_context(
            open_spans(
                config.otlp_endpoint,
                os.environ,
                "shoal",
                config.name or socket.gethostname() or "shoal",
            )
        )
        hub = Hub(
            store,
            clock,
            lambda: JobId(new_id()),
            signing.signer,
            config.queue_max,
            hedge_after=config.hedge_after or None,
            fee=settings.fee,
            aside=SIGNATURES_INLINE_MAX,
            blobs=BlobTransfer(blobs),
            approve_nodes=config.approve_nodes,
            traced=spans is not None,
            call_secret=secret_files.new_secret().encode(),
        )
        calls = DurableCalls(hub, store, clock)
        hub.carried = calls
        returning = 0.0 if part is None else RETURN_SECONDS
        if restored := await hub.restore(returning):
            log.info("restored jobs=%d", restored)
        uploads = ClientFiles(
            store.files, contents, new_id, settings.file_max, settings.files_max
        )
        await uploads.open()
        payments = await finally_.enter_async_context(
            open_payments(x402, settings.prices)
        )
        anyone = not stored.token or bool(settings.contacts)
        unencrypted = _unencrypted(config, wires, https, anyone)
        gateway = await _gateway(
            config,
            settings,
            wires,
            store,
            clock,
            hub,
            calls,
            uploads,
            stored,
            payments,
            unencrypted,
            spans,
            signing,
        )
        admission = gateway.admission
        admission.fingerprint = None if https is None else https.fingerprint
        endpoints = make_endpoints(
            clock,
            admission,
            wires,
            stored.token,
            signing.signer,
            secrets.token_bytes,
            config.name or socket.gethostname() or "shoal",
            await asyncio.to_thread(this_machine),
            settings.contacts,
            secret_files.signing_key_created_at(config.data_dir),
            relay_open=config.relay_open,
            plain=config.plain,
        )
        gateway.relays.extend(
            (wire, each.relay)
            for wire, each in endpoints
            if isinstance(each, RelayRoute)
        )
        gateway.probers.extend(
            (wire, each)
            for wire, each in endpoints
            if isinstance(each, MembershipProber)
        )
        sharing = await finally_.enter_async_context(gateway.sharing)
        policy = PeerJobPolicy(settings.limits, settings.prices, settings.moderation)
        peers = PeerConnections(
            *(hub, clock, admission, policy, sharing, gateway.directory),
            share=gateway.bodies.share,
        )
        # On all ports.
        strangers = bounded_strangers(clock, 1 if part is None else config.fronts + 1)
        websockets = WebSocketRouter(
            clock, admission, endpoints, peers.serve, strangers
        )
        has_fronts = part is not None
        app = make_app(gateway, websockets.handle, strangers, from_fronts=has_fronts)
        links = FrontLinks(hub, gateway.access, clock, app[METRICS].requests.add)
        drain = config.drain

        def hand_over() -> None:
            nonlocal drain
            drain = 0.0
            links.hand_over()

        network = NetworkContext(
            *(peers.serve, admission, clock, Random(), config.host),
            None if https is None else https.presented,
            hidden=config.no_discovery,
            strangers=strangers,
        )
        # Clients that still wait at the end are disconnected after the hub has stopped:
        # their jobs must not be cancelled, because they continue after the next start.
        async with (
            _http_listener(gateway, app, config, https, strangers, part) as http,
            _ollama_listener(
                *(gateway, app, config, https, strangers, part)
            ) as ollama_port,
            _link_listener(links, part),
            asyncio.TaskGroup() as tasks,
        ):
            background = [
                tasks.create_task(hub.run()),
                tasks.create_task(calls.run()),
                tasks.create_task(gateway.batches.run(PoolLineJobs(gateway))),
                tasks.create_task(_spot_checks(hub, store, settings).run()),
                tasks.create_task(_prune(gateway, settings.kept)),
                tasks.create_task(_record_open_jobs(gateway)),
                tasks.create_task(_send_webhooks(gateway, settings.reach)),
                tasks.create_task(
                    keep_valid(
                        *(https, config.data_dir, clock),
                        None if shared is None else shared.publish,
                    )
                ),
                tasks.create_task(_end_if_broken(hub.store_health, node)),
                tasks.create_task(_check_regularly(store, signing)),
                tasks.create_task(_report_damage(store, hub.store_health)),
                tasks.create_task(trim_memory_regularly()),
            ]
            port = http.port
            urls = partial(public_urls, config.host, port, secure=https is not None)
            if node is not None:
                urls = admission.addresses = partial(getattr, node, "all_urls")
            admission.urls = urls
            admission.join_token = stored.token
            admission.prints_limited_tokens = config.join_token is None
            admission.loopback_only = is_own_host(config.host)
            async with open_network(
                endpoints, replace(network, http=http)
            ) as admission.ports:
                websockets.open(tasks)
                if node is not None:
                    await finally_.enter_async_context(
                        node.entrance(_named(admission.ports), strangers)
                    )
                finally_.enter_context(
                    publish_url(
                        config.data_dir, config.host, port, secure=https is not None
                    )
                )
                first = next(iter(gateway.access.keyring.first))
                accounts = gateway.select(AccountsGateway)
                dashboard = (await new_link(accounts, first)).url
                yield RunningCoordinator(
                    hub,
                    urls()[0],
                    port,
                    ollama_port,
                    admission.ports,
                    stored.api_key,
                    partial(_invite, gateway),
                    "" if https is None else admission.with_fingerprint(stored.api_key),
                    None if https is None else https.authority,
                    dashboard,
                    hand_over,
                )
                peers.drain(STOPPING)
                calls.stop()
                gateway.batches.stop()
                with suppress(TimeoutError, StoreError):
                    async with asyncio.timeout(drain):
                        await hub.drain()
                        await calls.stored()
                if hub.store_health.failing_for:
                    log.warning(
                        "stopped while the store was failing: jobs without stored "
                        "results run again after the next start"
                    )
                hub.disconnect_all(STOPPING)
                peers.disconnect_all(STOPPING)
                await websockets.close()
            for each in background:
                each.cancel()
            await _check_at_stop(store, signing, hub.store_health)


@asynccontextmanager
async def _opened(
    store: Store, config: ServeConfig, at: float, *, lacked_witness: bool
) -> AsyncIterator[signing_keys.SigningKeys]:
    """Open the store for the length of the block; gives the keys of its log.

    ``lacked_witness``: nothing in the folder says whether the log went back.

    Raises StoreError; StoreBroken if the database is not the one that the key has
    signed, unless a new log is asked for.  ConfigError if the key is damaged.
    """
    folder = config.data_dir
    begun_anew = False
    try:
        await store.open(create=not signing_keys.has_signed(folder))
    except StoreBroken:
        if not config.new_log:
            raise
        await store.open()
        begun_anew = True
    try:
        try:
            signing = await asyncio.to_thread(signing_keys.open_keys, folder, at)
            problem = await signing.problem(store.ledger)
            doubted = problem is not None or lacked_witness
            if begun_anew or (doubted and config.new_log):
                head = await store.ledger.head()
                signing = await asyncio.to_thread(
                    signing_keys.begin_new_log, folder, head, at
                )
                log.warning(
                    "new receipt log, signed with %s", signing.signer.public_key.hex()
                )
            elif problem is not None:
                raise StoreBroken(problem, store.name)
            await signing.show(await store.ledger.head())
        except OSError as error:
            raise ConfigError(f"--data-dir {folder}: {error.strerror}") from error
        yield signing
    finally:
        await store.close()


async def _invite(gateway: Gateway) -> str:
    token = ""
    with suppress(StoreError):  # `shoal join-line` makes one later
        token = await printed_token(gateway.select(AccountsGateway))
    return gateway.admission.invitation(token)


def _secrets(config: ServeConfig, https: Https | None) -> _StoredSecrets:
    """Return what is in the folder, made at first use.  Raises ConfigError."""
    folder = config.data_dir
    try:
        make_private_folder(folder)
        api_key = secret_files.first_key(folder, config.api_key)
        token = secret_files.first_token(folder, config.join_token)
        secret_files.store_certificate(
            folder, None if https is None else https.certificate
        )
    except OSError as error:
        raise ConfigError(f"--data-dir {folder}: {error.strerror}") from error
    if not is_own_host(config.host):
        # They may be older than the address: stored while only this machine could
        # present them.
        check_secret(f"{folder / secret_files.KEY_FILE} (--api-key)", api_key)
        if token:
            check_secret(f"{folder / secret_files.TOKEN_FILE} (--join-token)", token)
        else:
            log.warning(
                "any machine that reaches this one can join: --join-token is empty"
            )
    return _StoredSecrets(api_key, token)


def _unencrypted(
    config: ServeConfig, wires: Mapping[str, object], https: Https | None, anyone: bool
) -> Mapping[str, str]:
    """Return the peers of other machines whose connections are not encrypted.

    They are by wire, and logged.  ``anyone``: some need no credential.
    """
    if is_own_host(config.host):
        return {}
    unencrypted = plain_peers(wires, tls=https is not None, anyone=anyone)
    listed = ", ".join(f"{peers} ({wire})" for wire, peers in unencrypted.items())
    if listed:
        log.warning("not encrypted, if any connect: %s", listed)
    return unencrypted


async def _gateway(
    config: ServeConfig,
    settings: CoordinatorSettings,
    wires: Mapping[str, object],
    store: Store,
    clock: LoopClock,
    hub: Hub,
    calls: DurableCalls,
    uploads: ClientFiles,
    stored: _StoredSecrets,
    payments: Payments,
    unencrypted: Mapping[str, str],
    spans: SpanSink | None,
    signing: signing_keys.SigningKeys,
) -> Gateway:
    keyring = Keyring(await key_cache(store.keys), {FIRST_KEY: stored.api_key})
    failures = AuthThrottle()
    tokens = await load_join_tokens(store.keys)
    admission = WorkerAdmission(tokens, store.keys, clock, failures)
    bodies = BodyReader()
    sessions = BrowserSessions(store.sign_ins, settings.pages)
    await sessions.open()
    return Gateway(
        hub,
        calls,
        store,
        clock,
        Access(
            hub,
            clock,
            keyring,
            store.keys,
            sessions,
            open_loopback=config.open_loopback,
            failures=failures,
        ),
        admission,
        settings.limits,
        uploads,
        BatchRunner(store.batches, uploads, clock, hub.store_health, bodies.share),
        secret_files.new_secret,
        signing,
        settings.moderation,
        prices=settings.prices,
        anonymous=anonymous_http(wires)
        | ({OLLAMA_API} if config.ollama_open else set()),
        pages=settings.pages,
        proxies=settings.proxies,
        egress_policy=settings.reach,
        payments=payments,
        unencrypted=unencrypted,
        bodies=bodies,
        sharing=LibraryServer(settings.library),
        created_at=secret_files.signing_key_created_at(config.data_dir),
        started_at=clock.wall(),
        spans=spans,
    )


@asynccontextmanager
async def _http_listener(
    gateway: Gateway,
    app: web.Application,
    config: ServeConfig,
    https: Https | None,
    strangers: Strangers,
    part: HubPart | None,
) -> AsyncIterator[BoundAddress]:
    """Serve HTTP for the length of the block; gives where clients reach it."""
    if part is not None:
        async with unix_listener(app, part.socket(HTTP_SOCKET)):
            yield part.bound
        return
    async with http_listener(
        *(app, config.host, config.port),
        None if https is None else https.context,
        strangers,
        look=first_look(gateway),
    ) as bound:
        yield bound


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


@asynccontextmanager
async def _ollama_listener(
    gateway: Gateway,
    app: web.Application,
    config: ServeConfig,
    https: Https | None,
    strangers: Strangers,
    part: HubPart | None,
) -> AsyncIterator[int | None]:
    """Serve Ollama's API for the length of the block; gives its port, if it has one."""
    if config.ollama_port is None:
        yield None
        return
    ollama = make_ollama_app(app, gateway, strangers, from_fronts=part is not None)
    if part is not None:
        async with unix_listener(ollama, part.socket(OLLAMA_SOCKET)):
            yield part.ollama_port
        return
    tls = None if https is None else https.context
    where = (config.host, config.ollama_port)
    async with http_listener(
        ollama, *where, tls, strangers, look=first_look(gateway), flag="--ollama-port"
    ) as bound:
        yield bound.port


def _spot_checks(hub: Hub, store: Store, settings: CoordinatorSettings) -> SpotChecks:
    checks = SpotChecks(hub, store, Random(), settings.spot_checks)
    if settings.spot_checks:
        hub.subscribe(checks.on_facts)
    return checks


async def _prune(gateway: Gateway, kept: float) -> None:
    while True:
        before = gateway.clock.wall() - kept
        try:
            forgotten = await gateway.store.prune(before)
        except StoreError as error:
            log.error("cannot prune: %s", error.located)  # jobs may still go well
        else:
            gateway.access.forget_ended(before)
            gateway.admission.tokens.drop_ended(before)
            if forgotten:
                log.info("pruned jobs=%d", forgotten)
        await asyncio.sleep(PRUNE_EVERY)


async def _record_open_jobs(gateway: Gateway) -> None:
    while True:
        # In the middle of each minute, so that none is left out.
        since = gateway.clock.wall() - RECORD_EVERY / 2
        await asyncio.sleep(RECORD_EVERY - since % RECORD_EVERY)
        with suppress(StoreError):  # a plot lacks a minute; the hub reports the store
            await record_open_jobs(gateway.hub, gateway.store, gateway.clock)


async def _end_if_broken(health: StoreHealth, node: Node | None) -> None:
    """Raise StoreBroken or Fenced once it is, after those who look could see it.

    A node stands by then, at once.
    """
    if node is not None:
        node.on_lost(health.report_broken)
    error = await health.wait_broken()
    if node is None or not isinstance(error, Fenced):
        await asyncio.sleep(BROKEN_NOTICE)
    _raise_if_broken(health)


def _named(ports: PortsByWire) -> dict[str, int]:
    """Return the ports of wires by one name each."""
    return {
        f"{wire} {label}": port
        for wire, labelled in ports.items()
        for label, port in labelled.items()
    }


def _raise_if_broken(health: StoreHealth) -> None:
    """Raise Fenced, or StoreBroken for any other reason."""
    error = health.failure
    if isinstance(error, Fenced):
        raise error
    if health.is_broken and error is not None:
        raise StoreBroken(str(error), error.path)


async def _check_regularly(store: Store, signing: signing_keys.SigningKeys) -> None:
    """Check the database for damage, even while it is not in use."""
    failing = False
    while True:
        await asyncio.sleep(CHECK_EVERY)
        error = await _check(store, signing)
        # Damage is reported; all else may pass, and is logged when it begins.
        failed = error is not None and not isinstance(error, StoreBroken)
        if error is not None and failed and not failing:
            log.warning(UNCHECKED, error.located)
        failing = failed


async def _check_at_stop(
    store: Store, signing: signing_keys.SigningKeys, health: StoreHealth
) -> None:
    """Raise StoreError if the process must not end as if all were well."""
    _raise_if_broken(health)
    error = await _check(store, signing)
    if isinstance(error, StoreBroken):
        raise error
    if error is not None:
        log.warning(UNCHECKED, error.located)


async def _check(store: Store, signing: signing_keys.SigningKeys) -> StoreError | None:
    """Look for damage to the database, and record what its log has shown."""
    try:
        await store.check()
        await signing.show(await store.ledger.head())
    except StoreError as error:
        return error
    return None


async def _report_damage(store: Store, health: StoreHealth) -> None:
    health.report_broken(await store.wait_damaged())


async def _send_webhooks(gateway: Gateway, reach: EgressPolicy) -> None:
    if reach is not EgressPolicy.OFF:
        show = partial(encode_job, gateway.select(JobsGateway))
        hub, store, clock = gateway.hub, gateway.store, gateway.clock
        sender = WebhookSender(
            *(hub, store, clock, show, reach, random.random),
            results=gateway.webhook_results,
        )
        await sender.run()
