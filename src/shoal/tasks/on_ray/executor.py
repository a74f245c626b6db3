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

import msgspec
import numpy as np
import ray
from ray import exceptions

from shoal.tasks import process_messages
from shoal.tasks.child_io import ChildPipes, Message, ParentExited
from shoal.tasks.invocation import BLOB_MISSING
from shoal.tasks.limits import BLOBS_MAX
from shoal.tasks.on_ray import remote
from shoal.tasks.on_ray.remote import RayMailbox

OnDone: TypeAlias = Callable[["Future[Any]"], None]


class SendToWorker(Protocol):
    def __call__(self, slot: int, code: int, *about: Any) -> None: ...


class RayBlobUploads:
    """The blobs in the object store; the least recently used are evicted first.

    Args:
        desk: the mailbox in which calls wait for missing blobs.
        tell: sends the worker a message about a slot.
        when_done: calls a function with a completed future, in the main thread.
    """

    def __init__(
        self,
        desk: Any,
        tell: SendToWorker,
        when_done: Callable[["Future[Any]", OnDone], None],
    ) -> None:
        self._desk = desk
        self._tell = tell
        self._when_done = when_done
        self._lacking: dict[int, bytes] = {}  # the blobs that slots wait for
        self._there: dict[bytes, tuple[Any, int]] = {}  # the most recently used is last
        self._size = 0
        self._putting = ThreadPoolExecutor(1)

    def request(self, slot: int, digest: bytes) -> None:
        """Provide a slot's call with a blob, or request it from the worker."""
        if digest in self._there:
            self._give(digest)
        else:
            self._lacking[slot] = digest
            self._tell(slot, process_messages.BLOB_NEEDED, digest)

    def receive(self, slot: int, path: str, why: str) -> None:
        """Accept the file with a slot's missing blob, or why there is none."""
        digest = self._lacking.pop(slot, None)
        if digest is None:
            return  # its call was stopped
        if digest in self._there:
            self._give(digest)
        elif not path:
            self._desk.give.remote(digest, ([], why))
        else:
            putting = self._putting.submit(_put, path)
            self._when_done(putting, lambda done: self._was_put(digest, done))

    def forget(self, slot: int) -> None:
        """Forget the missing blob of a slot whose call was stopped."""
        self._lacking.pop(slot, None)

    def _was_put(self, digest: bytes, done: "Future[Any]") -> None:
        if (error := done.exception()) is not None:
            why = f"a large argument cannot be kept in the Ray cluster: {error}"
            self._desk.give.remote(digest, ([], why))
            return
        if digest not in self._there:
            self._there[digest] = done.result()
            self._size += done.result()[1]
        self._give(digest)
        while self._size > BLOBS_MAX and len(self._there) > 1:
            _, size = self._there.pop(next(iter(self._there)))
            self._size -= size

    def _give(self, digest: bytes) -> None:
        found = self._there[digest] = self._there.pop(digest)
        self._desk.give.remote(digest, ([found[0]], ""))


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

_pushed = msgspec.msgpack.Decoder(list[tuple[int, bytes, bytes]])


class _RayTask:
    """A call that runs as a Ray task."""

    def __init__(self, number: int, reference: Any) -> None:
        self.number = number
        self.reference = reference

    def stop(self) -> None:
        ray.cancel(self.reference, force=True)


class _RayStream:
    """A call stream with its actor; ``waiting`` are calls that run one by one."""

    def __init__(self, actor: Any, at_once: bool) -> None:
        self.actor = actor
        self.at_once = at_once
        self.waiting: deque[tuple[int, bytes, bytes]] = deque()
        self.busy = False

    def stop(self) -> None:
        ray.kill(self.actor)


class RayExecutor:
    """Runs each slot's call or call stream in the cluster.

    One thread does all the work.  Another reads orders, and Ray's threads report
    completions; both only append to a queue, which is bounded by the number of the
    worker's requests.
    """

    def __init__(self, pipes: ChildPipes, tasks: remote.RayTaskModules) -> None:
        self._pipes = pipes
        self._tasks = tasks
        self._news: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._slots: dict[int, _RayTask | _RayStream] = {}
        self._desk = (
            ray.remote(RayMailbox)
            .options(name=remote.MAILBOX, num_cpus=0, max_concurrency=1000)
            .remote()
        )
        self._freight = RayBlobUploads(self._desk, self._tell, self._when_done)
        self._call = ray.remote(remote.run_call).options(num_cpus=1, max_retries=0)
        self._lane = ray.remote(concurrency_groups={remote.RETURNS_GROUP: 1})(
            remote.RayCallStream
        )
        self._orders = {
            process_messages.CALL: self._begin,
            process_messages.OPEN_STREAM: self._open,
            process_messages.PUSH: self._push,
            process_messages.BLOB: self._give,
            process_messages.STOP: self._stop,
        }

    def run(self) -> None:
        """Carry out orders until their end.  Raises ParentExited then."""
        threading.Thread(target=self._read, daemon=True).start()
        self._when(self._desk.news.remote(), self._heard)
        while True:
            self._news.get()()

    def _read(self) -> None:
        try:
            while True:
                self._news.put(partial(self._carry_out, self._pipes.next()))
        except ParentExited:
            self._news.put(self._end)

    def _end(self) -> None:
        raise ParentExited

    def _carry_out(self, order: Message) -> None:
        (slot, code, *about), tail = order
        self._orders[code](slot, about, tail)

    def _when(self, reference: Any, after: OnDone) -> None:
        """Call ``after`` in the main thread when the referenced object is available."""
        self._when_done(reference.future(), after)

    def _when_done(self, future: "Future[Any]", after: OnDone) -> None:
        future.add_done_callback(lambda done: self._news.put(lambda: after(done)))

    def _tell(self, slot: int, code: int, *about: Any, tail: bytes = b"") -> None:
        self._pipes.send((process_messages.OF_SLOT, slot, code, *about), tail)

    # Calls.

    def _begin(self, slot: int, about: list[Any], tail: memoryview) -> None:
        number, name, code, size, timed = about
        args, kwargs = bytes(tail[:size]), bytes(tail[size:])
        work = remote.RayCall(number, name, code, timed, args, kwargs)
        reference = self._call.remote(self._tasks, slot, work)
        call = self._slots[slot] = _RayTask(number, reference)
        self._when(reference, lambda done: self._called(slot, call, done))

    def _called(self, slot: int, call: _RayTask, done: "Future[Any]") -> None:
        if self._slots.get(slot) is not call:
            return  # it was stopped
        del self._slots[slot]
        if (error := done.exception()) is not None:
            self._failed(slot, call.number, error)
            return
        returned, said = done.result()
        if said is not None:
            self._tell(slot, process_messages.PROGRESS, call.number, *said)
        if returned.error:
            tail = returned.error.encode(errors="replace")
            self._tell(
                slot, process_messages.RAISED, call.number, returned.why, tail=tail
            )
        else:
            self._tell(slot, process_messages.DONE, call.number, tail=returned.value)

    def _failed(self, slot: int, number: int, error: BaseException) -> None:
        if isinstance(error, PROCESS_ERRORS):
            self._tell(slot, process_messages.LOST, _ended(error))
        else:
            tail = f"Ray did not make the call: {error}".encode(errors="replace")
            self._tell(slot, process_messages.RAISED, number, BLOB_MISSING, tail=tail)

    # Call streams.

    def _open(self, slot: int, about: list[Any], tail: memoryview) -> None:
        name, code, at_once = about
        actor = self._lane.options(num_cpus=1).remote(self._tasks, slot, name, code)
        lane = self._slots[slot] = _RayStream(actor, at_once)
        begun = actor.begin.remote()
        self._when(begun, lambda done: self._begun(slot, lane, done))
        if not at_once:
            self._take(slot, lane)

    def _begun(self, slot: int, lane: _RayStream, done: "Future[Any]") -> None:
        if self._slots.get(slot) is not lane:
            return  # it was stopped
        if (error := done.exception()) is not None:
            self._lost(slot, error)
        else:
            self._tell(slot, process_messages.STARTED)

    def _lost(self, slot: int, error: BaseException) -> None:
        del self._slots[slot]
        self._tell(slot, process_messages.LOST, _ended(error))

    def _take(self, slot: int, lane: _RayStream) -> None:
        self._when(lane.actor.take.remote(), lambda done: self._taken(slot, lane, done))

    def _taken(self, slot: int, lane: _RayStream, done: "Future[Any]") -> None:
        if self._slots.get(slot) is not lane:
            return  # it was stopped
        if (error := done.exception()) is not None:
            self._lost(slot, error)
            return
        self._tell(slot, process_messages.RETURNS, tail=done.result())
        lane.busy = False
        if lane.at_once:
            self._make_next(slot, lane)
        else:
            self._take(slot, lane)

    def _push(self, slot: int, about: list[Any], tail: memoryview) -> None:
        lane = self._slots.get(slot)
        if not isinstance(lane, _RayStream):
            return  # its actor has just ended
        if lane.at_once:
            lane.waiting.extend(_pushed.decode(tail))
            self._make_next(slot, lane)
        else:
            lane.actor.push.remote(bytes(tail))

    def _make_next(self, slot: int, lane: _RayStream) -> None:
        """Make one call at a time, so that a crash can be attributed to a call."""
        if lane.waiting and not lane.busy:
            lane.busy = True
            made = lane.actor.make.remote(*lane.waiting.popleft())
            self._when(made, lambda done: self._taken(slot, lane, done))

    def _stop(self, slot: int, about: list[Any], tail: memoryview) -> None:
        """Stop the call or stream of a slot, if it has one."""
        self._freight.forget(slot)
        if (running := self._slots.pop(slot, None)) is not None:
            running.stop()

    # Messages of running calls.

    def _give(self, slot: int, about: list[Any], tail: memoryview) -> None:
        path, why = about
        self._freight.receive(slot, path, why)

    def _heard(self, done: "Future[Any]") -> None:
        if done.exception() is not None:
            # the mailbox or the connection to the cluster is lost
            raise ParentExited
        for slot, code, *about in done.result():
            if slot not in self._slots:
                continue  # it has ended, and its last progress came with the result
            if code == process_messages.BLOB_NEEDED:
                self._freight.request(slot, about[0])
            else:
                self._tell(slot, code, *about)
        self._when(self._desk.news.remote(), self._heard)


def _ended(error: BaseException) -> str:
    """Describe that a process of the cluster has ended by itself."""
    how = "it crashed, left, or was killed, which Ray's logs may tell more about"
    if isinstance(error, exceptions.OutOfMemoryError):
        how = "Ray ended it, as the node had no memory left"
    return f"the process that made the call in the Ray cluster has ended: {how}"
