"""The coordinator put together: the only module that knows every concrete part."""

import asyncio
import logging
import random
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from random import Random

from shoal.config import ServeConfig, X402Config, check_x402
from shoal.domain.credentials import DAY
from shoal.domain.errors import ConfigError, StoreError
from shoal.domain.ids import JobId
from shoal.gateway.access import FIRST_KEY, Access, key_book
from shoal.gateway.app import Gateway, make_app
from shoal.gateway.auth import Keyring
from shoal.gateway.calling import Calling
from shoal.gateway.jobs import written
from shoal.gateway.payments import Payments
from shoal.gateway.reach import Reach
from shoal.ledger.keys import Signer
from shoal.models.sharing import Sharing
from shoal.protocols.crowd import Rounds
from shoal.runtime.blobs import Blobs
from shoal.runtime.clock import LoopClock
from shoal.runtime.crowd import Crowds
from shoal.runtime.door import Door, token_book
from shoal.runtime.endpoints import anonymous_http, endpoints
from shoal.runtime.hub import Hub
from shoal.runtime.ids import new_id
from shoal.runtime.neighbours import House
from shoal.runtime.reaching import Means, Ports, reaching
from shoal.runtime.secret_files import (
    first_key,
    first_token,
    keep_certificate,
    new_secret,
    signing_seed,
)
from shoal.runtime.settings import NO_X402, Settings, collecting, settings_of
from shoal.runtime.spot_checks import SpotChecks
from shoal.runtime.upgrades import STOPPING, Upgrades
from shoal.runtime.whereabouts import leaving_url
from shoal.store.blobs import BlobFiles
from shoal.store.sqlite import SqliteStore
from shoal.transports.listening import listening, url_of
from shoal.transports.tls import Presented, fingerprint_of
from shoal.worker.hardware import this_machine

ASIDE = 4  # signatures that may hold up the loop: half a millisecond of checking them
PRUNE_EVERY = 3600.0  # seconds
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
NO_WIRES: Mapping[str, object] = {}

log = logging.getLogger("shoal.app")


@dataclass(frozen=True, slots=True)
class Coordinator:
    """A running coordinator."""

    hub: Hub
    url: str
    port: int
    direct: Ports
    """The ports beside that of HTTP."""
    api_key: str
    join: str
    """The command that adds a worker."""


@dataclass(frozen=True, slots=True)
class _Secrets:
    """What the coordinator keeps in its folder for nobody else to read."""

    api_key: str
    token: str  # empty: whoever wants to may join
    signer: Signer


@asynccontextmanager
async def coordinator(
    config: ServeConfig,
    wires: Mapping[str, object] = NO_WIRES,
    x402: X402Config = NO_X402,
) -> AsyncIterator[Coordinator]:
    """Run a coordinator for the length of the block.

    ``wires`` holds protocols' configurations by name; a protocol without one gets its
    defaults.

    Raises ConfigError if a setting, port or folder cannot be used, StoreError if the
    database cannot.
    """
    settings = settings_of(config)
    check_x402(x402)
    kept = _secrets(config, settings.certificate)
    clock = LoopClock()
    files = BlobFiles(config.data_dir / "blobs", settings.blobs_max)
    store = SqliteStore(config.data_dir / "shoal.db", files)
    async with AsyncExitStack() as finally_:
        await asyncio.to_thread(files.open)
        await store.open()
        finally_.push_async_callback(store.close)
        hub = _hub(config, settings, store, clock, kept.signer, Blobs(files))
        if restored := await hub.restore():
            log.info("restored jobs=%d", restored)
        payments = await finally_.enter_async_context(collecting(x402))
        gateway = await _gateway(
            config, settings, wires, store, clock, hub, kept, payments
        )
        door = gateway.door
        ways = endpoints(
            clock,
            door,
            wires,
            kept.token,
            kept.signer,
            secrets.token_bytes,
            config.name or socket.gethostname() or "shoal",
            await asyncio.to_thread(this_machine),
            settings.contacts,
        )
        gateway.rounds.extend(
            (wire, each) for wire, each in ways if isinstance(each, Rounds)
        )
        sharing = await finally_.enter_async_context(Sharing(settings.library))
        house = House(settings.limits, settings.prices, settings.moderation)
        crowds = Crowds(hub, clock, door, house, sharing)
        upgrades = Upgrades(hub, clock, door, ways, crowds.serve)
        app = make_app(gateway, upgrades.handle)
        tls = _presented(settings)
        means = Means(
            *(crowds.serve, door, clock, Random(), config.host, tls),
            hidden=config.no_discovery,
        )
        secure = settings.tls is not None
        # Clients that still wait at the end are cut off when the hub has stopped: that
        # must not cancel their jobs, which go on after the next start.
        async with (
            listening(app, config.host, config.port, settings.tls) as port,
            asyncio.TaskGroup() as tasks,
        ):
            beside = [
                tasks.create_task(hub.run()),
                tasks.create_task(_checks(hub, store, settings).run()),
                tasks.create_task(_prune(gateway, config.keep_days)),
                tasks.create_task(_call(gateway, settings.reach)),
            ]
            door.url = url_of(config.host, port, secure=secure)
            door.only_here = config.host in LOOPBACK
            async with reaching(ways, means) as door.direct:
                upgrades.open(tasks)
                join = door.invitation(kept.token)
                finally_.enter_context(
                    leaving_url(config.data_dir, config.host, port, secure=secure)
                )
                yield Coordinator(hub, door.url, port, door.direct, kept.api_key, join)
                crowds.drain(STOPPING)
                with suppress(TimeoutError):
                    async with asyncio.timeout(config.drain):
                        await hub.drain()
                hub.hang_up_all(STOPPING)
                crowds.hang_up_all(STOPPING)
                await upgrades.close()
            for each in beside:
                each.cancel()


def _presented(settings: Settings) -> Presented | None:
    if settings.tls is None or settings.certificate is None:
        return None
    return Presented(settings.tls, fingerprint_of(settings.certificate))


def _secrets(config: ServeConfig, certificate: str | None) -> _Secrets:
    """Return what is in the folder, made at first use.  Raises ConfigError."""
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
    return _Secrets(api_key, token, signer)


def _hub(
    config: ServeConfig,
    settings: Settings,
    store: SqliteStore,
    clock: LoopClock,
    signer: Signer,
    blobs: Blobs,
) -> Hub:
    return Hub(
        store,
        clock,
        lambda: JobId(new_id()),
        signer,
        config.queue_max,
        hedge_after=config.hedge_after or None,
        fee=settings.fee,
        aside=ASIDE,
        blobs=blobs,
    )


async def _gateway(
    config: ServeConfig,
    settings: Settings,
    wires: Mapping[str, object],
    store: SqliteStore,
    clock: LoopClock,
    hub: Hub,
    kept: _Secrets,
    payments: Payments,
) -> Gateway:
    keyring = Keyring(await key_book(store.keys), {FIRST_KEY: kept.api_key})
    door = Door(await token_book(store.keys), store.keys, clock)
    if settings.certificate is not None:
        door.fingerprint = fingerprint_of(settings.certificate)
    return Gateway(
        hub,
        store,
        clock,
        store.keys,
        Access(hub, clock, keyring, store.keys, open_loopback=config.open_loopback),
        door,
        settings.limits,
        new_secret,
        settings.moderation,
        prices=settings.prices,
        anonymous=anonymous_http(wires),
        webhooks=settings.reach,
        payments=payments,
    )


def _checks(hub: Hub, store: SqliteStore, settings: Settings) -> SpotChecks:
    checks = SpotChecks(hub, store, Random(), settings.spot_checks)
    if settings.spot_checks:
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
