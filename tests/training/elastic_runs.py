"""Runs whose rendezvous is in this process, with ranks in threads."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from harness.speed import scaled
from shoal.domain.errors import Unavailable
from shoal.protocols import discover
from shoal.training.elastic_group import ElasticGroup
from shoal.training.generations.messages import RankState
from shoal.training.generations.sequence import Greeting
from shoal.training.rank_port import RankPort
from shoal.training.rendezvous import Rendezvous
from shoal.transports.blocking.rank_socket import RankListener

T = TypeVar("T")
Message = Mapping[str, Any]
LIMIT = scaled(60.0)  # seconds; a test fails by then


class RunHost:
    """Keeps the rendezvous of one run, as a coordinator does."""

    def __init__(self, size: int, least: int = 1, **options: Any) -> None:
        self._new = partial(
            Rendezvous, "run", size, least, random_bytes=os.urandom, **options
        )
        self.rendezvous = self._new()
        self.links: dict[str, HostLink] = {}
        self.asked = threading.Event()  # whether ranks are there
        self._changed = threading.Condition()
        self._closed = False
        self._clock = threading.Thread(target=self._expire, daemon=True)
        self._clock.start()

    def connect(self, name: str, greeting: Greeting) -> "HostLink":
        with self._changed:
            link = self.links[name] = HostLink(self, name, greeting)
        link.open()
        return link

    def receive(self, name: str, message: Message) -> None:
        with self._changed:
            self._deliver(
                self.rendezvous.receive(name, dict(message), time.monotonic())
            )

    def lost(self, name: str) -> None:
        with self._changed:
            self.links.pop(name, None)
            self._deliver(self.rendezvous.lost(name, time.monotonic()))

    def restart(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Forget everything; links connect again."""
        with self._changed:
            self.rendezvous = self._new()
            links = [*self.links.values()]
            meanwhile()
        for link in links:
            link.open()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._clock.join()

    def _deliver(self, outgoing: list[tuple[str, Message]]) -> None:
        for name, message in outgoing:
            if "ping" in message:
                self.asked.set()
            if name in self.links:
                self.links[name].inbox.put(message)
        self._changed.notify_all()

    def _expire(self) -> None:
        with self._changed:
            while not self._closed:
                deadline = self.rendezvous.deadline
                left = None if deadline is None else deadline - time.monotonic()
                if left is None or left > 0:
                    self._changed.wait(left)
                else:
                    self._deliver(self.rendezvous.expire(time.monotonic()))


class HostLink:
    """A rank's connection to the host; ``freeze`` stops it as a pause does."""

    def __init__(self, host: RunHost, name: str, greeting: Greeting) -> None:
        self.inbox: SimpleQueue[Message] = SimpleQueue()
        self.name = name
        self._host = host
        self._greeting = greeting
        self._thawed = threading.Event()
        self._thawed.set()

    def open(self) -> None:
        for message in self._greeting():
            self._host.receive(self.name, message)

    def send(self, message: Message) -> None:
        self._thawed.wait(LIMIT)
        self._host.receive(self.name, message)

    def receive(self, timeout: float) -> Message | None:
        self._thawed.wait(LIMIT)
        try:
            return self.inbox.get(timeout=timeout)
        except Empty:
            return None

    def freeze(self) -> None:
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    def close(self) -> None:
        self._host.lost(self.name)


@contextmanager
def hosting(size: int, least: int = 1, **options: Any) -> Iterator[RunHost]:
    host = RunHost(size, least, **options)
    try:
        yield host
    finally:
        host.close()


def open_group(
    host: RunHost,
    rank: int,
    timeout: float = LIMIT,
    *,
    admits: bool = False,
    name: str = "",
) -> ElasticGroup:
    """Return a rank's group, once all ranks are there.

    Its link is named by its rank, unless it has another ``name``.
    """
    wire = next(each.ranks for each in discover().values() if each.ranks)()
    port = RankPort(wire, RankListener("127.0.0.1"), encrypts=False)
    state = RankState(rank, ("127.0.0.1",), port.port, port.id, admits=admits)
    try:
        connect = partial(host.connect, name or str(rank))
        return ElasticGroup(connect, port, "run", state, timeout)
    except Unavailable:
        port.close()
        raise


def each_rank(
    host: RunHost, size: int, train: Callable[[ElasticGroup], T], **options: Any
) -> list[T | BaseException]:
    """Call a function in all ranks at once; return results or errors by rank."""

    def run(rank: int) -> T:
        group = open_group(host, rank, **options)
        try:
            return train(group)
        finally:
            group.abort()

    with ThreadPoolExecutor(size) as threads:
        futures: list[Future[T]] = [threads.submit(run, each) for each in range(size)]
        return [each.exception(LIMIT) or each.result() for each in futures]
