"""Runs a coordinator's function calls and call streams."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.domain.errors import ClientError, JobError, Unavailable
from shoal.domain.ids import JobId
from shoal.domain.vocabulary import (
    BlobMissing,
    CallMessage,
    CallProgress,
    CallResult,
    CallsReturned,
    CancelCalls,
    Completed,
    Event,
    PushCalls,
    Rejected,
    RunJob,
    SendBlob,
)
from shoal.domain.work import Call, CallStream, Task, Work
from shoal.tasks.function_caller import CallStreamSlot, FunctionCaller
from shoal.tasks.json_calls import json_arguments, value_as_json
from shoal.worker.blob_cache import BlobCache
from shoal.worker.jobs import EngineSlots, failure_event

CALLS_MAX = 4096  # of a coordinator, including those that wait for a slot


@dataclass(frozen=True, slots=True)
class FunctionBackend:
    """The caller of functions, and the cache of their large arguments.

    ``slots`` are those of all calls that are sent alone; None: the caller's.
    """

    caller: FunctionCaller
    blobs: BlobCache
    slots: EngineSlots | None = None


class RunningCalls:
    """Runs calls, and reports their results.

    Calls end with their connection, on wires whose coordinators then give them to other
    workers: see ``Agent``.

    Args:
        try_send: sends an event, if there is a connection.
        send: sends an event once a connection has room for it.
        on_ended: called when a call or stream has ended.
        tasks: the task group of the calls.
    """

    def __init__(
        self,
        functions: FunctionBackend,
        try_send: Callable[[Event], bool],
        send: Callable[[Event], Awaitable[None]],
        on_ended: Callable[[], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._caller = functions.caller
        self._blobs = functions.blobs
        self._slots = functions.slots
        self._try_send = try_send
        self._send = send
        self._on_ended = on_ended
        self._tasks = tasks
        self._calls: dict[JobId, asyncio.Task[None]] = {}
        self._streams: dict[JobId, CallStreamSlot] = {}

    def __len__(self) -> int:
        """Count calls, and streams that are not idle."""
        return len(self._calls) + sum(not each.idle for each in self._streams.values())

    def update_lent_slots(self, lent: int) -> None:
        """Add the slots of calls that wait for calls of their own."""
        if self._slots is not None:
            self._slots.set_extra(lent)

    def accepts(self, work: Work) -> bool:
        """Return whether work is for a function, and not for a model."""
        if isinstance(work, Task):
            return work.name in self._caller.names
        return isinstance(work, Call | CallStream)

    def start(self, command: RunJob) -> Event | None:
        """Start a call or open a stream; return the event of a failure, else None."""
        job_id, lease = command.job_id, command.lease
        if len(self._calls) >= CALLS_MAX:
            return Rejected(job_id, lease, f"{CALLS_MAX} calls are waiting already")
        if isinstance(command.work, CallStream):
            return self._open(command, command.work)
        task = self._tasks.create_task(self._run(command))
        self._calls[job_id] = task
        task.add_done_callback(lambda task: self._on_task_done(job_id, task))
        return None

    def receive(self, message: CallMessage) -> None:
        """Process a message about a call stream or a large argument."""
        match message:
            case PushCalls(job_id, _, calls):
                if (stream := self._streams.get(job_id)) is not None:
                    stream.push(calls)
            case CancelCalls(job_id, _, numbers):
                if (stream := self._streams.get(job_id)) is not None:
                    stream.recall(numbers)
            case SendBlob(digest, data):
                self._blobs.put(digest, data)
            case _:
                pass  # events for coordinators

    def cancel(self, job_id: JobId) -> None:
        """Cancel a call or close a stream; it reports nothing more."""
        if (task := self._calls.get(job_id)) is not None:
            task.cancel()
        if (stream := self._streams.pop(job_id, None)) is not None:
            stream.close()
            self._on_ended()

    def cancel_all(self) -> None:
        """Cancel all calls, and close all streams."""
        for job_id in [*self._calls, *self._streams]:
            self.cancel(job_id)

    def _open(self, command: RunJob, work: CallStream) -> Event | None:
        job_id, lease = command.job_id, command.lease

        def on_returned(returns: list[CallResult]) -> None:
            self._try_send(CallsReturned(job_id, lease, returns))
            if stream.idle:
                self._on_ended()

        self.cancel(job_id)  # a repeated command replaces it
        try:
            stream = self._caller.open_stream(work, self._fetch, on_returned)
        except (Unavailable, ClientError) as error:
            return failure_event(job_id, lease, error)
        self._streams[job_id] = stream
        return None

    def _on_task_done(self, job_id: JobId, task: asyncio.Task[None]) -> None:
        if self._calls.get(job_id) is task:
            # Else it was cancelled, and started again since.
            del self._calls[job_id]
        self._on_ended()

    async def _run(self, command: RunJob) -> None:
        if self._slots is None:
            event = await self._answer(command)
        else:
            async with self._slots.take():
                event = await self._answer(command)
        await self._send(event)

    async def _answer(self, command: RunJob) -> Event:
        job_id, lease, work = command.job_id, command.lease, command.work

        def on_progress(share: float | None, text: str) -> None:
            self._try_send(CallProgress(job_id, lease, share, text))

        try:
            if isinstance(work, Task):
                args, kwargs = json_arguments(work.payload)
                call = Call(work.name, args, kwargs)
                value = await self._caller.call(call, self._fetch, on_progress)
                return Completed(job_id, lease, rest=(value_as_json(value),))
            assert isinstance(work, Call), "streams are opened by _open"
            value = await self._caller.call(work, self._fetch, on_progress)
            return Completed(job_id, lease, value=value)
        except (Unavailable, ClientError, JobError) as error:
            return failure_event(job_id, lease, error)

    async def _fetch(self, digest: bytes) -> Path:
        def request(digest: bytes) -> None:
            self._try_send(BlobMissing(digest))

        return await self._blobs.get(digest, request)
