"""Runs all batches, each in a task, and deletes what is no longer needed."""

import asyncio
import logging
from functools import partial

from shoal.batches.batch_run import BatchContext, BatchRun
from shoal.batches.client_files import ClientFiles
from shoal.batches.line_jobs import LineJobs
from shoal.coordinator.store_health import StoreHealth
from shoal.domain.errors import StoreError
from shoal.store import batches
from shoal.store.run_to_end import run_to_end
from shoal.transports.clock import Clock
from shoal.transports.loop_share import LoopShare

SWEEP_EVERY = 600.0  # seconds until files that have expired are deleted

log = logging.getLogger("shoal.batches")


class BatchRunner:
    """All open batches.  ``run`` runs their lines until it is cancelled."""

    def __init__(
        self,
        store: batches.BatchStore,
        files: ClientFiles,
        clock: Clock,
        health: StoreHealth,
        share: LoopShare,
    ) -> None:
        """``share`` is the part of the loop in which lines are checked."""
        self._context = BatchContext(store, files, clock, health, share)
        self._open: dict[str, BatchRun] = {}
        self._added: asyncio.Queue[batches.StoredBatch] = asyncio.Queue()

    # For clients.

    async def add(self, new: batches.StoredBatch) -> None:
        """Store a batch, and run it.

        Raises QueueFull, TooLarge, NotFound, StoreError.
        """

        async def add() -> None:
            context = self._context
            await context.store.add(new, context.files.total_max)
            self._added.put_nowait(new)

        await run_to_end(add())

    async def cancel(self, batch_id: str) -> bool:
        """Cancel a batch; return False if it has ended or writes its results.

        Raises StoreError.
        """
        change = batches.BatchChange(
            batches.BatchStatus.CANCELLING, self._context.clock.wall()
        )
        expected = (batches.BatchStatus.VALIDATING, batches.BatchStatus.IN_PROGRESS)

        async def cancel() -> bool:
            changed = await self._context.store.change(batch_id, change, expected)
            running = self._open.get(batch_id)
            if changed and running is not None:
                running.ending = batches.BatchStatus.CANCELLED
                running.wake.set()
            return changed

        return await run_to_end(cancel())

    # For the owner of the runner.

    def stop(self) -> None:
        """Begin no more lines; those that run go on, also after the next start."""
        self._context.room.stopped = True

    async def run(self, jobs: LineJobs) -> None:
        """Run all batches until cancelled, or until the store is broken."""
        context = self._context
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._sweep())
                for each in await context.health.read(context.store.open):
                    self._begin(each, jobs, tasks)
                while True:
                    self._begin(await self._added.get(), jobs, tasks)
        except* StoreError:
            log.error("batches go on after a restart")  # the store's health says why

    def _begin(
        self, batch: batches.StoredBatch, jobs: LineJobs, tasks: asyncio.TaskGroup
    ) -> None:
        """Run a batch, unless it runs: one that was just added is also in the store."""
        if batch.id not in self._open:
            running = self._open[batch.id] = BatchRun(batch, self._context, jobs)
            tasks.create_task(self._run_batch(running))

    async def _run_batch(self, running: BatchRun) -> None:
        context, id_ = self._context, running.batch.id
        try:
            # It may have been cancelled, or have ended, before it was in ``_open``.
            found = await context.health.read(partial(context.store.find, id_))
            if found is not None and found.status not in batches.BATCH_ENDED:
                running.batch = found
                await running.run()
                await self._drop_results()
        finally:
            del self._open[id_]

    async def _sweep(self) -> None:
        """Delete what is no longer needed, now and then."""
        context = self._context
        while True:
            try:
                removed = await context.files.remove_expired(context.clock.wall())
                if removed:
                    log.info("deleted expired files=%d", removed)
                await self._drop_results()
            except StoreError as error:
                log.error("cannot delete expired files: %s", error.located)
            await context.pause(SWEEP_EVERY)

    async def _drop_results(self) -> None:
        """Delete the results of batches that have ended, which are in files."""
        context = self._context
        drop = partial(context.store.drop_results, batches.RESULTS_AT_ONCE)
        while await context.health.write(drop):
            pass
