"""Runs the calls of a worker's slots in Ray, and returns their results.

Large arguments are put into Ray's object store, once each.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias

import numpy as np
import ray
from ray import exceptions

from shoal.tasks import process_messages
from shoal.tasks.child_io import ChildPipes, Message, ParentExited
from shoal.tasks.invocation import BLOB_MISSING, InvocationResult
from shoal.tasks.limits import BLOBS_MAX
from shoal.tasks.on_ray import remote
from shoal.tasks.on_ray.remote import RayMailbox

OnDone: TypeAlias = Callable[["Future[Any]"], None]


class SendToWorker(Protocol):
    def __call__(self, slot: int, code: int, *arguments: Any) -> None: ...


class RayBlobUploads:
    """The blobs in the object store; the least recently used are evicted first.

    Args:
        mailbox: the mailbox in which calls wait for missing blobs.
        send: sends the worker a message about a slot.
        when_done: calls a function with a completed future, in the main thread.
    """

    def __init__(
        self,
        mailbox: Any,
        send: SendToWorker,
        when_done: Callable[["Future[Any]", OnDone], None],
    ) -> None:
        self._mailbox = mailbox
        self._send = send
        self._when_done = when_done
        self._missing: dict[int, bytes] = {}  # the blobs that slots wait for
        # The most recently used is last.
        self._stored: dict[bytes, tuple[Any, int]] = {}
        self._size = 0
        self._uploader = ThreadPoolExecutor(1)

    def request(self, slot: int, digest: bytes) -> None:
        """Provide a slot's call with a blob, or request it from the worker."""
        if digest in self._stored:
            self._provide(digest)
        else:
            self._missing[slot] = digest
            self._send(slot, process_messages.BLOB_NEEDED, digest)

    def receive(self, slot: int, path: str, reason: str) -> None:
        """Accept the file with a slot's missing blob, or why there is none."""
        digest = self._missing.pop(slot, None)
        if digest is None:
            return  # its call was stopped
        if digest in self._stored:
            self._provide(digest)
        elif not path:
            self._mailbox.provide_blob.remote(digest, ([], reason))
        else:
            upload = self._uploader.submit(_put, path)
            self._when_done(upload, lambda done: self._on_stored(digest, done))

    def forget(self, slot: int) -> None:
        """Forget the missing blob of a slot whose call was stopped."""
        self._missing.pop(slot, None)

    def _on_stored(self, digest: bytes, done: "Future[Any]") -> None:
        if (error := done.exception()) is not None:
            reason = f"a large argument cannot be kept in the Ray cluster: {error}"
            self._mailbox.provide_blob.remote(digest, ([], reason))
            return
        if digest not in self._stored:
            self._stored[digest] = done.result()
            self._size += done.result()[1]
        self._provide(digest)
        while self._size > BLOBS_MAX and len(self._stored) > 1:
            _, size = self._stored.pop(next(iter(self._stored)))
            self._size -= size

    def _provide(self, digest: bytes) -> None:
        found = self._stored[digest] = self._stored.pop(digest)
        self._mailbox.provide_blob.remote(digest, ([found[0]], ""))


def _put(path: str) -> tuple[Any, int]:
    """Return a reference to the contents of a file, and their size.

    All processes of a node share arrays without a copy.
    """
    data = np.fromfile(path, np.uint8)
    return ray.put(data), data.size


PROCESS_ERRORS = (
    exceptions.WorkerCrashedError,
    exceptions.ActorDiedError,
    exceptions.OutOfMemoryError,
)
"""Errors of processes that ended, perhaps because of the called function."""


class _RayTask:
    """A call that runs as a Ray task."""

    def __init__(self, number: int, reference: Any) -> None:
        self.number = number
        self.reference = reference

    def stop(self) -> None:
        ray.cancel(self.reference, force=True)


class _RayStream:
    """A call stream with its actor; ``waiting`` are calls that run one by one."""

    def __init__(self, actor: Any, flush_each: bool) -> None:
        self.actor = actor
        self.flush_each = flush_each
        self.waiting: deque[tuple[int, bytes, bytes]] = deque()
        self.busy = False

    def stop(self) -> None:
        ray.kill(self.actor)


class RayExecutor:
    """Runs each slot's call or call stream in the cluster.

    One thread does all the work.  Another reads commands, and Ray's threads report
    completions; both only append to a queue, which is bounded by the number of the
    worker's requests.
    """

    def __init__(self, pipes: ChildPipes, tasks: remote.RayTaskModules) -> None:
        self._pipes = pipes
        self._tasks = tasks
        self._callbacks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._slots: dict[int, _RayTask | _RayStream] = {}
        self._mailbox = (
            ray.remote(RayMailbox)
            .options(name=remote.MAILBOX, num_cpus=0, max_concurrency=1000)
            .remote()
        )
        self._blobs = RayBlobUploads(self._mailbox, self._send, self._when_done)
        self._call = ray.remote(remote.run_call).options(num_cpus=1, max_retries=0)
        self._stream_actor = ray.remote(concurrency_groups={remote.RETURNS_GROUP: 1})(
            remote.RayCallStream
        )
        self._handlers = {
            process_messages.CALL: self._start_call,
            process_messages.OPEN_STREAM: self._open_stream,
            process_messages.PUSH: self._push_calls,
            process_messages.BLOB: self._on_blob,
            process_messages.STOP: self._stop_slot,
        }

    def run(self) -> None:
        """Carry out commands until their end.  Raises ParentExited then."""
        threading.Thread(target=self._read, daemon=True).start()
        self._when(self._mailbox.receive.remote(), self._on_mailbox_messages)
        while True:
            self._callbacks.get()()

    def _read(self) -> None:
        try:
            while True:
                self._callbacks.put(partial(self._execute, self._pipes.next()))
        except ParentExited:
            self._callbacks.put(self._end)

    def _end(self) -> None:
        raise ParentExited

    def _execute(self, command: Message) -> None:
        (slot, code, *arguments), tail = command
        self._handlers[code](slot, arguments, tail)

    def _when(self, reference: Any, after: OnDone) -> None:
        """Call ``after`` in the main thread when the referenced object is available."""
        self._when_done(reference.future(), after)

    def _when_done(self, future: "Future[Any]", after: OnDone) -> None:
        future.add_done_callback(lambda done: self._callbacks.put(lambda: after(done)))

    def _send(self, slot: int, code: int, *arguments: Any, tail: bytes = b"") -> None:
        self._pipes.send((process_messages.OF_SLOT, slot, code, *arguments), tail)

    # Calls.

    def _start_call(self, slot: int, arguments: list[Any], tail: memoryview) -> None:
        number, name, mode, size, timed, grant = arguments
        args, kwargs = bytes(tail[:size]), bytes(tail[size:])
        work = remote.RayCall(number, name, mode, timed, grant, args, kwargs)
        reference = self._call.remote(self._tasks, slot, work)
        call = self._slots[slot] = _RayTask(number, reference)
        self._when(reference, lambda done: self._on_call_done(slot, call, done))

    def _on_call_done(self, slot: int, call: _RayTask, done: "Future[Any]") -> None:
        if self._slots.get(slot) is not call:
            return  # it was stopped
        del self._slots[slot]
        if (error := done.exception()) is not None:
            self._report_failure(slot, call.number, error)
            return
        returned, last_progress = done.result()
        if last_progress is not None:
            self._send(slot, process_messages.PROGRESS, call.number, *last_progress)
        self._send_result(slot, call.number, returned)

    def _report_failure(self, slot: int, number: int, error: BaseException) -> None:
        if isinstance(error, PROCESS_ERRORS):
            self._send(slot, process_messages.LOST, _loss_reason(error))
        else:
            text = f"Ray did not run the call: {error}"
            failed = InvocationResult(b"", text, BLOB_MISSING)
            self._send_result(slot, number, failed)

    def _send_result(self, slot: int, number: int, result: InvocationResult) -> None:
        head, tail = result.message(number)
        self._send(slot, *head, tail=tail)

    # Call streams.

    def _open_stream(self, slot: int, arguments: list[Any], tail: memoryview) -> None:
        name, mode, flush_each, grant = arguments
        actor = self._stream_actor.options(num_cpus=1).remote(
            self._tasks, slot, name, mode, grant
        )
        stream = self._slots[slot] = _RayStream(actor, flush_each)
        started = actor.wait_ready.remote()
        self._when(started, lambda done: self._on_stream_started(slot, stream, done))
        if not flush_each:
            self._request_returns(slot, stream)

    def _on_stream_started(
        self, slot: int, stream: _RayStream, done: "Future[Any]"
    ) -> None:
        if self._slots.get(slot) is not stream:
            return  # it was stopped
        if (error := done.exception()) is not None:
            self._on_stream_lost(slot, error)
        else:
            self._send(slot, process_messages.STARTED)

    def _on_stream_lost(self, slot: int, error: BaseException) -> None:
        del self._slots[slot]
        self._send(slot, process_messages.LOST, _loss_reason(error))

    def _request_returns(self, slot: int, stream: _RayStream) -> None:
        self._when(
            stream.actor.take_returns.remote(),
            lambda done: self._on_returns(slot, stream, done),
        )

    def _on_returns(self, slot: int, stream: _RayStream, done: "Future[Any]") -> None:
        if self._slots.get(slot) is not stream:
            return  # it was stopped
        if (error := done.exception()) is not None:
            self._on_stream_lost(slot, error)
            return
        self._send(slot, process_messages.RETURNS, tail=done.result())
        stream.busy = False
        if stream.flush_each:
            self._call_next(slot, stream)
        else:
            self._request_returns(slot, stream)

    def _push_calls(self, slot: int, arguments: list[Any], tail: memoryview) -> None:
        stream = self._slots.get(slot)
        if not isinstance(stream, _RayStream):
            return  # its actor has just ended
        if stream.flush_each:
            stream.waiting.extend(process_messages.decode_pushed(tail))
            self._call_next(slot, stream)
        else:
            stream.actor.push.remote(bytes(tail))

    def _call_next(self, slot: int, stream: _RayStream) -> None:
        """Make one call at a time, so that a crash can be attributed to a call."""
        if stream.waiting and not stream.busy:
            stream.busy = True
            made = stream.actor.call.remote(*stream.waiting.popleft())
            self._when(made, lambda done: self._on_returns(slot, stream, done))

    def _stop_slot(self, slot: int, arguments: list[Any], tail: memoryview) -> None:
        """Stop the call or stream of a slot, if it has one."""
        self._blobs.forget(slot)
        if (running := self._slots.pop(slot, None)) is not None:
            running.stop()

    # Messages of running calls.

    def _on_blob(self, slot: int, arguments: list[Any], tail: memoryview) -> None:
        path, reason = arguments
        self._blobs.receive(slot, path, reason)

    def _on_mailbox_messages(self, done: "Future[Any]") -> None:
        if done.exception() is not None:
            # The mailbox or the connection to the cluster is lost.
            raise ParentExited
        for slot, code, *arguments in done.result():
            if slot not in self._slots:
                continue  # it has ended, and its last progress came with the result
            if code == process_messages.BLOB_NEEDED:
                self._blobs.request(slot, arguments[0])
            else:
                self._send(slot, code, *arguments)
        self._when(self._mailbox.receive.remote(), self._on_mailbox_messages)


def _loss_reason(error: BaseException) -> str:
    """Describe that a process of the cluster has ended by itself."""
    cause = "it crashed or was killed, or its node left; see Ray's logs"
    if isinstance(error, exceptions.OutOfMemoryError):
        cause = "Ray ended it because its node ran out of memory"
    return f"the process that ran the call in the Ray cluster has ended: {cause}"
