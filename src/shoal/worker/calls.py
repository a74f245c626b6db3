"""Runs a coordinator's function calls and call streams.

A member of a training run continues when its connection breaks: the group trains on
without the coordinator.  When that gives the same call to this worker again, the
running one takes its place, or its result, which may have been lost on its way.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from shoal.domain import vocabulary as words
from shoal.domain.errors import ClientError, JobError, Unavailable
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.work import Call, CallStream, Task, Work
from shoal.tasks.function_caller import CallStreamSlot, FunctionCaller
from shoal.tasks.json_calls import json_arguments, value_as_json
from shoal.training.launch import MEMBER_CALL
from shoal.transports.clock import Clock, Timer
from shoal.worker.blob_cache import BlobCache
from shoal.worker.jobs import EngineSlots, failure_event

OUTAGE_MAX = 3600.0  # seconds that a member runs on without its coordinator
ATTACH_TIMEOUT = 60.0  # seconds for a coordinator to give a member to its worker again
KEPT_TIME = 600.0  # seconds for which the result of a member is kept
KEPT_MAX = 8  # such results
CALLS_MAX = 4096  # of a coordinator, including those that wait for a slot


@dataclass(frozen=True, slots=True)
class FunctionBackend:
    """The caller of functions, and the cache of their large arguments.

    ``slots`` are those of all calls that are sent alone; None: the caller's.
    """

    caller: FunctionCaller
    blobs: BlobCache
    slots: EngineSlots | None = None


CallEnd: TypeAlias = Callable[[JobId, LeaseNumber], words.Event]
"""Returns the event of a call's end, for the lease under which it is reported."""


class _RunningCall:
    """A call that runs, and the command under which it is reported."""

    def __init__(self, command: words.RunJob, *, returnable: bool) -> None:
        self.command = command
        self.returnable = returnable
        self.task: asyncio.Task[None] | None = None
        self.attached = asyncio.Event()  # whether a connection has its command
        self.attached.set()

    def attach(self, command: words.RunJob) -> None:
        """Report it under another command from now on."""
        self.command = command
        self.attached.set()

    def detach(self) -> None:
        """Keep its end until it is attached."""
        self.attached.clear()

    def cancel(self) -> None:
        assert self.task is not None, "it was started"
        self.task.cancel()


def _is_member(work: Work) -> bool:
    """Return whether a call is a member of a training run."""
    return isinstance(work, Call) and work.name == MEMBER_CALL


class RunningCalls:
    """Runs calls, and reports their results.

    Calls end with their connection, on wires whose coordinators then give them to other
    workers at once.  On wires that keep them, results wait for the next connection, and
    the session says which calls it does not keep.  Members of training runs go on for
    an hour, or a minute once there is another connection.

    Args:
        try_send: sends an event, if there is a connection.
        send: sends an event once a connection has room for it.
        on_ended: called when a call or stream has ended.
        tasks: the task group of the calls.
    """

    def __init__(
        self,
        functions: FunctionBackend,
        try_send: Callable[[words.Event], bool],
        send: Callable[[words.Event], Awaitable[None]],
        on_ended: Callable[[], None],
        tasks: asyncio.TaskGroup,
        clock: Clock,
    ) -> None:
        self._caller = functions.caller
        self._blobs = functions.blobs
        self._slots = functions.slots
        self._try_send = try_send
        self._send = send
        self._on_ended = on_ended
        self._tasks = tasks
        self._clock = clock
        self._calls: dict[JobId, _RunningCall] = {}
        self._detached: list[_RunningCall] = []  # members without a connection
        self._timer: Timer | None = None  # until they are cancelled
        self._kept: deque[tuple[Work, CallEnd]] = deque(maxlen=KEPT_MAX)
        self._streams: dict[JobId, CallStreamSlot] = {}
        self._returnable: dict[JobId, LeaseNumber] = {}  # streams
        self._unsent: list[words.CallsReturned] = []  # until there is a connection
        self.was_used = False  # whether there were calls on this connection

    def __len__(self) -> int:
        """Count calls, and streams that are not idle."""
        busy = sum(not each.idle for each in self._streams.values())
        return len(self._calls) + len(self._detached) + busy

    def __contains__(self, job_id: JobId) -> bool:
        return job_id in self._calls or job_id in self._streams

    def update_lent_slots(self, lent: int) -> None:
        """Add the slots of calls that wait for calls of their own."""
        if self._slots is not None:
            self._slots.set_extra(lent)

    def accepts(self, work: Work) -> bool:
        """Return whether work is for a function, and not for a model."""
        if isinstance(work, Task):
            return work.name in self._caller.names
        return isinstance(work, Call | CallStream)

    def start(
        self, command: words.RunJob, *, can_refuse: bool = True
    ) -> words.Event | None:
        """Start a call or open a stream; return the event of a failure, else None.

        ``can_refuse`` is as in ``RunningJobs.start``.
        """
        job_id, lease = command.job_id, command.lease
        if len(self._calls) >= CALLS_MAX:
            return words.Rejected(
                job_id, lease, f"{CALLS_MAX} calls are waiting already"
            )
        returnable = can_refuse and command.returnable
        if isinstance(command.work, CallStream):
            return self._open(command, command.work, returnable=returnable)
        if self._detached and _is_member(command.work):
            return self._attach(command)
        for work, end in self._kept:
            if work == command.work:
                self._tasks.create_task(self._repeat(end(job_id, lease)))
                return None
        running = _RunningCall(command, returnable=returnable)
        self._calls[job_id] = running
        running.task = self._tasks.create_task(self._run(running))
        running.task.add_done_callback(lambda _: self._on_task_done(running))
        return None

    def receive(self, message: words.CallMessage) -> None:
        """Process a message about a call stream or a large argument."""
        match message:
            case words.PushCalls(job_id, _, calls):
                self.was_used = True
                if (stream := self._streams.get(job_id)) is not None:
                    stream.push(calls)
            case words.CancelCalls(job_id, _, numbers):
                if (stream := self._streams.get(job_id)) is not None:
                    stream.recall(numbers)
            case words.SendBlob(digest, data):
                self._blobs.put(digest, data)
            case _:
                pass  # events for coordinators

    def cancel(self, job_id: JobId) -> None:
        """Cancel a call or close a stream; it reports nothing more."""
        if (running := self._calls.get(job_id)) is not None:
            running.cancel()
        if (stream := self._streams.pop(job_id, None)) is not None:
            self._returnable.pop(job_id, None)
            stream.close()
            self._on_ended()

    def hand_over(self) -> list[tuple[JobId, LeaseNumber]]:
        """Cancel the calls that others can take over; return them, to be rejected.

        A stream goes with its calls.  An idle one stays: its coordinator sends no calls
        to a worker that is paused.
        """
        streams = {
            job_id: lease
            for job_id, lease in self._returnable.items()
            if not self._streams[job_id].idle
        }
        calls = {
            job_id: running.command.lease
            for job_id, running in self._calls.items()
            if running.returnable
        }
        for job_id in calls:
            self._calls[job_id].returnable = False
        for job_id in (*streams, *calls):
            self.cancel(job_id)
        self._cancel_detached()
        return [*streams.items(), *calls.items()]

    def cancel_all(self) -> None:
        """Cancel all calls, and close all streams."""
        self._cancel_detached()
        for job_id in [*self._calls, *self._streams]:
            self.cancel(job_id)

    def on_connected(self) -> None:
        """Send what could not be sent; wait briefly for members to be returned."""
        unsent, self._unsent = self._unsent, []
        for each in unsent:
            if not self._try_send(each):
                self._keep_results(each)
        self.was_used = False
        self._set_timer(ATTACH_TIMEOUT)

    def on_disconnected(self, *, keeps: bool) -> None:
        """Cancel all calls but the members of runs, and close all streams.

        ``keeps``: other calls go on as well.
        """
        for job_id, running in list(self._calls.items()):
            if _is_member(running.command.work):
                del self._calls[job_id]
                self._detached.append(running)
                running.detach()
        if not keeps:
            for job_id in [*self._calls, *self._streams]:
                self.cancel(job_id)
        self._set_timer(OUTAGE_MAX)

    def _set_timer(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._detached:
            due = self._clock.now() + seconds
            self._timer = self._clock.call_at(due, self._cancel_detached)

    def _cancel_detached(self) -> None:
        """Cancel the members that the coordinator has given to others, or ended."""
        for running in [*self._detached]:
            running.cancel()

    def _attach(self, command: words.RunJob) -> words.Event | None:
        """Put a member that still runs in the place of the same call."""
        for running in self._detached:
            if running.command.work == command.work:
                self._detached.remove(running)
                self._calls[command.job_id] = running
                running.attach(command)
                return None
        reason = "this worker still runs another member of a training run"
        return words.Rejected(command.job_id, command.lease, reason)

    def _open(
        self, command: words.RunJob, work: CallStream, *, returnable: bool
    ) -> words.Event | None:
        job_id, lease = command.job_id, command.lease

        def on_returned(returns: list[words.CallResult]) -> None:
            results = words.CallsReturned(job_id, lease, returns)
            if not self._try_send(results):
                self._keep_results(results)
            if stream.idle:
                self._on_ended()

        self.cancel(job_id)  # a repeated command replaces it
        try:
            stream = self._caller.open_stream(
                work, self._fetch, on_returned, command.grant
            )
        except (Unavailable, ClientError) as error:
            return failure_event(job_id, lease, error)
        self._streams[job_id] = stream
        if returnable:
            self._returnable[job_id] = lease
        return None

    def _keep_results(self, results: words.CallsReturned) -> None:
        """Keep results until there is a connection."""
        if results.job_id in self._streams:
            self._unsent.append(results)

    def _on_task_done(self, running: "_RunningCall") -> None:
        job_id = running.command.job_id
        if self._calls.get(job_id) is running:
            # Otherwise the call was cancelled, and started again since.
            del self._calls[job_id]
        if running in self._detached:
            self._detached.remove(running)
        self._on_ended()

    async def _run(self, running: "_RunningCall") -> None:
        if self._slots is None:
            end = await self._answer(running)
        else:
            async with self._slots:
                end = await self._answer(running)
        await running.attached.wait()
        command = running.command
        event = end(command.job_id, command.lease)
        # A rejected call may run when it is sent again.
        if _is_member(command.work) and not isinstance(event, words.Rejected):
            kept = (command.work, end)
            self._kept.append(kept)
            self._clock.call_at(
                self._clock.now() + KEPT_TIME, lambda: self._forget(kept)
            )
        await self._send(event)

    async def _repeat(self, event: words.Event) -> None:
        await self._send(event)
        self._on_ended()

    def _forget(self, kept: tuple[Work, CallEnd]) -> None:
        with suppress(ValueError):  # others came since
            self._kept.remove(kept)

    async def _answer(self, running: "_RunningCall") -> "CallEnd":
        """Make a call; return its end, for the lease that it has then."""
        work, grant = running.command.work, running.command.grant

        def on_progress(share: float | None, text: str) -> None:
            command = running.command
            self._try_send(
                words.CallProgress(command.job_id, command.lease, share, text)
            )

        try:
            if isinstance(work, Task):
                args, kwargs = json_arguments(work.payload)
                call = Call(work.name, args, kwargs)
                value = await self._caller.call(call, self._fetch, on_progress, grant)
                return partial(words.Completed, rest=(value_as_json(value),))
            assert isinstance(work, Call), "streams are opened by _open"
            value = await self._caller.call(work, self._fetch, on_progress, grant)
            return partial(words.Completed, value=value)
        except (Unavailable, ClientError, JobError) as error:
            return partial(failure_event, error=error)

    async def _fetch(self, digest: bytes) -> Path:
        def request(digest: bytes) -> None:
            self._try_send(words.BlobMissing(digest))

        return await self._blobs.get(digest, request)
