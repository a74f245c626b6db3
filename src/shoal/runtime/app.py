"""The coordinator put together: the only module that knows every concrete part."""

import asyncio
import contextlib
import errno
import logging
import random
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from shoal.config import ServeConfig, X402Config, check_x402
from shoal.domain.credentials import DAY
from shoal.domain.errors import ConfigError, PaymentsDown, StoreError
from shoal.domain.ids import JobId
from shoal.domain.money import Micros, parse_dollars
from shoal.domain.work import Limits
from shoal.gateway.access import FIRST_KEY, Access, key_book
from shoal.gateway.app import Gateway, make_app
from shoal.gateway.auth import Keyring
from shoal.gateway.calling import Calling
from shoal.gateway.jobs import written
from shoal.gateway.moderation import Moderation
from shoal.gateway.payments import NO_PAYMENTS, Payments
from shoal.gateway.reach import Reach
from shoal.ledger.accounts import WHOLE
from shoal.ledger.keys import Signer
from shoal.ledger.prices import PriceList
from shoal.runtime.clock import LoopClock
from shoal.runtime.door import Door, token_book
from shoal.runtime.hub import Hub
from shoal.runtime.ids import new_id
from shoal.runtime.ports import user_of
from shoal.runtime.secret_files import (
    first_key,
    first_token,
    keep_certificate,
    new_secret,
    signing_seed,
)
from shoal.runtime.spot_checks import SpotChecks
from shoal.runtime.upgrades import Upgrades
from shoal.store.port import Store
from shoal.store.sqlite import SqliteStore
from shoal.transports.tls import fingerprint_of, own_certificate, server_context

BACKLOG = 2048  # connections that may wait to be accepted; fewer and bursts are dropped
IDLE_MAX = 75.0  # seconds that a connection may take over the head of a request
ASIDE = 4  # signatures that may hold up the loop: half a millisecond of checking them
PRUNE_EVERY = 3600.0  # seconds
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
PORT_MAX = 65_535
NO_WIRES: Mapping[str, Any] = {}
NO_X402 = X402Config()

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
    join: str
    """The command that adds a worker."""


@asynccontextmanager
async def coordinator(
    config: ServeConfig,
    wires: Mapping[str, Any] = NO_WIRES,
    x402: X402Config = NO_X402,
) -> AsyncIterator[Coordinator]:
    """Run a coordinator for the length of the block.

    ``wires`` holds protocols' configurations by name; a protocol without one gets its
    defaults.

    Raises ConfigError if a setting, port or folder cannot be used, StoreError if the
    database cannot.
    """
    reach = _reach(config)
    check_x402(x402)
    tls, certificate = _tls(config)
    folder = config.data_dir
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        api_key = first_key(folder, config.api_key)
        token = first_token(folder, config.join_token)
        signer = Signer.from_seed(signing_seed(folder))
        keep_certificate(folder, certificate)
    except OSError as error:
        raise ConfigError(f"--data-dir {folder}: {error.strerror}") from error
    if not token and config.host not in LOOPBACK:
        log.warning("anybody who reaches this machine can join: --join-token is empty")
    clock = LoopClock()
    store = SqliteStore(folder / "shoal.db")
    async with contextlib.AsyncExitStack() as finally_:
        await store.open()
        finally_.push_async_callback(store.close)
        hub = Hub(
            store,
            clock,
            lambda: JobId(new_id()),
            signer,
            config.queue_max,
            hedge_after=config.hedge_after or None,
            fee=_fee(config.fee),
            aside=ASIDE,
        )
        restored = await hub.restore()
        log.info("restored jobs=%d", restored)
        keyring = Keyring(await key_book(store.keys), {FIRST_KEY: api_key})
        door = Door(await token_book(store.keys), store.keys, clock)
        if certificate is not None:
            door.fingerprint = fingerprint_of(certificate)
        payments = await finally_.enter_async_context(_payments(x402))
        gateway = Gateway(
            hub,
            store,
            clock,
            store.keys,
            Access(hub, clock, keyring, store.keys, open_loopback=config.open_loopback),
            door,
            replace(Limits(), queue=config.queue_wait),
            new_secret,
            _moderation(config.moderation),
            prices=_prices(config),
            open_jobs=any(getattr(wire, "open", False) for wire in wires.values()),
            webhooks=reach is not Reach.OFF,
            payments=payments,
        )
        upgrades = Upgrades(
            hub, clock, door, wires, token, signer.public_key, secrets.token_bytes
        )
        app = make_app(gateway, upgrades.handle)
        # Clients that still wait at the end are cut off when the hub has stopped: that
        # must not cancel their jobs, which go on after the next start.
        async with _listening(app, config, tls) as port, asyncio.TaskGroup() as tasks:
            running = tasks.create_task(hub.run())
            checking = tasks.create_task(_checks(hub, store, config).run())
            pruning = tasks.create_task(_prune(gateway, config.keep_days))
            calling = tasks.create_task(_call(gateway, reach))
            door.url = _url(config.host, port, secure=tls is not None)
            upgrades.open(tasks)
            yield Coordinator(hub, door.url, port, api_key, door.invitation(token))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(config.drain):
                    await hub.drain()
            hub.hang_up_all("the coordinator is stopping")
            await upgrades.close()
            running.cancel()
            checking.cancel()
            pruning.cancel()
            calling.cancel()


@asynccontextmanager
async def _listening(
    app: web.Application, config: ServeConfig, tls: ssl.SSLContext | None
) -> AsyncIterator[int]:
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
        site = web.TCPSite(
            runner, config.host, config.port, backlog=BACKLOG, ssl_context=tls
        )
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


def _checks(hub: Hub, store: Store, config: ServeConfig) -> SpotChecks:
    if not 0 <= config.spot_checks <= 1:
        raise ConfigError(
            f"--spot-checks {config.spot_checks:g}: expected a share from 0 to 1"
        )
    checks = SpotChecks(hub, store, Random(), config.spot_checks)
    if config.spot_checks:
        hub.watch(checks.saw)
    return checks


async def _prune(gateway: Gateway, keep_days: float) -> None:
    while True:
        before = gateway.clock.wall() - keep_days * DAY
        try:
            forgotten = await gateway.store.prune(before)
        except StoreError as error:
            log.error("cannot prune: %s", error)  # jobs may still go well
        else:
            gateway.access.forget_ended(before)
            gateway.door.book.forget_ended(before)
            if forgotten:
                log.info("pruned jobs=%d", forgotten)
        await asyncio.sleep(PRUNE_EVERY)


async def _call(gateway: Gateway, reach: Reach) -> None:
    if reach is not Reach.OFF:
        show = partial(written, gateway)
        hub, store, clock = gateway.hub, gateway.store, gateway.clock
        await Calling(hub, store, clock, show, reach, random.random).run()


def _reach(config: ServeConfig) -> Reach:
    try:
        return Reach(config.webhooks)
    except ValueError:
        expected = " or ".join(each.value for each in Reach)
        raise ConfigError(
            f"--webhooks {config.webhooks}: expected {expected}"
        ) from None


@asynccontextmanager
async def _payments(config: X402Config) -> AsyncIterator[Payments]:
    """Collect payments for the length of the block, if that is wanted."""
    if config == NO_X402:
        yield NO_PAYMENTS
        return
    try:
        from shoal.gateway.x402_payments import Seller, X402Payments
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--x402-facilitator: payments need the package {error.name}, which is not "
            "installed: pip install 'shoal[x402]'"
        ) from error
    domain = {"name": config.name, "version": config.version} if config.name else {}
    payments = X402Payments(
        Seller(
            config.facilitator,
            config.pay_to,
            config.network,
            config.asset,
            config.decimals,
            domain,
        )
    )
    try:
        try:
            await payments.prepare()
        except PaymentsDown as error:
            log.warning("no job can be paid for yet, so none is taken: %s", error)
        yield payments
    finally:
        await payments.close()


def _moderation(file: Path | None) -> Moderation | None:
    if file is None:
        return None
    try:
        return Moderation(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--moderation {file}: {error}") from error


def _prices(config: ServeConfig) -> PriceList:
    return PriceList(
        *(
            _price(name, getattr(config, name))
            for name in (
                "price_fast_inference",
                "price_fast_task",
                "price_cheap_inference",
                "price_cheap_task",
            )
        )
    )


def _price(name: str, text: str) -> Micros:
    try:
        return parse_dollars(text)
    except ConfigError as error:
        raise ConfigError(f"--{name.replace('_', '-')}: {error}") from error


def _fee(percent: float) -> int:
    """Return the pool's share in basis points."""
    share = round(percent * 100)
    if not 0 <= share <= WHOLE:
        raise ConfigError(f"--fee {percent:g}: expected percent, from 0 to 100")
    return share


def _tls(config: ServeConfig) -> tuple[ssl.SSLContext | None, str | None]:
    """Return how to speak TLS, and the certificate in PEM form, if it is wanted."""
    certificate, key = config.tls_cert, config.tls_key
    if certificate is None and key is None:
        return None, None
    if certificate is None or key is None:
        given, missing = "--tls-cert", "--tls-key"
        if certificate is None:
            given, missing = missing, given
        raise ConfigError(f"{given} takes {missing} beside it: give both, or neither")
    return server_context(certificate, key), own_certificate(certificate)


def _url(host: str, port: int, *, secure: bool) -> str:
    if host in ("0.0.0.0", "::"):
        host = _lan_address()
    scheme = "https" if secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


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
