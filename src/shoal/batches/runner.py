"""Runs batches: checks their lines, runs them as jobs, and writes the results.

Each batch is a task.  All that it has to know after a restart is in the store.
"""

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from shoal.batches.client_files import ClientFiles
from shoal.batches.input_lines import InputLines
from shoal.batches.line_jobs import (
    LineGivenUp,
    LineJobs,
    LinePostponed,
    LineRequest,
    OwnerGone,
)
from shoal.batches.progress import (
    AwaitChange,
    BatchProgress,
    CancelLines,
    FinalizeBatch,
    StartLines,
)
from shoal.batches.result_files import ResultFiles
from shoal.batches.validation import validate
from shoal.coordinator.store_health import RETRY_MAX, StoreHealth
from shoal.domain.errors import InvalidRequest, StoreError
from shoal.store.batches import (
    BATCH_ENDED,
    BatchChange,
    BatchError,
    BatchStatus,
    BatchStore,
    LineResult,
    StoredBatch,
)
from shoal.transports.clock import Clock, Timer
from shoal.transports.loop_share import LoopShare

CANCEL_EVERY = 1.0  # seconds until jobs that were just being accepted are cancelled
SWEEP_EVERY = 600.0  # seconds until files that have expired are deleted
RESULTS_DROPPED = 100  # results that are deleted in one transaction
OPEN = frozenset(BatchStatus) - BATCH_ENDED

log = logging.getLogger("shoal.batches")


@dataclass(slots=True, eq=False)
class _OpenBatch:
    """A batch that has not ended, and what has happened to it meanwhile."""

    batch: StoredBatch
    ending: BatchStatus | None = None  # as it shall end, before all lines are done
    results: list[LineResult] = field(default_factory=list)
    awaits_room: bool = False  # whether a callback for room is registered
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class BatchRunner:
    """All open batches.  ``run`` runs their lines until it is cancelled."""

    def __init__(
        self,
        store: BatchStore,
        files: ClientFiles,
        clock: Clock,
        health: StoreHealth,
        share: LoopShare,
    ) -> None:
        """``share`` is the part of the loop in which lines are checked."""
        self._store = store
        self._files = files
        self._clock = clock
        self._health = health
        self._share = share
        self._open: dict[str, _OpenBatch] = {}
        self._in_flight: Counter[tuple[str, str]] = Counter()  # lines, by owner, model
        self._added: asyncio.Queue[StoredBatch] = asyncio.Queue()
        self._stopping = False

    # For clients.

    async def add(self, new: StoredBatch) -> None:
        """Store a batch, and run it.  Raises QueueFull, StoreError."""
        await self._store.add(new)
        self._added.put_nowait(new)

    async def cancel(self, batch_id: str) -> bool:
        """Cancel a batch; return False if it has ended or writes its results.

        Raises StoreError.
        """
        change = BatchChange(BatchStatus.CANCELLING, self._clock.wall())
        expected = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
        changed = await self._store.change(batch_id, change, expected)
        opened = self._open.get(batch_id)
        if changed and opened is not None:
            opened.ending = BatchStatus.CANCELLED
            opened.wake.set()
        return changed

    # For the owner of the runner.

    def stop(self) -> None:
        """Begin no more lines; those that run go on, also after the next start."""
        self._stopping = True

    async def run(self, jobs: LineJobs) -> None:
        """Run all batches until cancelled, or until the store is broken."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._sweep())
                for each in await self._health.read(self._store.open):
                    self._start(each, jobs, tasks)
                while True:
                    self._start(await self._added.get(), jobs, tasks)
        except* StoreError:
            log.error("batches go on after a restart")  # the store's health says why

    def _start(
        self, batch: StoredBatch, jobs: LineJobs, tasks: asyncio.TaskGroup
    ) -> None:
        opened = self._open[batch.id] = _OpenBatch(batch)
        tasks.create_task(self._run_batch(opened, jobs))

    async def _sweep(self) -> None:
        """Delete what is no longer needed, now and then."""
        while True:
            try:
                if removed := await self._files.remove_expired(self._clock.wall()):
                    log.info("deleted expired files=%d", removed)
                await self._drop_results()
            except StoreError as error:
                log.error("cannot delete expired files: %s", error.located)
            await self._pause(SWEEP_EVERY)

    async def _run_batch(self, opened: _OpenBatch, jobs: LineJobs) -> None:
        """Run a batch to its end, whatever part of it was done before a restart."""
        try:
            while True:
                try:
                    lines = await self._input(opened, jobs)
                    if lines is not None:
                        await self._run_lines(opened, lines, jobs)
                    return
                except StoreError as error:
                    if self._health.is_broken:
                        raise
                    # As of a full disk, or a folder that is not there.
                    log.error("batch=%s waits: %s", opened.batch.id, error.located)
                await self._pause(RETRY_MAX)
        finally:
            del self._open[opened.batch.id]

    async def _input(self, opened: _OpenBatch, jobs: LineJobs) -> InputLines | None:
        """Return the lines of a batch; None if they are invalid, and it has failed.

        Raises StoreError.
        """
        batch, folder = opened.batch, self._files.folder
        if not await asyncio.to_thread(folder.has, batch.input_file):
            text = "the contents of the input file are missing"
            await self._fail(opened, (BatchError("file_missing", text),))
            return None
        try:
            lines = await asyncio.to_thread(InputLines, folder, batch.input_file)
        except InvalidRequest as error:
            await self._fail(opened, (BatchError("invalid_file", str(error)),))
            return None
        if batch.status is not BatchStatus.VALIDATING:
            return lines
        checked = await validate(batch, lines, jobs, self._share)
        if isinstance(checked, str):
            await self._change(
                opened,
                BatchStatus.IN_PROGRESS,
                (BatchStatus.VALIDATING,),
                model=checked,
                lines=len(lines),
            )
            return lines
        await self._fail(opened, checked)
        return None

    async def _fail(self, opened: _OpenBatch, errors: tuple[BatchError, ...]) -> None:
        await self._change(opened, BatchStatus.FAILED, OPEN, errors=errors)

    async def _change(
        self,
        opened: _OpenBatch,
        status: BatchStatus,
        expected: frozenset[BatchStatus] | tuple[BatchStatus, ...],
        *,
        model: str | None = None,
        lines: int | None = None,
        errors: tuple[BatchError, ...] | None = None,
        files: ResultFiles | None = None,
    ) -> bool:
        """Change the status; return False if it has another than expected.

        Raises StoreError.
        """
        change = BatchChange(
            *(status, self._clock.wall(), model, lines, errors),
            None if files is None else files.output,
            None if files is None else files.error,
        )
        id_ = opened.batch.id
        changed = await self._health.write(
            partial(self._store.change, id_, change, expected)
        )
        found = await self._health.read(partial(self._store.find, id_))
        assert found is not None, "open batches are not deleted"
        opened.batch = found
        if changed:
            log.info("batch=%s owner=%s status=%s", id_, found.owner, status.value)
        return changed

    # Lines.

    async def _run_lines(
        self, opened: _OpenBatch, lines: InputLines, jobs: LineJobs
    ) -> None:
        """Run the lines that have no result yet, and end the batch.

        Raises StoreError.
        """
        batch = opened.batch
        recorded = await self._health.read(partial(self._store.recorded, batch.id))
        begun = await self._health.read(partial(self._store.begun, batch))
        progress = BatchProgress(len(lines), recorded, begun)
        if batch.status is BatchStatus.CANCELLING:
            opened.ending = BatchStatus.CANCELLED
        elif batch.status is BatchStatus.FINALIZING and progress.left:
            opened.ending = BatchStatus.EXPIRED
        async with asyncio.TaskGroup() as tasks:
            status = await self._drive(opened, progress, lines, jobs, tasks)
        await self._end(opened, progress, lines, jobs, status)

    async def _drive(
        self,
        opened: _OpenBatch,
        progress: BatchProgress,
        lines: InputLines,
        jobs: LineJobs,
        tasks: asyncio.TaskGroup,
    ) -> BatchStatus:
        """Run lines until none is left; return the status to end with."""
        while True:
            opened.wake.clear()
            await self._record(opened, progress)
            batch = opened.batch
            if opened.ending is None and self._clock.wall() >= batch.expires_at:
                opened.ending = BatchStatus.EXPIRED
            progress.ending = opened.ending
            match progress.next_action(self._clock.now(), self._room(batch, jobs)):
                case StartLines(started):
                    self._in_flight[batch.owner, batch.model] += len(started)
                    for line in started:
                        tasks.create_task(
                            self._run_line(opened, progress, lines, line, jobs)
                        )
                case CancelLines():
                    jobs.cancel(batch)
                    await self._wait(opened, self._clock.now() + CANCEL_EVERY)
                case AwaitChange(until, for_room):
                    if for_room and not opened.awaits_room:
                        opened.awaits_room = True
                        jobs.on_room(partial(_on_room, opened))
                    left = batch.expires_at - self._clock.wall()
                    expiry = self._clock.now() + max(0.0, left)
                    await self._wait(
                        opened, expiry if until is None else min(until, expiry)
                    )
                case FinalizeBatch(status):
                    return status

    def _room(self, batch: StoredBatch, jobs: LineJobs) -> int:
        if self._stopping:
            return 0
        running = self._in_flight[batch.owner, batch.model]
        return jobs.room(batch.owner, batch.model) - running

    async def _record(self, opened: _OpenBatch, progress: BatchProgress) -> None:
        """Record the results that have come.  Raises StoreError."""
        results, opened.results = opened.results, []
        if not results:
            return
        await self._health.write(partial(self._store.record, opened.batch.id, results))
        for each in results:
            progress.record(each.line)
            self._leave(opened)

    async def _run_line(
        self,
        opened: _OpenBatch,
        progress: BatchProgress,
        lines: InputLines,
        line: int,
        jobs: LineJobs,
    ) -> None:
        batch, now = opened.batch, self._clock.now()
        left = max(1.0, batch.expires_at - self._clock.wall())
        may_begin = opened.ending is None
        try:
            data = await asyncio.to_thread(lines.read, line)
        except StoreError as error:
            log.error("batch=%s line=%d: %s", batch.id, line, error.located)
            progress.postpone(line, now + RETRY_MAX)
            self._leave(opened)
            return
        end = await jobs.run(LineRequest(batch, line, data, left, may_begin))
        match end:
            case LineResult():
                opened.results.append(end)
            case LinePostponed(seconds, reason):
                log.debug("batch=%s line=%d postponed: %s", batch.id, line, reason)
                progress.postpone(line, self._clock.now() + seconds)
                self._leave(opened)
            case LineGivenUp():
                progress.give_up(line)
                self._leave(opened)
            case OwnerGone(reason):
                progress.give_up(line)
                self._leave(opened)
                if opened.ending is None:
                    opened.ending = BatchStatus.CANCELLED
                    errors = (BatchError("key_revoked", reason),)
                    await self._change(
                        opened, BatchStatus.CANCELLING, OPEN, errors=errors
                    )
        opened.wake.set()

    def _leave(self, opened: _OpenBatch) -> None:
        """Note that a line has ended, which makes room for another."""
        batch = opened.batch
        self._in_flight[batch.owner, batch.model] -= 1
        for other in self._open.values():
            if (other.batch.owner, other.batch.model) == (batch.owner, batch.model):
                other.wake.set()

    # The end.

    async def _end(
        self,
        opened: _OpenBatch,
        progress: BatchProgress,
        lines: InputLines,
        jobs: LineJobs,
        status: BatchStatus,
    ) -> None:
        """Write the results to files, and give the batch its last status.

        Raises StoreError; then nothing is left of the files.
        """
        if status is not BatchStatus.CANCELLED:
            await self._change(opened, BatchStatus.FINALIZING, OPEN)
        batch = opened.batch
        files = ResultFiles(
            self._files.folder, batch, self._files.next_id, self._clock.wall()
        )
        try:
            await files.write_recorded(self._store)
            if status is not BatchStatus.COMPLETED:
                for line in progress.unrecorded:
                    data = await asyncio.to_thread(lines.read, line)
                    left_out = jobs.left_out(batch, line, data, status)
                    await asyncio.to_thread(files.write, [left_out])
            await asyncio.to_thread(files.finish)
            await self._change(opened, status, OPEN, files=files)
        except BaseException:
            files.discard()
            raise
        await self._drop_results()

    async def _drop_results(self) -> None:
        while await self._health.write(
            partial(self._store.drop_results, RESULTS_DROPPED)
        ):
            pass

    # Waiting.

    async def _wait(self, opened: _OpenBatch, until: float) -> None:
        """Wait until something has happened to a batch, or until a monotonic time."""
        timer: Timer = self._clock.call_at(until, opened.wake.set)
        try:
            await opened.wake.wait()
        finally:
            timer.cancel()

    async def _pause(self, seconds: float) -> None:
        over = asyncio.Event()
        timer = self._clock.call_at(self._clock.now() + seconds, over.set)
        try:
            await over.wait()
        finally:
            timer.cancel()


def _on_room(opened: _OpenBatch) -> None:
    opened.awaits_room = False
    opened.wake.set()
