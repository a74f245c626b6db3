"""Runs one batch to its end, whatever part of it was done before a restart.

All that it has to know after a restart is in the store.  Its results go to two files.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from shoal.batches import line_jobs
from shoal.batches.client_files import ClientFiles
from shoal.batches.input_lines import InputLines, validate
from shoal.batches.progress import (
    AwaitChange,
    BatchAction,
    BatchProgress,
    CancelLines,
    FinalizeBatch,
    StartLines,
)
from shoal.coordinator.store_health import StoreHealth
from shoal.domain.errors import InvalidRequest, StoreError
from shoal.store import batches
from shoal.store.contents import ContentStore, ContentWriter
from shoal.transports.clock import Clock
from shoal.transports.loop_share import LoopShare

RETRY_MIN = 5.0  # seconds until files are read or written again after an error
RETRY_MAX = 60.0  # seconds until then, as each pause doubles the last
CANCEL_EVERY = 1.0  # seconds until jobs that were just being accepted are cancelled
OPEN = frozenset(batches.BatchStatus) - batches.BATCH_ENDED

log = logging.getLogger("shoal.batches")


LineQueue: TypeAlias = tuple[str, str]
"""The owner and the model of lines."""


@dataclass(slots=True)
class ResultFiles:
    """The two files of a batch; each is created with its first line."""

    contents: ContentStore
    batch: batches.StoredBatch
    new_id: Callable[[], str]
    at: float
    _writers: dict[bool, ContentWriter] = field(default_factory=dict)
    _files: dict[bool, batches.StoredFile] = field(default_factory=dict)

    @property
    def output(self) -> batches.StoredFile | None:
        """The file of the lines that succeeded, once all is written."""
        return self._files.get(False)

    @property
    def error(self) -> batches.StoredFile | None:
        """The file of the lines that failed, once all is written."""
        return self._files.get(True)

    async def write_recorded(self, store: batches.BatchStore) -> None:
        """Write the results that are in the store, in the order of their lines.

        Raises StoreError.
        """
        after = 0
        while page := await store.results(
            self.batch.id, after, batches.RESULTS_AT_ONCE
        ):
            await asyncio.to_thread(self.write, page)
            after = page[-1].line

    def write(self, results: Sequence[batches.LineResult]) -> None:
        """Write results.  Blocks.  Raises StoreError."""
        for failed in (False, True):
            lines = [each.body + b"\n" for each in results if each.failed is failed]
            if lines:
                if failed not in self._writers:
                    self._writers[failed] = self.contents.begin(self.new_id())
                self._writers[failed].write(b"".join(lines))

    def finish(self) -> None:
        """Wait until all is on the disk.  Blocks.  Raises StoreError."""
        for failed, writer in self._writers.items():
            writer.finish()
            self._files[failed] = batches.StoredFile(
                writer.id,
                self.batch.owner,
                f"{self.batch.id}_{'error' if failed else 'output'}.jsonl",
                batches.FilePurpose.BATCH_OUTPUT,
                writer.size,
                self.at,
            )

    def discard(self) -> None:
        """Delete the files.  Blocks."""
        for writer in self._writers.values():
            writer.discard()


@dataclass(slots=True)
class LineRoom:
    """The lines of all batches that run, and the batches that wait to begin more.

    No line begins when they are ``stopped``.
    """

    stopped: bool = False
    _running: Counter[LineQueue] = field(default_factory=Counter)
    # Batches with lines that could begin, and what wakes them.
    _waiting: dict[LineQueue, dict[str, asyncio.Event]] = field(default_factory=dict)

    def share(self, queue: LineQueue, total: int, batch_id: str, running: int) -> int:
        """Return how many lines a batch may begin, of which some are ``running``.

        ``total`` is how many lines of the queue may run at once.
        """
        if self.stopped:
            return 0
        sharing = len(self._waiting.get(queue, {}).keys() | {batch_id})
        fair = math.ceil(total / sharing) - running
        return min(total - self._running[queue], fair)

    def begin(self, queue: LineQueue, lines: int) -> None:
        """Note that lines have begun."""
        self._running[queue] += lines

    def end(self, queue: LineQueue) -> None:
        """Note that a line has ended, and wake the batches that wait for its room."""
        self._running[queue] -= 1
        if not self._running[queue]:
            del self._running[queue]
        for wake in self._waiting.get(queue, {}).values():
            wake.set()

    def wait(self, queue: LineQueue, batch_id: str, wake: asyncio.Event) -> None:
        """Note that a batch has lines that could begin."""
        self._waiting.setdefault(queue, {})[batch_id] = wake

    def leave(self, queue: LineQueue, batch_id: str) -> None:
        """Note that a batch has no line that could begin."""
        others = self._waiting.get(queue, {})
        others.pop(batch_id, None)
        if not others:
            self._waiting.pop(queue, None)


@dataclass(slots=True)
class BatchContext:
    """What all batches share; ``share`` is the part of the loop to check lines in."""

    store: batches.BatchStore
    files: ClientFiles
    clock: Clock
    health: StoreHealth
    share: LoopShare
    room: LineRoom = field(default_factory=LineRoom)

    async def pause(self, seconds: float) -> None:
        """Wait for some seconds."""
        await self.wait(asyncio.Event(), self.clock.now() + seconds)

    async def wait(self, event: asyncio.Event, until: float) -> None:
        """Wait for an event, which is set at a monotonic time in any case."""
        timer = self.clock.call_at(until, event.set)
        try:
            await event.wait()
        finally:
            timer.cancel()


@dataclass(slots=True, eq=False)
class BatchRun:
    """A batch that has not ended.

    ``ending`` is how it shall end before all lines are done, and ``wake`` is set when
    something has happened to it.
    """

    batch: batches.StoredBatch
    _context: BatchContext
    _jobs: line_jobs.LineJobs
    ending: batches.BatchStatus | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    _results: list[batches.LineResult] = field(default_factory=list)
    _awaits_room: bool = False  # whether a callback for room is registered

    async def run(self) -> None:
        """Run it to its end.  Raises StoreError if the store is broken."""
        pause = RETRY_MIN
        while True:
            try:
                lines = await self._input()
                if lines is not None:
                    await self._run_lines(lines)
                return
            except StoreError as error:
                if self._context.health.is_broken:
                    raise
                # As of a full disk, or a folder that is not there.
                log.error("batch=%s waits: %s", self.batch.id, error.located)
            await self._context.pause(pause)
            pause = min(2 * pause, RETRY_MAX)

    # Its status.

    async def _input(self) -> InputLines | None:
        """Return the lines of the input; None if they are invalid, and it has failed.

        Raises StoreError.
        """
        batch, contents = self.batch, self._context.files.contents
        if not await asyncio.to_thread(contents.has, batch.input_file):
            text = "the contents of the input file are missing"
            await self._fail(batches.BatchError("file_missing", text))
            return None
        try:
            lines = await asyncio.to_thread(InputLines, contents, batch.input_file)
        except InvalidRequest as error:
            await self._fail(batches.BatchError("invalid_file", str(error)))
            return None
        if batch.status is not batches.BatchStatus.VALIDATING:
            return lines
        checked = await validate(batch, lines, self._jobs, self._context.share)
        if isinstance(checked, str):
            status, expected = (
                batches.BatchStatus.IN_PROGRESS,
                (batches.BatchStatus.VALIDATING,),
            )
            await self._change(status, expected, model=checked, lines=len(lines))
            return lines
        await self._fail(*checked)
        return None

    async def _fail(self, *errors: batches.BatchError) -> None:
        await self._change(batches.BatchStatus.FAILED, OPEN, errors=errors)

    async def _change(
        self,
        status: batches.BatchStatus,
        expected: Collection[batches.BatchStatus] = OPEN,
        *,
        model: str | None = None,
        lines: int | None = None,
        errors: tuple[batches.BatchError, ...] | None = None,
        files: ResultFiles | None = None,
    ) -> None:
        """Change the status, unless it has another than expected.

        Raises StoreError.
        """
        context, id_ = self._context, self.batch.id
        change = batches.BatchChange(
            *(status, context.clock.wall(), model, lines, errors),
            None if files is None else files.output,
            None if files is None else files.error,
        )
        changed = await context.health.write(
            partial(context.store.change, id_, change, expected)
        )
        found = await context.health.read(partial(context.store.find, id_))
        assert found is not None, "open batches are not deleted"
        self.batch = found
        if changed:
            log.info("batch=%s owner=%s status=%s", id_, found.owner, status.value)

    # Its lines.

    async def _run_lines(self, lines: InputLines) -> None:
        """Run the lines that have no result yet, and end the batch.

        Raises StoreError.
        """
        batch, context = self.batch, self._context
        recorded = await context.health.read(partial(context.store.recorded, batch.id))
        begun = await context.health.read(partial(context.store.begun, batch))
        progress = BatchProgress(len(lines), recorded, begun)
        if batch.status is batches.BatchStatus.CANCELLING:
            self.ending = batches.BatchStatus.CANCELLED
        elif batch.status is batches.BatchStatus.FINALIZING and progress.left:
            self.ending = batches.BatchStatus.EXPIRED
        try:
            async with asyncio.TaskGroup() as tasks:
                status = await self._drive(progress, lines, tasks)
        finally:
            context.room.leave(self._queue, batch.id)
        await self._end(progress, lines, status)

    async def _drive(
        self, progress: BatchProgress, lines: InputLines, tasks: asyncio.TaskGroup
    ) -> batches.BatchStatus:
        """Run lines until none is left; return the status to end with."""
        clock = self._context.clock
        while True:
            self.wake.clear()
            await self._record(progress)
            expiry = clock.now() + self.batch.expires_at - clock.wall()
            if self.ending is None and expiry <= clock.now():
                self.ending = batches.BatchStatus.EXPIRED
            progress.ending = self.ending
            action = progress.next_action(clock.now(), self._room(progress.running))
            self._note_waiting(action)
            match action:
                case StartLines(started):
                    self._context.room.begin(self._queue, len(started))
                    for line in started:
                        tasks.create_task(self._run_line(progress, lines, line))
                case CancelLines():
                    self._jobs.cancel(self.batch)
                    await self._context.wait(self.wake, clock.now() + CANCEL_EVERY)
                case AwaitChange(until, for_room):
                    if for_room and not self._awaits_room:
                        self._awaits_room = True
                        self._jobs.on_room(self._on_room)
                    due = expiry if until is None else min(until, expiry)
                    await self._context.wait(self.wake, due)
                case FinalizeBatch(status):
                    return status

    @property
    def _queue(self) -> LineQueue:
        return self.batch.owner, self.batch.model

    def _room(self, running: int) -> int:
        """Return how many lines may begin while some of them are running."""
        queue = self._queue
        total = self._jobs.room(*queue)
        return self._context.room.share(queue, total, self.batch.id, running)

    def _note_waiting(self, action: BatchAction) -> None:
        """Note whether it has lines that could begin."""
        room = self._context.room
        for_room = isinstance(action, AwaitChange) and action.for_room
        if for_room or isinstance(action, StartLines):
            room.wait(self._queue, self.batch.id, self.wake)
        else:
            room.leave(self._queue, self.batch.id)

    def _on_room(self) -> None:
        self._awaits_room = False
        self.wake.set()

    async def _record(self, progress: BatchProgress) -> None:
        """Record the results that have come.  Raises StoreError."""
        context = self._context
        while page := self._next_results():
            await context.health.write(
                partial(context.store.record, self.batch.id, page)
            )
            for each in page:
                progress.record(each.line)
                context.room.end(self._queue)

    def _next_results(self) -> list[batches.LineResult]:
        """Take results that have come, of about RESULTS_AT_ONCE bytes."""
        count = size = 0
        while count < len(self._results) and size < batches.RESULTS_AT_ONCE:
            size += self._results[count].size
            count += 1
        page, self._results = self._results[:count], self._results[count:]
        return page

    async def _run_line(
        self, progress: BatchProgress, lines: InputLines, line: int
    ) -> None:
        clock, room, batch = self._context.clock, self._context.room, self.batch
        left = max(1.0, batch.expires_at - clock.wall())
        may_begin = self.ending is None
        read = partial(asyncio.to_thread, lines.read, line)
        end = await self._jobs.run(
            line_jobs.LineRequest(batch, line, read, left, may_begin)
        )
        match end:
            case batches.LineResult():
                self._results.append(end)
            case line_jobs.LinePostponed(seconds, reason, alone):
                log.debug("batch=%s line=%d postponed: %s", batch.id, line, reason)
                until = clock.now() + seconds
                progress.postpone(line, until)
                if not alone:
                    progress.pause(until)
                room.end(self._queue)
            case line_jobs.LineGivenUp():
                progress.give_up(line)
                room.end(self._queue)
            case line_jobs.LineUnauthorized(reason):
                progress.give_up(line)
                room.end(self._queue)
                if self.ending is None:
                    self.ending = batches.BatchStatus.CANCELLED
                    errors = (batches.BatchError("key_revoked", reason),)
                    await self._change(batches.BatchStatus.CANCELLING, errors=errors)
        self.wake.set()

    # Its end.

    async def _end(
        self, progress: BatchProgress, lines: InputLines, status: batches.BatchStatus
    ) -> None:
        """Write the results to files, and give the batch its last status.

        Raises StoreError.
        """
        if status is not batches.BatchStatus.CANCELLED:
            await self._change(batches.BatchStatus.FINALIZING)
        batch, context = self.batch, self._context
        contents, new_id = context.files.contents, context.files.next_id
        files = ResultFiles(contents, batch, new_id, context.clock.wall())

        def write_left_out(line: int) -> None:
            data = lines.read(line)
            files.write([self._jobs.left_out(batch, line, data, status)])

        try:
            await files.write_recorded(context.store)
            for line in progress.unrecorded:
                await asyncio.to_thread(write_left_out, line)
            await asyncio.to_thread(files.finish)
        except BaseException:
            await asyncio.to_thread(files.discard)
            raise
        # If this fails or is cancelled, the store may describe the files all the same:
        # they stay, and the next start sets them aside if it does not.
        await self._change(status, files=files)
