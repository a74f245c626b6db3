"""Code that runs in a Ray cluster's processes: calls, call streams and a mailbox."""

import asyncio
import os
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import msgspec
import ray

from shoal import __version__
from shoal.domain.errors import ConfigError, Unavailable
from shoal.tasks import invocation, process_messages, running_call
from shoal.tasks.limits import MAPPED_MAX
from shoal.tasks.process_messages import Mode

LastProgress: TypeAlias = tuple[float | None, str]

MAILBOX = "shoal-mailbox"  # its name, in the namespace of each driver

RETURNS_GROUP = "returns"  # the threads of call streams that return results

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class RayTaskModules:
    """The modules with the tasks, and whether other functions may be called.

    ``variables`` name the coordinator, as in the worker's own processes.
    """

    modules: tuple[str, ...]
    trust: bool
    variables: tuple[tuple[str, str], ...] = ()
    version: str = __version__


class RayCall(NamedTuple):
    """A call, with its arguments in MessagePack; ``grant`` is as in ``RunJob``."""

    number: int
    name: str
    mode: int
    timed: bool
    grant: str
    args: bytes
    kwargs: bytes


@cache
def _mailbox() -> Any:
    """Return this worker's mailbox, which is looked up only when needed.

    To pass it with each call would take longer than many calls do.
    """
    return ray.get_actor(MAILBOX)


def list_tasks(tasks: RayTaskModules) -> dict[str, float | None] | str:
    """Return the tasks with their timeouts, or why there are none."""
    if tasks.version != __version__:
        return (
            f"the Ray cluster has shoal {__version__}, and this is {tasks.version}; "
            "install the same version on its nodes"
        )
    try:
        return invocation.load_tasks([*tasks.modules])
    except ConfigError as error:
        return str(error)


def run_call(
    tasks: RayTaskModules, slot: int, work: RayCall
) -> tuple[invocation.InvocationResult, LastProgress | None]:
    """Make one call; return also its last progress.

    The progress message may still be in transit when the call has returned.
    """
    last_progress: LastProgress | None = None

    def report_progress(share: float | None, remark: str) -> None:
        nonlocal last_progress
        last_progress = share, remark
        _mailbox().report_progress.remote(slot, work.number, share, remark)

    invoke = _invoker(tasks, slot, work.name, work.mode)
    if work.timed:
        _mailbox().report_start.remote(slot, work.number)
    running_call.RUNNING.grant, running_call.RUNNING.number = work.grant, 0
    running_call.set_progress_handler(report_progress)
    returned = invoke(work.args, work.kwargs)
    running_call.set_progress_handler(None)
    return returned, last_progress


class RayCallStream:
    """An actor that calls one function repeatedly.

    ``push`` and ``take_returns`` run concurrently: results are reported while the next
    call runs.
    """

    def __init__(
        self, tasks: RayTaskModules, slot: int, name: str, mode: int, grant: str
    ) -> None:
        self._invoke = _invoker(tasks, slot, name, mode)
        running_call.RUNNING.grant = grant
        self._returns: list[tuple[int, bytes, str]] = []
        self._available = threading.Condition()

    def wait_ready(self) -> None:
        """Return as soon as calls can be made."""

    def push(self, calls: bytes) -> None:
        """Make the calls of a push; ``take_returns`` returns their results."""
        for number, args, kwargs in process_messages.decode_pushed(calls):
            running_call.RUNNING.number = number
            value, error, _ = self._invoke(args, kwargs)
            with self._available:
                self._returns.append((number, value, error))
                self._available.notify()

    @ray.method(concurrency_group=RETURNS_GROUP)  # type: ignore[untyped-decorator]  # Ray's
    def take_returns(self) -> bytes:
        """Wait for results; return all of them, in MessagePack."""
        with self._available:
            self._available.wait_for(lambda: self._returns)
            returns, self._returns = self._returns, []
        return _encode(returns)

    def call(self, number: int, args: bytes, kwargs: bytes) -> bytes:
        """Make a call, and return its result in the form of ``take_returns``."""
        running_call.RUNNING.number = number
        value, error, _ = self._invoke(args, kwargs)
        return _encode([(number, value, error)])


def _invoker(
    tasks: RayTaskModules, slot: int, name: str, mode: int
) -> invocation.Invoke:
    try:
        return _function_invoker(tasks, slot).invoker(name, Mode(mode))
    except ConfigError as error:
        # The node of ``list_tasks`` could import modules that this one cannot.
        reason = f"on this node of the Ray cluster: {error}"
        return lambda args, kwargs: invocation.InvocationResult(
            b"", reason, invocation.BLOB_MISSING
        )


def _function_invoker(tasks: RayTaskModules, slot: int) -> invocation.FunctionInvoker:
    """Return the function invoker of this process, which serves every slot."""
    blobs = _blobs()
    blobs.slot = slot
    return _functions(tasks)


@cache
def _functions(tasks: RayTaskModules) -> invocation.FunctionInvoker:
    invocation.load_tasks([*tasks.modules])
    os.environ |= dict(tasks.variables)
    running_call.set_lending_handler(lambda waits: None)  # Ray lends no slots
    return invocation.FunctionInvoker(_blobs().get, trust=tasks.trust)


class RayBlobs:
    """Large arguments that this process has used, mapped from Ray's object store."""

    def __init__(self) -> None:
        self.slot: int | None = None
        self._mapped: dict[bytes, memoryview] = {}  # the most recently used is last

    def get(self, digest: bytes) -> memoryview:
        """Return a value in MessagePack; raises Unavailable if it is not provided."""
        found = self._mapped.pop(digest, None)
        if found is None:
            found = self._fetch(digest)
        self._mapped[digest] = found
        if len(self._mapped) > MAPPED_MAX:
            del self._mapped[next(iter(self._mapped))]
        return found

    def _fetch(self, digest: bytes) -> memoryview:
        try:
            references, reason = ray.get(_mailbox().blob.remote(self.slot, digest))
            if not references:
                raise Unavailable(reason)
            return memoryview(ray.get(references[0]))
        except (ray.exceptions.RayError, ValueError) as error:
            raise Unavailable(f"a large argument is lost: {error}") from error


@cache
def _blobs() -> RayBlobs:
    return RayBlobs()


MESSAGES_MAX = 4096  # that wait for the driver; further progress is dropped

MailboxMessage: TypeAlias = tuple[Any, ...]
"""A slot, a code of ``process_messages``, and the arguments of that message."""

BlobLookup: TypeAlias = tuple[list[Any], str]
"""A reference to a blob, in a list so that Ray keeps it one, or an error."""


class RayMailbox:
    """An actor with the calls' messages; the driver, which has no actor, polls it."""

    def __init__(self) -> None:
        self._messages: list[MailboxMessage] = []
        self._available = asyncio.Event()
        self._awaited: dict[bytes, asyncio.Future[BlobLookup]] = {}

    async def receive(self) -> list[MailboxMessage]:
        """Wait for messages, and return all of them."""
        await self._available.wait()
        self._available.clear()
        messages, self._messages = self._messages, []
        return messages

    async def report_start(self, slot: int, number: int) -> None:
        """Report that a call begins."""
        self._put((slot, process_messages.STARTED, number))

    async def report_progress(
        self, slot: int, number: int, share: float | None, remark: str
    ) -> None:
        """Report a call's progress."""
        if len(self._messages) < MESSAGES_MAX:
            self._put((slot, process_messages.PROGRESS, number, share, remark))

    async def blob(self, slot: int, digest: bytes) -> BlobLookup:
        """Wait until a blob is provided."""
        if digest not in self._awaited:
            self._awaited[digest] = asyncio.get_running_loop().create_future()
        self._put((slot, process_messages.BLOB_NEEDED, digest))
        return await asyncio.shield(self._awaited[digest])

    async def provide_blob(self, digest: bytes, found: BlobLookup) -> None:
        """Answer all calls that wait for a blob."""
        if (awaited := self._awaited.pop(digest, None)) is not None:
            awaited.set_result(found)

    def _put(self, message: MailboxMessage) -> None:
        self._messages.append(message)
        self._available.set()
