"""Calls functions in a Ray cluster, as if its processors were processes here."""

import asyncio
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from shoal.domain.errors import ConfigError, Unavailable
from shoal.domain.vocabulary import CallResult
from shoal.domain.work import Call, CallStream
from shoal.tasks import process_messages
from shoal.tasks.function_caller import CallStreamSlot, FetchBlob, OnProgress
from shoal.tasks.invocation import BLOB_MISSING
from shoal.tasks.limits import CLOSE_TIMEOUT, CLUSTER_START_TIMEOUT, PROCESSES_MAX
from shoal.tasks.process import CallProcess, ChildProcess, ProcessUser, Timeouts
from shoal.tasks.process_pool import ProcessPool


class SendToDriver(Protocol):
    def __call__(self, head: tuple[Any, ...], *tail: bytes) -> None: ...


class RaySlot:
    """What stands for a process: a ``CallProcess``.

    There is something in the cluster only while it has a user; a lane's actor goes with
    the lane, so that others can have its processor.

    Args:
        send: passes an order on.
        ended: called soon after it was killed, or what ran there has ended by itself.
    """

    def __init__(
        self, timeouts: Timeouts, send: SendToDriver, ended: Callable[["RaySlot"], None]
    ) -> None:
        self.timeouts = timeouts
        # Ray may have calls wait, for a processor or a process of its own.
        self.announces_start = True
        self._send = send
        self._on_end = ended
        self._user: ProcessUser | None = None
        self._call: int | None = None  # the number of the one that runs
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def user(self) -> ProcessUser | None:
        return self._user

    @user.setter
    def user(self, user: ProcessUser | None) -> None:
        if user is None and self._user is not None and self._call is None:
            self._send((process_messages.STOP,))
        self._user, self._call = user, None

    def send(self, head: tuple[Any, ...], *tail: bytes) -> None:
        if self._over.done():
            return
        if head[0] == process_messages.CALL:
            self._call = head[1]
        self._send(head, *tail)

    def kill(self) -> None:
        self._send((process_messages.STOP,))
        self._end()

    async def wait_closed(self) -> None:
        await asyncio.shield(self._over)

    def on_message(self, head: Sequence[Any], tail: bytes) -> None:
        """Take what is said of what runs here."""
        if head[0] == process_messages.LOST:
            user, self._user = self._user, None
            self._end()
            if user is not None:
                user.on_exit(head[1])
        elif self._user is not None and self._is_of_user(head):
            self._user.on_message(head, tail)

    def _is_of_user(self, head: Sequence[Any]) -> bool:
        """Say whether it is not about a call that has been over for a moment.

        What calls say goes another way than what they return, and may come later.
        """
        if head[0] == process_messages.BLOB_NEEDED:
            return True
        return (head[1] if len(head) > 1 else None) == self._call

    def on_cluster_lost(self, why: str) -> None:
        """Learn that the cluster is lost.

        A call may be made elsewhere.  Who has a lane is to give that up by itself: its
        calls are then given to others, which they are not if they return an error.
        """
        if self._user is not None and self._call is not None:
            self._user.on_message(
                (process_messages.RAISED, self._call, BLOB_MISSING), why.encode()
            )

    def _end(self) -> None:
        """End after whoever calls this has done what it is about."""
        if not self._over.done():
            self._over.set_result(None)
            asyncio.get_running_loop().call_soon(self._on_end, self)


DRIVER = "shoal.tasks.on_ray.driver"
INSTALL = "pip install 'shoal[ray]'"


class RayCaller:
    """A ``ResultListener`` whose calls are tasks of a Ray cluster, and its lanes
    actors there.

    It is of use until it loses the cluster; then another is to be made.

    Args:
        modules: what has the tasks: files, which are sent, or names of what the
            cluster's nodes have installed.
        address: the cluster's, as ``ray.init`` takes it.
        slots: 0: as many as the cluster has processors now.
    """

    def __init__(
        self, modules: Sequence[str], address: str, slots: int, *, trust_code: bool
    ) -> None:
        self.slots = slots
        self.names: frozenset[str] = frozenset()
        self.trusts_code = trust_code
        self._modules = modules
        self._address = address
        self._driver: ChildProcess | None = None
        self._processes: ProcessPool | None = None
        self._running: dict[int, RaySlot] = {}
        self._number = 0
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Connect.

        Raises ConfigError if Ray is not installed, the cluster cannot be used, or the
        modules cannot be imported there, Unavailable if it does not answer.
        """
        if find_spec("ray") is None:
            raise ConfigError(f"--engine ray: Ray is not installed: {INSTALL}")
        self._driver = await ChildProcess.start(
            [*map(_found, self._modules)],
            trust=self.trusts_code,
            threads=1,
            ended=_nobody_minds,
            program=(DRIVER, self._address),
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
            self._modules, self.slots, trust_code=self.trusts_code, start=self._slot
        )
        await self._processes.start()
        self.names = self._processes.names

    async def wait_lost(self) -> str:
        """Wait until the cluster is lost; return why."""
        return await asyncio.shield(self._lost)

    async def call(self, call: Call, fetch: FetchBlob, remark: OnProgress) -> bytes:
        if self._lost.done():
            raise Unavailable(self._lost.result())
        assert self._processes is not None, "it was started"
        return await self._processes.call(call, fetch, remark)

    def open_stream(
        self,
        lane: CallStream,
        fetch: FetchBlob,
        returned: Callable[[list[CallResult]], None],
    ) -> CallStreamSlot:
        if self._lost.done():
            raise Unavailable(self._lost.result())
        assert self._processes is not None, "it was started"
        return self._processes.open_stream(lane, fetch, returned)

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

    # What follows is called by the driver's process.

    def on_message(self, head: Sequence[Any], tail: bytes) -> None:
        code, number, *message = head
        assert code == process_messages.OF_SLOT, "a driver says nothing else"
        if (slot := self._running.get(number)) is not None:
            slot.on_message(message, tail)

    def on_exit(self, why: str) -> None:
        if not self._lost.done():
            why = "the connection to the Ray cluster has ended"
            self._lost.set_result(why)
            for slot in [*self._running.values()]:
                slot.on_cluster_lost(why)

    async def _slot(self, ended: Callable[[CallProcess], None]) -> CallProcess:
        """Return a slot, in the place of a process."""
        driver = self._driver
        assert driver is not None, "it was started"
        timeouts: Timeouts = driver.timeouts
        self._number += 1
        number = self._number

        def end(slot: RaySlot) -> None:
            self._running.pop(number, None)
            ended(slot)

        def send(head: tuple[Any, ...], *tail: bytes) -> None:
            driver.send((number, *head), *tail)

        slot = self._running[number] = RaySlot(timeouts, send, end)
        return slot


def _nobody_minds(driver: ChildProcess) -> None:
    """Do nothing at a driver's end, which its user is told of."""


def _found(module: str) -> str:
    """Return a module as its driver takes it; raises ConfigError if it is no file."""
    if not module.endswith(".py"):
        return module
    file = Path(module).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"--tasks {file}: there is no such file")
    return str(file)
