"""Passes the calls of a worker's slots on to Ray, and what comes of them back."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

import msgspec
import ray
from ray import exceptions

from shoal.tasks import orders
from shoal.tasks.on_ray import remote
from shoal.tasks.on_ray.desk import Desk
from shoal.tasks.on_ray.freight import After, Freight
from shoal.tasks.pipes import Gone, Order, Pipes
from shoal.tasks.running import LACKING

ENDED = (
    exceptions.WorkerCrashedError,
    exceptions.ActorDiedError,
    exceptions.OutOfMemoryError,
)
"""The ends of processes that may be the fault of what they called."""

_pushed = msgspec.msgpack.Decoder(list[tuple[int, bytes, bytes]])


class _Call:
    """A call that runs as a task of Ray's."""

    def __init__(self, number: int, reference: Any) -> None:
        self.number = number
        self.reference = reference

    def stop(self) -> None:
        ray.cancel(self.reference, force=True)


class _Lane:
    """A lane that has an actor; ``waiting`` are calls that are made one by one."""

    def __init__(self, actor: Any, at_once: bool) -> None:
        self.actor = actor
        self.at_once = at_once
        self.waiting: deque[tuple[int, bytes, bytes]] = deque()
        self.busy = False

    def stop(self) -> None:
        ray.kill(self.actor)


class Relay:
    """Keeps each slot's call or lane in the cluster.

    All is done by one thread.  Another reads orders, and Ray's own tell when something
    is there; both only put it into a queue, which is no longer than what the worker
    has asked for.
    """

    def __init__(self, pipes: Pipes, tasks: remote.Tasks) -> None:
        self._pipes = pipes
        self._tasks = tasks
        self._news: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._slots: dict[int, _Call | _Lane] = {}
        self._desk = (
            ray.remote(Desk)
            .options(name=remote.DESK, num_cpus=0, max_concurrency=1000)
            .remote()
        )
        self._freight = Freight(self._desk, self._tell, self._when_done)
        self._call = ray.remote(remote.call).options(num_cpus=1, max_retries=0)
        self._lane = ray.remote(concurrency_groups={remote.TELLING: 1})(remote.Lane)
        self._orders = {
            orders.CALL: self._begin,
            orders.LANE: self._open,
            orders.PUSH: self._push,
            orders.BLOB: self._give,
            orders.STOP: self._stop,
        }

    def run(self) -> None:
        """Carry out orders until there are no more.  Raises Gone at their end."""
        threading.Thread(target=self._read, daemon=True).start()
        self._when(self._desk.news.remote(), self._heard)
        while True:
            self._news.get()()

    def _read(self) -> None:
        try:
            while True:
                self._news.put(partial(self._carry_out, self._pipes.next()))
        except Gone:
            self._news.put(self._end)

    def _end(self) -> None:
        raise Gone

    def _carry_out(self, order: Order) -> None:
        (slot, code, *about), tail = order
        self._orders[code](slot, about, tail)

    def _when(self, reference: Any, after: After) -> None:
        """Call ``after``, in our own thread, when there is what is referred to."""
        self._when_done(reference.future(), after)

    def _when_done(self, future: "Future[Any]", after: After) -> None:
        future.add_done_callback(lambda done: self._news.put(lambda: after(done)))

    def _tell(self, slot: int, code: int, *about: Any, tail: bytes = b"") -> None:
        self._pipes.send((orders.OF_SLOT, slot, code, *about), tail)

    # Calls.

    def _begin(self, slot: int, about: list[Any], tail: memoryview) -> None:
        number, name, code, size, timed = about
        args, kwargs = bytes(tail[:size]), bytes(tail[size:])
        work = remote.Work(number, name, code, timed, args, kwargs)
        reference = self._call.remote(self._tasks, slot, work)
        call = self._slots[slot] = _Call(number, reference)
        self._when(reference, lambda done: self._called(slot, call, done))

    def _called(self, slot: int, call: _Call, done: "Future[Any]") -> None:
        if self._slots.get(slot) is not call:
            return  # it was stopped
        del self._slots[slot]
        if (error := done.exception()) is not None:
            self._failed(slot, call.number, error)
            return
        returned, said = done.result()
        if said is not None:
            self._tell(slot, orders.SAID, call.number, *said)
        if returned.error:
            tail = returned.error.encode(errors="replace")
            self._tell(slot, orders.RAISED, call.number, returned.why, tail=tail)
        else:
            self._tell(slot, orders.DONE, call.number, tail=returned.value)

    def _failed(self, slot: int, number: int, error: BaseException) -> None:
        if isinstance(error, ENDED):
            self._tell(slot, orders.LOST, _ended(error))
        else:
            tail = f"Ray did not make the call: {error}".encode(errors="replace")
            self._tell(slot, orders.RAISED, number, LACKING, tail=tail)

    # Lanes.

    def _open(self, slot: int, about: list[Any], tail: memoryview) -> None:
        name, code, at_once = about
        actor = self._lane.options(num_cpus=1).remote(self._tasks, slot, name, code)
        lane = self._slots[slot] = _Lane(actor, at_once)
        begun = actor.begin.remote()
        self._when(begun, lambda done: self._begun(slot, lane, done))
        if not at_once:
            self._take(slot, lane)

    def _begun(self, slot: int, lane: _Lane, done: "Future[Any]") -> None:
        if self._slots.get(slot) is not lane:
            return  # it was stopped
        if (error := done.exception()) is not None:
            self._lost(slot, error)
        else:
            self._tell(slot, orders.BEGAN)

    def _lost(self, slot: int, error: BaseException) -> None:
        del self._slots[slot]
        self._tell(slot, orders.LOST, _ended(error))

    def _take(self, slot: int, lane: _Lane) -> None:
        self._when(lane.actor.take.remote(), lambda done: self._taken(slot, lane, done))

    def _taken(self, slot: int, lane: _Lane, done: "Future[Any]") -> None:
        if self._slots.get(slot) is not lane:
            return  # it was stopped
        if (error := done.exception()) is not None:
            self._lost(slot, error)
            return
        self._tell(slot, orders.RETURNS, tail=done.result())
        lane.busy = False
        if lane.at_once:
            self._make_next(slot, lane)
        else:
            self._take(slot, lane)

    def _push(self, slot: int, about: list[Any], tail: memoryview) -> None:
        lane = self._slots.get(slot)
        if not isinstance(lane, _Lane):
            return  # its actor has just ended
        if lane.at_once:
            lane.waiting.extend(_pushed.decode(tail))
            self._make_next(slot, lane)
        else:
            lane.actor.push.remote(bytes(tail))

    def _make_next(self, slot: int, lane: _Lane) -> None:
        """Make one call, so that it is known which it was if the process ends."""
        if lane.waiting and not lane.busy:
            lane.busy = True
            made = lane.actor.make.remote(*lane.waiting.popleft())
            self._when(made, lambda done: self._taken(slot, lane, done))

    def _stop(self, slot: int, about: list[Any], tail: memoryview) -> None:
        """Stop what a slot does, if it does anything, whatever that is."""
        self._freight.forget(slot)
        if (running := self._slots.pop(slot, None)) is not None:
            running.stop()

    # What calls say while they run, and are told.

    def _give(self, slot: int, about: list[Any], tail: memoryview) -> None:
        path, why = about
        self._freight.take(slot, path, why)

    def _heard(self, done: "Future[Any]") -> None:
        if done.exception() is not None:
            raise Gone  # the cluster has lost the desk, or we have lost the cluster
        for slot, code, *about in done.result():
            if slot not in self._slots:
                continue  # it has ended, and its last word was told with that
            if code == orders.LACKS:
                self._freight.look_for(slot, about[0])
            else:
                self._tell(slot, code, *about)
        self._when(self._desk.news.remote(), self._heard)


def _ended(error: BaseException) -> str:
    """Say that a process of the cluster has ended by itself."""
    how = "it crashed, left, or was killed, which Ray's logs may tell more about"
    if isinstance(error, exceptions.OutOfMemoryError):
        how = "Ray ended it, as the node had no memory left"
    return f"the process that made the call in the Ray cluster has ended: {how}"
