"""Calls functions in a Ray cluster, as if its processors were processes here."""

import asyncio
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.domain.errors import ConfigError, Unavailable
from shoal.domain.vocabulary import LaneReturn
from shoal.domain.work import Call, Lane
from shoal.tasks import orders
from shoal.tasks.limits import CLOSE_WITHIN, CLUSTER_WITHIN, PROCESSES_MAX
from shoal.tasks.on_ray.slot import RaySlot
from shoal.tasks.port import Fetch, OpenLane, Remark
from shoal.tasks.process import Process, Runner, Timeouts
from shoal.tasks.processes import Processes

DRIVER = "shoal.tasks.on_ray.driver"
INSTALL = "pip install 'shoal[ray]'"


class RayCaller:
    """A ``Caller`` whose calls are tasks of a Ray cluster, and its lanes actors there.

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
        self._driver: Process | None = None
        self._processes: Processes | None = None
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
        self._driver = await Process.start(
            [*map(_found, self._modules)],
            trust=self.trusts_code,
            threads=1,
            ended=_nobody_minds,
            program=(DRIVER, self._address),
            within=CLUSTER_WITHIN,
        )
        self._driver.user = self
        self.slots = min(self.slots or self._driver.slots, PROCESSES_MAX)
        if not self.slots:
            await self.close()
            raise ConfigError(
                f"the Ray cluster at {self._address} has no processors; give --slots "
                "if it starts nodes when there is work"
            )
        self._processes = Processes(
            self._modules, self.slots, trust_code=self.trusts_code, start=self._slot
        )
        await self._processes.start()
        self.names = self._processes.names

    async def gone(self) -> str:
        """Wait until the cluster is lost; return why."""
        return await asyncio.shield(self._lost)

    async def call(self, call: Call, fetch: Fetch, remark: Remark) -> bytes:
        if self._lost.done():
            raise Unavailable(self._lost.result())
        assert self._processes is not None, "it was started"
        return await self._processes.call(call, fetch, remark)

    def lane(
        self, lane: Lane, fetch: Fetch, returned: Callable[[list[LaneReturn]], None]
    ) -> OpenLane:
        if self._lost.done():
            raise Unavailable(self._lost.result())
        assert self._processes is not None, "it was started"
        return self._processes.lane(lane, fetch, returned)

    async def close(self) -> None:
        if self._processes is not None:
            await self._processes.close()
        if (driver := self._driver) is None:
            return
        driver.user = None
        driver.dismiss()
        try:
            async with asyncio.timeout(CLOSE_WITHIN):
                await driver.gone()
        except TimeoutError:
            driver.kill()
            await driver.gone()

    # What follows is called by the driver's process.

    def heard(self, head: Sequence[Any], tail: bytes) -> None:
        code, number, *message = head
        assert code == orders.OF_SLOT, "a driver says nothing else"
        if (slot := self._running.get(number)) is not None:
            slot.heard(message, tail)

    def lost(self, why: str) -> None:
        if not self._lost.done():
            why = "the connection to the Ray cluster has ended"
            self._lost.set_result(why)
            for slot in [*self._running.values()]:
                slot.unavailable(why)

    async def _slot(self, ended: Callable[[Runner], None]) -> Runner:
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


def _nobody_minds(driver: Process) -> None:
    """Do nothing at a driver's end, which its user is told of."""


def _found(module: str) -> str:
    """Return a module as its driver takes it; raises ConfigError if it is no file."""
    if not module.endswith(".py"):
        return module
    file = Path(module).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"--tasks {file}: there is no such file")
    return str(file)
