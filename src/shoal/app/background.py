"""The tasks of a coordinator that run beside its connections until it stops."""

import asyncio
import ctypes
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from shoal.app.https import keep_valid
from shoal.app.node import Node
from shoal.app.setup import Setup
from shoal.coordinator.placer import Placer
from shoal.coordinator.spot_checks import SpotChecks
from shoal.coordinator.store_health import StoreHealth
from shoal.domain.errors import Fenced, StoreBroken, StoreError
from shoal.gateway.accounts.usage import record_open_jobs
from shoal.gateway.app import Gateway
from shoal.gateway.batches.line_runner import PoolLineJobs
from shoal.gateway.context import JobsGateway
from shoal.gateway.jobs.endpoints import encode_job
from shoal.gateway.jobs.webhook_sender import WebhookSender
from shoal.gateway.jobs.webhooks import EgressPolicy
from shoal.gateway.models.deployments import describe_machine

TRIM_EVERY = 60.0  # seconds


async def trim_memory_regularly() -> None:
    """Return freed memory once a minute, until cancelled.

    In a thread, because it takes some milliseconds for each 10 MB that it returns.
    """
    while True:
        await asyncio.sleep(TRIM_EVERY)
        await asyncio.to_thread(trim_memory)


def trim_memory() -> None:
    """Return freed memory, where the C library does not do so by itself."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def _find_malloc_trim() -> Callable[[int], int] | None:
    """Return the function of glibc; other libraries have none."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):  # Windows knows no such library
        return None
    return trim


_malloc_trim = _find_malloc_trim()


PRUNE_EVERY = 3600.0  # seconds
RECORD_EVERY = 60.0  # seconds between counts of open jobs
CHECK_EVERY = 2.0  # seconds between looks at the database's files
UNCHECKED = "cannot check the database: %s"
BROKEN_NOTICE = 5.0  # seconds in which /healthz says why the process will end

log = logging.getLogger("shoal.app")


def start_background(
    tasks: asyncio.TaskGroup, setup: Setup, gateway: Gateway
) -> Sequence[asyncio.Task[None]]:
    """Start them; the caller cancels them once all jobs have ended."""
    publish = None if setup.shared is None else setup.shared.publish
    describe = partial(describe_machine, gateway.directory)
    Placer(gateway.hub, setup.clock, describe, gateway.placement)
    return [
        tasks.create_task(each)
        for each in (
            gateway.hub.run(),
            gateway.calls.run(),
            gateway.batches.run(PoolLineJobs(gateway)),
            _spot_checks(gateway, setup.settings.spot_checks).run(),
            _prune(gateway, setup.settings.kept),
            _record_open_jobs(gateway),
            _send_webhooks(gateway, setup.settings.reach),
            keep_valid(setup.https, setup.config.data_dir, setup.clock, publish),
            _end_if_broken(gateway.hub.store_health, setup.node),
            _check_regularly(gateway),
            _report_damage(gateway),
            trim_memory_regularly(),
        )
    ]


async def check_at_stop(gateway: Gateway) -> None:
    """Raise StoreError if the process must not end as if all were well."""
    _raise_if_broken(gateway.hub.store_health)
    error = await _check(gateway)
    if isinstance(error, StoreBroken):
        raise error
    if error is not None:
        log.warning(UNCHECKED, error.located)


def _spot_checks(gateway: Gateway, share: float) -> SpotChecks:
    checks = SpotChecks(gateway.hub, gateway.store, random.Random(), share)
    if share:
        gateway.hub.subscribe(checks.on_facts)
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


async def _send_webhooks(gateway: Gateway, reach: EgressPolicy) -> None:
    if reach is not EgressPolicy.OFF:
        show = partial(encode_job, gateway.select(JobsGateway))
        hub, store, clock = gateway.hub, gateway.store, gateway.clock
        sender = WebhookSender(
            *(hub, store, clock, show, reach, random.random),
            results=gateway.webhook_results,
        )
        await sender.run()


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


def _raise_if_broken(health: StoreHealth) -> None:
    """Raise Fenced, or StoreBroken for any other reason."""
    error = health.failure
    if isinstance(error, Fenced):
        raise error
    if health.is_broken and error is not None:
        raise StoreBroken(str(error), error.path)


async def _check_regularly(gateway: Gateway) -> None:
    """Check the database for damage, even while it is not in use."""
    failing = False
    while True:
        await asyncio.sleep(CHECK_EVERY)
        error = await _check(gateway)
        # Damage is reported; all else may pass, and is logged when it begins.
        failed = error is not None and not isinstance(error, StoreBroken)
        if error is not None and failed and not failing:
            log.warning(UNCHECKED, error.located)
        failing = failed


async def _check(gateway: Gateway) -> StoreError | None:
    """Look for damage to the database, and record what its log has shown."""
    try:
        await gateway.store.check()
        await gateway.signing.show(await gateway.store.ledger.head())
    except StoreError as error:
        return error
    return None


async def _report_damage(gateway: Gateway) -> None:
    gateway.hub.store_health.report_broken(await gateway.store.wait_damaged())
