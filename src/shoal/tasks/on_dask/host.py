"""Code that runs in a Dask cluster's workers: calls, in processes of their own."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from distributed import Worker, get_worker
from distributed.diagnostics.plugin import WorkerPlugin

from shoal import __version__
from shoal.domain.errors import ConfigError, ShoalError, Unavailable
from shoal.domain.vocabulary import CallResult
from shoal.domain.work import Call, CallStream
from shoal.tasks.function_caller import CallStreamSlot
from shoal.tasks.limits import BLOB_TIMEOUT, BLOBS_MAX
from shoal.tasks.process_pool import ProcessPool

STARTED, PROGRESS, BLOB_NEEDED = range(3)
"""Codes of events; each event has the number of a call or stream, a code, and more."""

RETURNS_WAIT = 20.0  # seconds for which ``take_returns`` waits
STOPPED_MAX = 4096  # stopped calls that may still begin
STOPPED = "the call was stopped"

Outcome: TypeAlias = bytes | ShoalError


class DaskHost(WorkerPlugin):  # type: ignore[misc]  # mypy skips Dask
    """The processes of a Dask worker; Dask sets it up on those that come later too.

    Args:
        name: of this plugin, and of the topic of its events.
        modules: with the tasks, as names.
        files: the contents of modules that are files, by their names.
        variables: added to the environment of each process.
    """

    idempotent = False

    def __init__(
        self,
        name: str,
        modules: Sequence[str],
        files: dict[str, bytes],
        *,
        trust_code: bool,
        variables: dict[str, str],
    ) -> None:
        self.name = name
        self._modules = modules
        self._files = files
        self._trust_code = trust_code
        self._variables = variables

    async def setup(self, worker: Worker) -> None:
        """Start the processes; a failure is reported by ``describe``."""
        self._worker = worker
        self._folder = Path(tempfile.mkdtemp(prefix="shoal-"))
        self._running: dict[int, asyncio.Task[bytes]] = {}
        self._streams: dict[int, _HostedStream] = {}
        self._stopped: dict[int, None] = {}  # the latest last
        self._blobs = ReceivedBlobs(self._folder, worker.address, self._report)
        self.failure = ""
        files = []
        for name, contents in self._files.items():
            path = self._folder / name
            path.write_bytes(contents)
            files.append(str(path))
        self.pool = ProcessPool(
            [*self._modules, *files],
            worker.state.nthreads,
            trust_code=self._trust_code,
            variables=self._variables,
        )
        try:
            await self.pool.start()
        except ConfigError as error:
            self.failure = str(error)

    async def teardown(self, worker: Worker) -> None:
        """End the processes."""
        await self.pool.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def call(self, number: int, call: Call, grant: str) -> bytes:
        """Make a call, as ``FunctionCaller.call`` does."""
        self._begin(number)
        running = self._running[number] = asyncio.create_task(
            self.pool.call(
                call,
                partial(self._blobs.get, number),
                lambda share, remark: self._report(number, PROGRESS, share, remark),
                grant,
            )
        )
        try:
            await asyncio.wait([running])
        finally:
            running.cancel()
            del self._running[number]
        if running.cancelled():
            raise Unavailable(STOPPED)
        return running.result()

    async def stream(self, number: int, work: CallStream, grant: str) -> bytes:
        """Run a call stream until it is stopped."""
        self._begin(number)
        stream = _HostedStream()
        stream.slot = self.pool.open_stream(
            work, partial(self._blobs.get, number), stream.on_returned, grant
        )
        self._streams[number] = stream
        try:
            self._report(number, STARTED, self._worker.address)
            await stream.stopped.wait()
        finally:
            del self._streams[number]
            stream.slot.close()
            stream.changed.set()
        return b""

    def stop(self, number: int) -> None:
        """Stop a call or stream, which may not have begun."""
        if (running := self._running.get(number)) is not None:
            running.cancel()
        elif (stream := self._streams.get(number)) is not None:
            stream.stopped.set()
        else:
            self._stopped[number] = None
            if len(self._stopped) > STOPPED_MAX:
                del self._stopped[next(iter(self._stopped))]

    def change(
        self, number: int, changes: Sequence[tuple[Literal["push", "recall"], Any]]
    ) -> None:
        """Push calls to a stream, and recall others, in order."""
        if (stream := self._streams.get(number)) is not None:
            for method, argument in changes:
                if method == "push":
                    stream.slot.push(argument)
                else:
                    stream.slot.recall(argument)

    async def take_returns(self, number: int) -> list[CallResult] | None:
        """Wait for results of a stream; return all of them, or None after its end."""
        if (stream := self._streams.get(number)) is None:
            return None
        return await stream.take()

    def receive_blob(
        self, digest: bytes, request: int, data: bytes, reason: str
    ) -> None:
        """Accept a part of a blob, nothing at its end, or why there is none."""
        self._blobs.receive(digest, request, data, reason)

    def _begin(self, number: int) -> None:
        if number in self._stopped:
            raise Unavailable(STOPPED)
        if self.failure:  # of this worker, and not of those there were at the start
            raise Unavailable(f"on a worker of the Dask cluster: {self.failure}")

    def _report(self, *event: Any) -> None:
        self._worker.log_event(self.name, event)


class _HostedStream:
    """A call stream, and the results that were not taken yet."""

    slot: CallStreamSlot

    def __init__(self) -> None:
        self.stopped = asyncio.Event()
        self.changed = asyncio.Event()
        self._returns: list[CallResult] = []

    def on_returned(self, returns: list[CallResult]) -> None:
        self._returns += returns
        self.changed.set()

    async def take(self) -> list[CallResult] | None:
        try:
            async with asyncio.timeout(RETURNS_WAIT):
                await self.changed.wait()
        except TimeoutError:
            pass
        self.changed.clear()
        returns, self._returns = self._returns, []
        return None if self.stopped.is_set() and not returns else returns


class ReceivedBlobs:
    """Received large arguments; the least recently used are deleted first."""

    def __init__(self, folder: Path, address: str, report: Callable[..., None]) -> None:
        self._folder = folder
        self._address = address
        self._report = report
        self._stored: dict[bytes, int] = {}  # sizes; the most recently used is last
        self._awaited: dict[bytes, tuple[int, asyncio.Future[None]]] = {}
        self._requests = 0

    async def get(self, number: int, digest: bytes) -> Path:
        """Return the file with a blob; raises Unavailable if it is not sent."""
        path = self._folder / digest.hex()
        if digest in self._stored:
            self._stored[digest] = self._stored.pop(digest)
            return path
        if digest not in self._awaited:
            self._requests += 1
            awaited = asyncio.get_running_loop().create_future()
            self._awaited[digest] = self._requests, awaited
            path.unlink(missing_ok=True)
            self._report(number, BLOB_NEEDED, self._address, digest, self._requests)
        request, awaited = self._awaited[digest]
        try:
            async with asyncio.timeout(BLOB_TIMEOUT):
                await asyncio.shield(awaited)
        except TimeoutError:
            if self._awaited.get(digest) == (request, awaited):
                del self._awaited[digest]
            raise Unavailable("a large argument did not arrive in time") from None
        return path

    def receive(self, digest: bytes, request: int, data: bytes, reason: str) -> None:
        """Accept a part; those of a request that was given up do not count."""
        current, awaited = self._awaited.get(digest, (0, None))
        if awaited is None or current != request:
            return
        path = self._folder / digest.hex()
        if data:
            with path.open("ab") as file:
                file.write(data)
            return
        del self._awaited[digest]
        if reason:
            awaited.set_exception(Unavailable(reason))
            return
        self._stored[digest] = path.stat().st_size
        awaited.set_result(None)
        while sum(self._stored.values()) > BLOBS_MAX and len(self._stored) > 1:
            oldest = next(iter(self._stored))
            del self._stored[oldest]
            (self._folder / oldest.hex()).unlink(missing_ok=True)


async def run(host: str, method: str, *arguments: Any) -> Outcome:
    """Call a method of the host, as a task of Dask's; return its error too."""
    try:
        outcome: bytes = await getattr(get_worker().plugins[host], method)(*arguments)
    except ShoalError as error:
        return error
    return outcome


async def tell(host: str, method: str, *arguments: Any, dask_worker: Worker) -> Any:
    """Call a method of the host at once, beside the tasks."""
    found = getattr(dask_worker.plugins[host], method)(*arguments)
    return await found if asyncio.iscoroutine(found) else found


def describe(host: str, dask_worker: Worker) -> tuple[list[str], int, str]:
    """Return the names of the tasks, the slots, and why there are none."""
    plugin = dask_worker.plugins[host]
    return sorted(plugin.pool.names), plugin.pool.slots, plugin.failure


def version() -> str:
    """Return the version of Shoal in the cluster."""
    return __version__
