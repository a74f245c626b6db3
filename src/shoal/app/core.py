"""The core of a coordinator: the store with its log, and the hub that owns the pool."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from shoal.app.database import contents_at, store_at
from shoal.app.setup import Setup
from shoal.calls.durable import DurableCalls
from shoal.coordinator.blob_transfer import BlobTransfer
from shoal.coordinator.hub import Hub
from shoal.domain.errors import ConfigError, StoreBroken
from shoal.domain.ids import JobId
from shoal.gateway.http.ids import new_id
from shoal.store import signing_keys
from shoal.store.contents import ContentStore
from shoal.store.port import Store
from shoal.transports.spans import SpanSink, open_spans

# Signatures that may hold up the loop: half a millisecond of checking them.
SIGNATURES_INLINE_MAX = 4

CALL_SECRET = b"credentials of running calls"  # which all coordinators of a pool know

log = logging.getLogger("shoal.app")


@dataclass(frozen=True, slots=True)
class Core:
    """The open store, and the hub with the jobs that were in it."""

    store: Store
    contents: ContentStore
    signing: signing_keys.SigningKeys
    spans: SpanSink | None
    hub: Hub
    calls: DurableCalls


@asynccontextmanager
async def open_core(setup: Setup) -> AsyncIterator[Core]:
    """Open the store for the length of the block, and restore its jobs.

    Raises ConfigError, StoreError; InUse if another coordinator has the pool.
    """
    config, settings, clock = setup.config, setup.settings, setup.clock
    with contents_at(config, settings.blobs_max) as (contents, blobs):
        store = (
            store_at(config.store, config.data_dir, blobs)
            if setup.node is None
            else setup.node.make_store(blobs)
        )
        async with _held(store, setup) as signing:
            await asyncio.to_thread(blobs.open)
            async with open_spans(
                config.otlp_endpoint, os.environ, "shoal", setup.name
            ) as spans:
                hub = Hub(
                    *(store, clock, lambda: JobId(new_id()), signing.signer),
                    config.queue_max,
                    hedge_after=config.hedge_after or None,
                    fee=settings.fee,
                    aside=SIGNATURES_INLINE_MAX,
                    blobs=BlobTransfer(blobs),
                    approve_nodes=config.approve_nodes,
                    traced=spans is not None,
                    call_secret=signing.signer.derive(CALL_SECRET),
                )
                hub.carried = calls = DurableCalls(hub, store, clock)
                clients_return = setup.part is not None
                if restored := await hub.restore(clients_return=clients_return):
                    log.info("restored jobs=%d", restored)
                yield Core(store, contents, signing, spans, hub, calls)


@asynccontextmanager
async def _held(store: Store, setup: Setup) -> AsyncIterator[signing_keys.SigningKeys]:
    """Open the store for the length of the block, with what nodes share.

    That is the secrets, and the lease, which is kept as soon as they are stored.
    """
    shared, node = setup.shared, setup.node
    async with AsyncExitStack() as finally_:
        try:
            signing = await finally_.enter_async_context(_open(store, setup))
        except BaseException:
            if shared is not None:  # as where another node has the pool
                await asyncio.to_thread(shared.take_back)
            raise
        if shared is not None:
            await asyncio.to_thread(shared.publish)
        if node is not None:
            await finally_.enter_async_context(node.holding())
        yield signing


@asynccontextmanager
async def _open(store: Store, setup: Setup) -> AsyncIterator[signing_keys.SigningKeys]:
    """Open the store for the length of the block; gives the keys of its log.

    Raises StoreError; StoreBroken if the database is not the one that the key has
    signed, unless a new log is asked for.  ConfigError if the key is damaged.
    """
    config, at, shared = setup.config, setup.clock.wall(), setup.shared
    folder = config.data_dir
    # Nothing in the folder says whether the log went back.
    lacked_witness = shared is not None and shared.lacked_witness
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
