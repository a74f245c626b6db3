"""The coordinator put together: the only module that knows every concrete part."""

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from shoal.config import ServeConfig
from shoal.domain.errors import ConfigError, Refused, StoreError
from shoal.domain.ids import JobId
from shoal.domain.work import Limits
from shoal.gateway.app import Gateway, make_app
from shoal.gateway.auth import Keyring
from shoal.gateway.moderation import Moderation
from shoal.protocols import discover
from shoal.protocols.session import Hello, WebSocketRoute
from shoal.runtime.clock import Clock, LoopClock
from shoal.runtime.hub import Hub
from shoal.runtime.ports import user_of
from shoal.runtime.serving import serve_worker
from shoal.store.sqlite import SqliteStore
from shoal.transports import websocket

BACKLOG = 2048  # connections that may wait to be accepted; fewer and bursts are dropped
SECRET_SIZE = 20  # bytes; in hex, for a token that begins with a dash is no argument
IDLE_MAX = 75.0  # seconds that a connection may take over the head of a request
PRUNE_EVERY = 3600.0  # seconds
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
FAREWELL = 3.0  # seconds that workers' connections get to end
PORT_MAX = 65_535
NO_WIRES: Mapping[str, Any] = {}

log = logging.getLogger("shoal.app")
http_log = logging.getLogger("shoal.http")
# Anybody can leave early, or send what is no HTTP: aiohttp would quote it, with the
# keys in it.
http_log.addFilter(
    lambda record: (
        not (
            record.exc_info
            and isinstance(record.exc_info[1], (HttpProcessingError, ConnectionError))
        )
    )
)


@dataclass(frozen=True, slots=True)
class Coordinator:
    """A running coordinator."""

    hub: Hub
    url: str
    port: int
    api_key: str
    join_token: str

    @property
    def join(self) -> str:
        """The command that adds a worker."""
        token = f" --token {self.join_token}" if self.join_token else ""
        return f"shoal join {self.url}{token}"


@asynccontextmanager
async def coordinator(
    config: ServeConfig, wires: Mapping[str, Any] = NO_WIRES
) -> AsyncIterator[Coordinator]:
    """Run a coordinator for the length of the block.

    ``wires`` holds protocols' configurations by name; a protocol without one gets its
    defaults.

    Raises ConfigError if a port or folder cannot be used, StoreError if the database
    cannot.
    """
    folder = config.data_dir
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        api_key = _api_key(folder / "api-key", config.api_key)
        token = config.join_token
        if token is None:
            token = _secret(folder / "join-token", "")
    except OSError as error:
        raise ConfigError(f"--data-dir {folder}: {error.strerror}") from error
    if not token and config.host not in LOOPBACK:
        log.warning("anybody who reaches this machine can join: --join-token is empty")
    clock = LoopClock()
    store = SqliteStore(folder / "shoal.db")
    await store.open()
    try:
        hub = Hub(store, clock, _new_job_id, config.queue_max)
        restored = await hub.restore()
        log.info("restored jobs=%d", restored)
        gateway = Gateway(
            hub,
            store,
            clock,
            Keyring({"default": api_key}),
            replace(Limits(), queue=config.queue_wait),
            _moderation(config.moderation),
        )
        upgrades = _Upgrades(hub, clock, wires, token)
        app = make_app(gateway, upgrades.handle)
        # Clients that still wait at the end are cut off when the hub has stopped: that
        # must not cancel their jobs, which go on after the next start.
        async with _listening(app, config) as port, asyncio.TaskGroup() as tasks:
            running = tasks.create_task(hub.run())
            pruning = tasks.create_task(_prune(store, clock, config.keep_days))
            upgrades.open(tasks)
            yield Coordinator(hub, _url(config.host, port), port, api_key, token)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(config.drain):
                    await hub.drain()
            hub.hang_up_all("the coordinator is stopping")
            await upgrades.close()
            running.cancel()
            pruning.cancel()
    finally:
        await store.close()


class _Upgrades:
    """Gives each WebSocket connection to the protocol that claims it."""

    def __init__(
        self,
        hub: Hub,
        clock: Clock,
        wires: Mapping[str, Any],
        token: str,
    ) -> None:
        self._hub = hub
        self._clock = clock
        self._tasks: asyncio.TaskGroup | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._routes: list[tuple[str, WebSocketRoute]] = []
        start = int(clock.wall() * 1000)
        for name, protocol in discover().items():
            config = wires.get(name) or protocol.config()
            if not config.token:
                config = replace(config, token=token)
            for endpoint in protocol.endpoints(config, start):
                self._routes.append((name, endpoint))
        self._routes.sort(key=lambda route: route[1].rank)

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Take connections from now on, each served by one of ``tasks``."""
        self._tasks = tasks

    async def close(self) -> None:
        """Take no more connections; give those that are ending a moment for it."""
        self._tasks = None
        if self._serving:
            await asyncio.wait(self._serving, timeout=FAREWELL)
        for serving in self._serving:
            serving.cancel()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self._tasks is None:
            raise web.HTTPServiceUnavailable(text="the coordinator is stopping\n")
        path, _, query = request.raw_path.partition("?")
        headers = {name.lower(): value for name, value in request.headers.items()}
        hello = Hello(path, query, headers)
        for wire, route in self._routes:
            if route.claims(hello):
                return await self._serve(request, hello, wire, route, self._tasks)
        raise web.HTTPNotFound(text="no worker protocol answers at this address\n")

    async def _serve(
        self,
        request: web.Request,
        hello: Hello,
        wire: str,
        route: WebSocketRoute,
        tasks: asyncio.TaskGroup,
    ) -> web.StreamResponse:
        try:
            accepted = route.accept(hello, self._clock.now())
        except Refused as refused:
            # Browsers and most clients see a close code, but no HTTP status.
            link, response = await websocket.accept(request, {}, route.message_max)
            await link.close(refused.code, str(refused))
            peer = request.remote
            log.warning("refused wire=%s peer=%s reason=%r", wire, peer, str(refused))
            return response
        link, response = await websocket.accept(
            request, accepted.headers, route.message_max
        )
        # A task of its own, for a handler is cancelled when its connection is lost,
        # and what the worker said last has yet to be read.
        serving = tasks.create_task(
            serve_worker(self._hub, self._clock, wire, accepted.session, link)
        )
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        await asyncio.shield(serving)
        return response


@asynccontextmanager
async def _listening(app: web.Application, config: ServeConfig) -> AsyncIterator[int]:
    if config.port > PORT_MAX:
        raise ConfigError(f"--port {config.port}: expected at most {PORT_MAX}")
    # A client that leaves cancels its handler, and with it its job.
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=http_log,
        handler_cancellation=True,
        keepalive_timeout=IDLE_MAX,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.host, config.port, backlog=BACKLOG)
        try:
            await site.start()
        except OSError as error:
            user = user_of(config.port) if error.errno == errno.EADDRINUSE else None
            why = f"it is used by {user}" if user else error.strerror
            raise ConfigError(
                f"cannot listen on {config.host} port {config.port}: {why}; "
                "choose another --port (0 lets the system choose) or --host"
            ) from error
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def _prune(store: SqliteStore, clock: Clock, keep_days: float) -> None:
    while True:
        before = clock.wall() - keep_days * 86_400
        try:
            forgotten = await store.prune(before)
        except StoreError as error:
            log.error("cannot prune: %s", error)  # jobs may still go well
        else:
            if forgotten:
                log.info("pruned jobs=%d", forgotten)
        await asyncio.sleep(PRUNE_EVERY)


def _moderation(file: Path | None) -> Moderation | None:
    if file is None:
        return None
    try:
        return Moderation(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--moderation {file}: {error}") from error


def _url(host: str, port: int) -> str:
    if host in ("0.0.0.0", "::"):
        host = _lan_address()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _lan_address() -> str:
    """Return the address that other machines reach this one by, as a best guess."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: a datagram socket only looks up the route.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


def _api_key(file: Path, given: str) -> str:
    """Return the API key; one that was given is kept, for commands on this machine."""
    if not given:
        return _secret(file, "sk-shoal-")
    if not given.isascii() or not given.isprintable() or " " in given:
        raise ConfigError("--api-key: expected printable ASCII without spaces")
    with open(file, "w", opener=_private) as kept:
        kept.write(given + "\n")
    return given


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _secret(file: Path, prefix: str) -> str:
    """Return the secret that a file holds, made at first use."""
    with contextlib.suppress(FileNotFoundError):
        if secret := file.read_text().strip():
            return secret
        # Not taken as "no secret": that would open the door to anyone.
        raise ConfigError(f"{file} is empty: delete it, and a new one is made")
    made = prefix + secrets.token_hex(SECRET_SIZE)
    with open(file, "x", opener=_private) as new:
        new.write(made + "\n")
    return made


def _new_job_id() -> JobId:
    return JobId(secrets.token_hex(12))
