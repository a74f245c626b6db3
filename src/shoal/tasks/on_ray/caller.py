"""Calls functions in a Ray cluster through the interface of local processes."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from shoal.config.installation import install_extra
from shoal.domain.errors import ConfigError, Unavailable
from shoal.domain.vocabulary import CallResult
from shoal.domain.work import Call, CallStream
from shoal.tasks import process, process_messages
from shoal.tasks.function_caller import CallStreamSlot, FetchBlob, OnProgress
from shoal.tasks.invocation import BLOB_MISSING
from shoal.tasks.limits import CLOSE_TIMEOUT, CLUSTER_START_TIMEOUT, PROCESSES_MAX
from shoal.tasks.process_pool import ProcessPool
from shoal.tasks.registry import task_file


class SendToDriver(Protocol):
    def __call__(self, head: tuple[Any, ...], *tail: bytes) -> None: ...


class RaySlot:
    """A slot in the cluster, as a ``CallProcess``.

    It uses the cluster only while it has a user; a call stream's actor ends with the
    stream, so that other work can use its processor.

    Args:
        send: sends a command to the driver.
        on_end: called soon after the slot was killed, or its task or actor has ended.
    """

    def __init__(
        self,
        timeouts: process.Timeouts,
        send: SendToDriver,
        on_end: Callable[["RaySlot"], None],
    ) -> None:
        self.timeouts = timeouts
        # Calls may wait in Ray for a processor or a process.
        self.announces_start = True
        # Unused.
        self.on_waiting: Callable[[process.CallProcess, bool], None] | None = None
        self._send = send
        self._on_end = on_end
        self._user: process.ProcessUser | None = None
        self._call: int | None = None  # the number of the running call
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def user(self) -> process.ProcessUser | None:
        return self._user

    @user.setter
    def user(self, user: process.ProcessUser | None) -> None:
        if user is None and self._user is not None and self._call is None:
            self._send((process_messages.STOP,))
        self._user, self._call = user, None

    def send(self, head: tuple[Any, ...], *tail: bytes) -> None:
        if self._closed.done():
            return
        if head[0] == process_messages.CALL:
            self._call = head[1]
        self._send(head, *tail)

    def kill(self) -> None:
        self._send((process_messages.STOP,))
        self._end()

    async def wait_closed(self) -> None:
        await asyncio.shield(self._closed)

    def on_message(self, head: Sequence[Any], tail: bytes) -> None:
        """Handle a message about the call or stream of this slot."""
        if head[0] == process_messages.LOST:
            user, self._user = self._user, None
            self._end()
            if user is not None:
                user.on_exit(head[1])
        elif self._user is not None and self._concerns_user(head):
            self._user.on_message(head, tail)

    def _concerns_user(self, head: Sequence[Any]) -> bool:
        """Return whether a message is not about a call that has just ended.

        Progress and results take different paths, so progress may arrive late.
        """
        if head[0] == process_messages.BLOB_NEEDED:
            return True
        return (head[1] if len(head) > 1 else None) == self._call

    def on_cluster_lost(self, reason: str) -> None:
        """Fail the slot's work, because the cluster is lost.

        A single call may be retried elsewhere.  A call stream ends: its calls then go
        to other workers, which they would not if they returned an error.
        """
        if self._user is not None and self._call is not None:
            tail = reason.encode()
            head = (process_messages.RAISED, self._call, BLOB_MISSING, len(tail))
            self._user.on_message(head, tail)

    def _end(self) -> None:
        """Report the end after the caller has finished its current step."""
        if not self._closed.done():
            self._closed.set_result(None)
            asyncio.get_running_loop().call_soon(self._on_end, self)


DRIVER = "shoal.tasks.on_ray.driver"


class RayCaller:
    """A ``FunctionCaller`` that runs calls as Ray tasks, and call streams as actors.

    It cannot be used again after it has lost the cluster.

    Args:
        modules: the modules with the tasks: files, which are sent, or the names of
            modules that the cluster's nodes have installed.
        address: the cluster's, as ``ray.init`` takes it.
        slots: concurrent calls; 0: the number of the cluster's processors now.
        variables: those of ``running_call``, for the processes of the cluster.
    """

    def __init__(
        self,
        modules: Sequence[str],
        address: str,
        slots: int,
        *,
        trust_code: bool,
        variables: Mapping[str, str] = process.NO_VARIABLES,
    ) -> None:
        self.slots = slots
        self.on_lent: Callable[[int], None] | None = None  # Ray lends no slots
        self.names: frozenset[str] = frozenset()
        self.trusts_code = trust_code
        self._modules = modules
        self._address = address
        self._variables = variables
        self._driver: process.ChildProcess | None = None
        self._processes: ProcessPool | None = None
        self._running: dict[int, RaySlot] = {}
        self._number = 0
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Connect.

        Raises ConfigError if Ray is not installed, the cluster is unusable, or the
        modules cannot be imported there, Unavailable if it does not answer.
        """
        if find_spec("ray") is None:
            raise ConfigError(
                f"--engine ray: Ray is not installed: {install_extra('ray')}"
            )
        self._driver = await process.ChildProcess.start(
            [*map(_driver_module, self._modules)],
            trust=self.trusts_code,
            threads=1,
            on_end=_ignore_exit,
            program=(DRIVER, self._address),
            variables=self._variables,
            within=CLUSTER_START_TIMEOUT,
        )
        self._driver.user = self
        self.slots = min(self.slots or self._driver.slots, PROCESSES_MAX)
        if not self.slots:
            await self.close()
            raise ConfigError(
                f"the Ray cluster at {self._address} has no processors; give --slots "
                "if it starts nodes when there is work"
            )
        self._processes = ProcessPool(
            self._modules,
            self.slots,
            trust_code=self.trusts_code,
            start=self._open_slot,
        )
        await self._processes.start()
        self.names = self._processes.names

    async def wait_lost(self) -> str:
        """Wait until the cluster is lost; return the reason."""
        return await asyncio.shield(self._lost)

    async def call(
        self, call: Call, fetch: FetchBlob, on_progress: OnProgress, grant: str = ""
    ) -> bytes:
        return await self._slots.call(call, fetch, on_progress, grant)

    def open_stream(
        self,
        stream: CallStream,
        fetch: FetchBlob,
        on_returned: Callable[[list[CallResult]], None],
        grant: str = "",
    ) -> CallStreamSlot:
        return self._slots.open_stream(stream, fetch, on_returned, grant)

    async def close(self) -> None:
        if self._processes is not None:
            await self._processes.close()
        if (driver := self._driver) is None:
            return
        driver.user = None
        driver.close_input()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await driver.wait_closed()
        except TimeoutError:
            driver.kill()
            await driver.wait_closed()

    @property
    def _slots(self) -> ProcessPool:
        """The slots.  Raises Unavailable if the cluster is lost."""
        if self._lost.done():
            raise Unavailable(self._lost.result())
        assert self._processes is not None, "it was started"
        return self._processes

    # Called by the driver's process.

    def on_message(self, head: Sequence[Any], tail: bytes) -> None:
        code, number, *message = head
        assert code == process_messages.OF_SLOT, "unexpected message from the driver"
        if (slot := self._running.get(number)) is not None:
            slot.on_message(message, tail)

    def on_exit(self, reason: str) -> None:
        if not self._lost.done():
            reason = "the connection to the Ray cluster has ended"
            self._lost.set_result(reason)
            for slot in [*self._running.values()]:
                slot.on_cluster_lost(reason)

    async def _open_slot(
        self, on_end: Callable[[process.CallProcess], None]
    ) -> process.CallProcess:
        """Return a slot in place of a process."""
        driver = self._driver
        assert driver is not None, "it was started"
        timeouts: process.Timeouts = driver.timeouts
        self._number += 1
        number = self._number

        def end(slot: RaySlot) -> None:
            self._running.pop(number, None)
            on_end(slot)

        def send(head: tuple[Any, ...], *tail: bytes) -> None:
            driver.send((number, *head), *tail)

        slot = self._running[number] = RaySlot(timeouts, send, end)
        return slot


def _ignore_exit(driver: process.ChildProcess) -> None:
    """Ignore a driver's exit, which ``RayCaller`` handles."""


def _driver_module(module: str) -> str:
    """Return a module in the driver's form; raises ConfigError if a file is missing."""
    return str(task_file(module)) if module.endswith(".py") else module
