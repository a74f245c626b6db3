"""What runs in the processes of a Ray cluster: calls, call streams, and a mailbox."""

import asyncio
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import msgspec
import ray

from shoal import __version__
from shoal.domain.errors import ConfigError, Unavailable
from shoal.tasks import process_messages
from shoal.tasks.invocation import (
    BLOB_MISSING,
    FunctionInvoker,
    InvocationResult,
    Invoke,
    load_tasks,
)
from shoal.tasks.limits import MAPPED_MAX
from shoal.tasks.progress import set_progress_handler

LastProgress: TypeAlias = tuple[float | None, str]

MAILBOX = "shoal-desk"  # its name, which Ray keeps apart for each driver

RETURNS_GROUP = "telling"  # the threads of lanes that tell what has returned

_pushed = msgspec.msgpack.Decoder(list[tuple[int, bytes, bytes]])
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class RayTaskModules:
    """Which functions there are to be, and whether others are called as well."""

    modules: tuple[str, ...]
    trust: bool
    version: str = __version__


class RayCall(NamedTuple):
    """A call, with its arguments in MessagePack."""

    number: int
    name: str
    code: bool
    timed: bool
    args: bytes
    kwargs: bytes


@cache
def _mailbox() -> Any:
    """Return the desk of this worker, which is looked up only where it is needed.

    To be given it with each call would take longer than many a call does.
    """
    return ray.get_actor(MAILBOX)


def list_tasks(tasks: RayTaskModules) -> dict[str, float | None] | str:
    """Return the tasks, with the timeouts that they have, or why there are none."""
    if tasks.version != __version__:
        return (
            f"the Ray cluster has shoal {__version__}, and this is {tasks.version}; "
            f"install the same there: pip install 'shoal=={tasks.version}'"
        )
    try:
        return load_tasks([*tasks.modules])
    except ConfigError as error:
        return str(error)


def run_call(
    tasks: RayTaskModules, slot: int, work: RayCall
) -> tuple[InvocationResult, LastProgress | None]:
    """Make one call; return also what it said last of its progress.

    That may still be under way elsewhere when the call has returned.
    """
    said: LastProgress | None = None

    def say(share: float | None, remark: str) -> None:
        nonlocal said
        said = share, remark
        _mailbox().say.remote(slot, work.number, share, remark)

    step = _step(tasks, slot, work.name, work.code)
    if work.timed:
        _mailbox().begin.remote(slot, work.number)
    set_progress_handler(say)
    returned = step(work.args, work.kwargs)
    set_progress_handler(None)
    return returned, said


class RayCallStream:
    """An actor that calls one function again and again.

    ``push`` and ``take`` run at the same time: what has returned is told while the
    next call runs, which may hold up nobody but itself.
    """

    def __init__(self, tasks: RayTaskModules, slot: int, name: str, code: bool) -> None:
        self._step = _step(tasks, slot, name, code)
        self._returns: list[tuple[int, bytes, str]] = []
        self._some = threading.Condition()

    def begin(self) -> None:
        """Return as soon as calls can be made."""

    def push(self, calls: bytes) -> None:
        """Make calls, as they were pushed; ``take`` has what they return."""
        for number, args, kwargs in _pushed.decode(calls):
            value, error, _ = self._step(args, kwargs)
            with self._some:
                self._returns.append((number, value, error))
                self._some.notify()

    @ray.method(concurrency_group=RETURNS_GROUP)  # type: ignore[untyped-decorator]  # Ray's
    def take(self) -> bytes:
        """Wait until some have returned; return them all, in MessagePack."""
        with self._some:
            self._some.wait_for(lambda: self._returns)
            returns, self._returns = self._returns, []
        return _encode(returns)

    def make(self, number: int, args: bytes, kwargs: bytes) -> bytes:
        """Make a call, and return what it does as ``take`` would."""
        value, error, _ = self._step(args, kwargs)
        return _encode([(number, value, error)])


def _step(tasks: RayTaskModules, slot: int, name: str, code: bool) -> Invoke:
    try:
        return _running(tasks, slot).invoker(name, code=code)
    except ConfigError as error:
        # The node that was asked at first could import what this one cannot.
        why = f"on this node of the Ray cluster: {error}"
        return lambda args, kwargs: InvocationResult(b"", why, BLOB_MISSING)


def _running(tasks: RayTaskModules, slot: int) -> FunctionInvoker:
    """Return the functions of this process, which takes calls for any slot."""
    blobs = _blobs()
    blobs.slot = slot
    return _functions(tasks)


@cache
def _functions(tasks: RayTaskModules) -> FunctionInvoker:
    load_tasks([*tasks.modules])
    return FunctionInvoker(_blobs().get, trust=tasks.trust)


class RayBlobs:
    """Large arguments that this process has used, which lie in Ray's object store."""

    def __init__(self) -> None:
        self.slot: int | None = None
        self._mapped: dict[bytes, memoryview] = {}  # the latest used is last

    def get(self, digest: bytes) -> memoryview:
        """Return a value in MessagePack; raises Unavailable if nobody gives it."""
        found = self._mapped.pop(digest, None)
        if found is None:
            found = self._ask(digest)
        self._mapped[digest] = found
        if len(self._mapped) > MAPPED_MAX:
            del self._mapped[next(iter(self._mapped))]
        return found

    def _ask(self, digest: bytes) -> memoryview:
        try:
            references, why = ray.get(_mailbox().blob.remote(self.slot, digest))
            if not references:
                raise Unavailable(why)
            return memoryview(ray.get(references[0]))
        except (ray.exceptions.RayError, ValueError) as error:
            raise Unavailable(f"a large argument is lost: {error}") from error


@cache
def _blobs() -> RayBlobs:
    return RayBlobs()


MESSAGES_MAX = 4096  # that wait for the driver; of progress, more are dropped

MailboxMessage: TypeAlias = tuple[Any, ...]
"""A slot, a code of ``orders``, and what follows it there."""

BlobLookup: TypeAlias = tuple[list[Any], str]
"""A reference to a large argument, in a list so that it stays one, or why not."""


class RayMailbox:
    """An actor; the driver cannot be asked, so it asks here for what is new."""

    def __init__(self) -> None:
        self._words: list[MailboxMessage] = []
        self._news = asyncio.Event()
        self._awaited: dict[bytes, asyncio.Future[BlobLookup]] = {}

    async def news(self) -> list[MailboxMessage]:
        """Wait until there is something, and return it all."""
        await self._news.wait()
        self._news.clear()
        words, self._words = self._words, []
        return words

    async def begin(self, slot: int, number: int) -> None:
        """Take word that a call begins."""
        self._put((slot, process_messages.STARTED, number))

    async def say(
        self, slot: int, number: int, share: float | None, remark: str
    ) -> None:
        """Take word of a call's progress."""
        if len(self._words) < MESSAGES_MAX:
            self._put((slot, process_messages.PROGRESS, number, share, remark))

    async def blob(self, slot: int, digest: bytes) -> BlobLookup:
        """Wait until a large argument is given."""
        if digest not in self._awaited:
            self._awaited[digest] = asyncio.get_running_loop().create_future()
        self._put((slot, process_messages.BLOB_NEEDED, digest))
        return await asyncio.shield(self._awaited[digest])

    async def give(self, digest: bytes, found: BlobLookup) -> None:
        """Answer all who wait for a large argument."""
        awaited = self._awaited.pop(digest, None)
        if awaited is not None:
            awaited.set_result(found)

    def _put(self, word: MailboxMessage) -> None:
        self._words.append(word)
        self._news.set()
