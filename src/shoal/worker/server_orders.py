"""Carries out orders about the models of servers, which load them by themselves.

The server says what it has loaded: its owner and other clients also have it load
models.  So nothing is remembered here but what is being done; and when the worker
leaves, the server keeps what it has.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from shoal.domain.errors import JobError, Unavailable
from shoal.domain.work import ModelOrder
from shoal.engines.engine import Progress
from shoal.engines.server_control import ServerControl
from shoal.worker.agent import WorkerEvent
from shoal.worker.model_offers import OfferedEngine

PROGRESS_INTERVAL = 5.0  # seconds between reports
LOAD_MAX = 900.0  # seconds: a server does not say how far it is, or whether it is stuck
UNLOAD_MAX = 60.0  # seconds, once it has no more jobs
UNLOADED = "unloaded on order"
LEAVING = "this worker is leaving"


@dataclass(frozen=True, slots=True, eq=False)
class ControlledServer:
    """A server's engine, as it is offered, and what loads its models."""

    offered: OfferedEngine
    control: ServerControl


class ServerOrders:
    """Loads and unloads the models of servers.

    Several orders for one model wait for the same load, which goes on if they are
    cancelled: no server stops one.  The owner of this sets ``synchronize``, which
    offers what the engines have now, for a reason if it is less.
    """

    def __init__(
        self,
        servers: Sequence[ControlledServer],
        report: Callable[[str, WorkerEvent], None],
    ) -> None:
        self.synchronize: Callable[[str], None] = _unbound
        self._servers = servers
        self._report = report
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._unloading: dict[str, asyncio.Task[None]] = {}

    @property
    def memory(self) -> int:
        """The bytes that loaded models need, and loading ones, as far as known."""
        loaded = sum(each.control.memory for each in self._servers)
        loading = (
            each.control.need(name)
            for name in self._loading
            if (each := self.find(name)) and not each.control.is_loaded(name)
        )
        return loaded + sum(loading)

    def find(self, name: str) -> ControlledServer | None:
        """Return the server that loads a model, and offers it by this name."""
        for server in self._servers:
            selected = server.offered.select(server.control.served)
            if any(each.name == name for each in selected):
                return server
        return None

    def has(self, name: str) -> bool:
        """Return whether a model is loaded, or is being loaded."""
        server = self.find(name)
        loaded = server is not None and server.control.is_loaded(name)
        return loaded or name in self._loading

    def leave(self) -> None:
        """Wait for no more loads."""
        for task in (*self._loading.values(), *self._unloading.values()):
            task.cancel()

    async def close(self) -> None:
        """End what is being done."""
        self.leave()
        tasks = (*self._loading.values(), *self._unloading.values())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def load(
        self, server: ControlledServer, order: ModelOrder
    ) -> AsyncGenerator[Progress, None]:
        """Have a model loaded, and offer it.  Raises JobError, and Unavailable."""
        name = order.name
        if (unloading := self._unloading.get(name)) is not None:
            async for step in _until(unloading, "is being unloaded"):
                yield step
        loading = self._loading.get(name)
        if loading is None:
            if server.control.is_loaded(name):
                return
            loading = asyncio.create_task(self._open(server, name, order.context))
            self._loading[name] = loading
            loading.add_done_callback(partial(self._on_loaded, name))
            self._report(name, WorkerEvent("loading", "on order"))
        async for step in _until(loading, "the server loads it"):
            yield step
        _check(loading)

    async def unload(
        self, server: ControlledServer, order: ModelOrder
    ) -> AsyncGenerator[Progress, None]:
        """Have a model unloaded once its jobs have ended.

        Raises JobError, and Unavailable.
        """
        name, control = order.name, server.control
        if (loading := self._loading.get(name)) is not None:
            async for step in _until(loading, "is being loaded"):
                yield step
        unloading = self._unloading.get(name)
        if unloading is None:
            if not control.is_loaded(name):
                return
            control.withdraw(name)
            self.synchronize(UNLOADED)
            idle = asyncio.create_task(control.wait_idle(name))
            try:
                async for step in _until(idle, "finishes its jobs"):
                    yield step
            except BaseException:
                control.restore(name)
                self.synchronize("")
                raise
            finally:
                idle.cancel()
            unloading = asyncio.create_task(self._close(server, name))
            self._unloading[name] = unloading
            unloading.add_done_callback(lambda _: self._unloading.pop(name))
        async for step in _until(unloading, "the server unloads it"):
            yield step
        _check(unloading)

    async def _open(self, server: ControlledServer, name: str, context: int) -> None:
        try:
            async with asyncio.timeout(LOAD_MAX):
                await server.control.load(name, context)
        except TimeoutError:
            raise JobError(
                f"the server did not load it within {LOAD_MAX:.0f} s"
            ) from None
        await server.offered.monitor.check()
        self.synchronize("")

    async def _close(self, server: ControlledServer, name: str) -> None:
        try:
            async with asyncio.timeout(UNLOAD_MAX):
                await server.control.unload(name)
            await server.offered.monitor.check()
        except TimeoutError:
            raise JobError(
                f"the server did not unload it within {UNLOAD_MAX:.0f} s"
            ) from None
        finally:
            server.control.restore(name)
            self.synchronize(UNLOADED)

    def _on_loaded(self, name: str, loading: "asyncio.Task[None]") -> None:
        del self._loading[name]
        if not loading.cancelled() and (error := loading.exception()) is not None:
            self._report(name, WorkerEvent("failed", str(error)))


async def _until(
    task: "asyncio.Task[None]", remark: str
) -> AsyncGenerator[Progress, None]:
    """Report that something goes on until a task has ended, as long as that may be."""
    while not task.done():
        await asyncio.wait((task,), timeout=PROGRESS_INTERVAL)
        if not task.done():
            yield Progress(None, remark)


def _check(task: "asyncio.Task[None]") -> None:
    """Raise why a task has failed, if it has."""
    if task.cancelled():
        raise Unavailable(LEAVING)
    if (error := task.exception()) is not None:
        raise error


def _unbound(reason: str) -> None:
    raise AssertionError("orders come once offers are made")
