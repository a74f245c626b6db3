"""Calls functions in a Dask cluster through the interface of local processes."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import distributed
from distributed import Client, KilledWorker

from shoal import __version__
from shoal.config.installation import this_installation
from shoal.domain.addresses import host_and_port
from shoal.domain.errors import ConfigError, ShoalError, Unavailable
from shoal.domain.vocabulary import CallResult, StreamedCall
from shoal.domain.work import Call, CallStream
from shoal.tasks import limits, process
from shoal.tasks.function_caller import CallStreamSlot, FetchBlob, OnProgress
from shoal.tasks.on_dask import host
from shoal.tasks.process_calls import too_many_calls
from shoal.tasks.process_pool import check_supported
from shoal.tasks.registry import task_file

CONNECT_TIMEOUT = 10.0  # seconds
LOOK_INTERVAL = 0.5  # seconds between looks at the connection
PART = 4 << 20  # bytes of a blob that are sent at once
LOST = "the connection to the Dask cluster has ended"
DASK_LOGS = ("distributed", "distributed.client", "tornado.application")
"""They report a lost cluster, as the worker does, but with tracebacks."""
UNUSABLE = (OSError, ValueError, ImportError, RuntimeError, TimeoutError)
"""Errors of a cluster that cannot be used."""


class DaskCaller:
    """A ``FunctionCaller`` that runs each call and call stream as a task of Dask's.

    It cannot be used again after it has lost the cluster.

    Args:
        modules: the modules with the tasks: files, which are sent, or the names of
            modules that the cluster's workers have installed.
        address: the scheduler's, HOST:PORT.
        slots: concurrent calls; 0: the number of the cluster's threads now.
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
        self.on_lent: Callable[[int], None] | None = None  # its slots are Dask's
        self.names: frozenset[str] = frozenset()
        self.trusts_code = trust_code
        self._modules = modules
        self._address = address
        self._variables = variables
        self._host = ""  # the name of the plugin, and of its events
        self._client: Client | None = None
        self._number = 0
        self._work: dict[int, Work] = {}
        self._streams = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Connect, and start processes in the cluster.

        Raises ConfigError if the cluster is unusable, or the modules cannot be imported
        there.
        """
        try:
            hosts = await self._set_up()
        except UNUSABLE as error:
            raise ConfigError(_unusable(self._address, error)) from error
        if not hosts:
            raise ConfigError(
                f"the Dask cluster at {self._address} has no workers: start one with "
                f"`dask worker {self._address}`"
            )
        for _, _, failure in hosts:
            if failure:
                raise ConfigError(failure)
        self.names = frozenset.intersection(
            *(frozenset(names) for names, _, _ in hosts)
        )
        threads = sum(slots for _, slots, _ in hosts)
        self.slots = min(self.slots or threads, limits.PROCESSES_MAX)
        self.spawn(self._watch())

    async def wait_lost(self) -> str:
        """Wait until the cluster is lost; return the reason."""
        return await asyncio.shield(self._lost)

    async def call(
        self, call: Call, fetch: FetchBlob, on_progress: OnProgress, grant: str = ""
    ) -> bytes:
        check_supported(call, self.names, trusts_code=self.trusts_code)
        return await self.run(Work(fetch, on_progress), "call", call, grant)

    def open_stream(
        self,
        stream: CallStream,
        fetch: FetchBlob,
        on_returned: Callable[[list[CallResult]], None],
        grant: str = "",
    ) -> CallStreamSlot:
        check_supported(stream, self.names, trusts_code=self.trusts_code)
        if self._streams >= self.slots:
            raise Unavailable(f"all {self.slots} slots are taken")
        self._streams += 1
        return _DaskStream(self, stream, fetch, on_returned, self._on_closed, grant)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait([*self._tasks])
        if (client := self._client) is None:
            return
        with suppress(*UNUSABLE):
            async with asyncio.timeout(limits.CLOSE_TIMEOUT):
                if not self._lost.done():
                    await client.unregister_worker_plugin(self._host)
        with suppress(*UNUSABLE):
            await client.close(limits.CLOSE_TIMEOUT)

    # For calls and streams.

    async def run(self, work: "Work", method: str, *arguments: Any) -> bytes:
        """Run a method of the hosts as a task of Dask's; cancellation stops it.

        Raises what the method raises, and Unavailable if the cluster does not run it.
        """
        client = self._connected
        self._number += 1
        work.number = self._number
        self._work[work.number] = work
        made = client.submit(
            *(host.run, self._host, method, work.number, *arguments),
            key=f"{self._host}-{work.number}",
            pure=False,
        )
        try:
            outcome: host.Outcome = await made
        # Dask gives the tasks of lost workers to others, but not without end.
        except (distributed.CancelledError, KilledWorker, *UNUSABLE) as error:
            raise Unavailable(
                f"the Dask cluster did not run the call: {error}"
            ) from error
        except asyncio.CancelledError:
            self.spawn(self._stop(work, made))
            raise
        finally:
            del self._work[work.number]
        if isinstance(outcome, ShoalError):
            raise outcome
        return outcome

    async def tell(self, work: "Work", method: str, *arguments: Any) -> Any:
        """Call a method of the host that runs some work; None if the host has gone.

        Raises Unavailable if the cluster is lost.
        """
        return await self._tell(work.address, method, work.number, *arguments)

    async def _tell(self, address: str, method: str, *arguments: Any) -> Any:
        try:
            answers = await self._connected.run(
                *(host.tell, self._host, method, *arguments),
                workers=[address] if address else None,
                on_error="ignore",
            )
        except UNUSABLE as error:
            raise Unavailable(f"the Dask cluster does not answer: {error}") from error
        return answers.get(address)

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start what ends with this caller at the latest."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Connection.

    @property
    def _connected(self) -> Client:
        if self._lost.done():
            raise Unavailable(self._lost.result())
        assert self._client is not None, "it was started"
        return self._client

    async def _set_up(self) -> list[tuple[list[str], int, str]]:
        """Connect; return what each worker of the cluster says of its host."""
        files = [task_file(each) for each in self._modules if each.endswith(".py")]
        # Dask's client tries for long, and does not close what it has begun.
        async with asyncio.timeout(CONNECT_TIMEOUT):
            _, writer = await asyncio.open_connection(*_place(self._address))
            writer.close()
        for each in DASK_LOGS:
            logging.getLogger(each).setLevel(logging.CRITICAL)
        self._client = client = await Client(
            self._address,
            asynchronous=True,
            set_as_default=False,
            timeout=CONNECT_TIMEOUT,
            name="shoal",
        )
        versions = {*(await client.run(host.version)).values()}
        if others := versions - {__version__}:
            raise ConfigError(
                f"the Dask cluster has shoal {', '.join(sorted(others))}, and this is "
                f"{__version__}; install the same version on its workers"
            )
        # Several of Shoal's workers may use one cluster.
        self._host = f"shoal-{client.id}"
        client.subscribe_topic(self._host, self._on_event)
        plugin = host.DaskHost(
            self._host,
            [each for each in self._modules if not each.endswith(".py")],
            {each.name: each.read_bytes() for each in files},
            trust_code=self.trusts_code,
            variables=dict(self._variables),
        )
        await client.register_plugin(plugin)
        return [*(await client.run(host.describe, self._host)).values()]

    async def _watch(self) -> None:
        """Notice that the cluster is lost: Dask has no event for it."""
        assert self._client is not None, "it was started"
        while self._client.status == "running":  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(LOOK_INTERVAL)
        self._lost.set_result(LOST)

    async def _stop(self, work: "Work", made: Any) -> None:
        """Stop work that may not have begun."""
        with suppress(Unavailable, *UNUSABLE):
            await self._connected.cancel([made])
            await self.tell(work, "stop")

    def _on_closed(self) -> None:
        self._streams -= 1

    # Events of the hosts.

    def _on_event(self, event: tuple[float, tuple[Any, ...]]) -> None:
        _, (number, code, *arguments) = event
        if (work := self._work.get(number)) is None:
            return  # it has just ended
        if code == host.PROGRESS and work.on_progress is not None:
            work.on_progress(*arguments)
        elif code == host.STARTED:
            (work.address,) = arguments
            if work.on_started is not None:
                work.on_started()
        elif code == host.BLOB_NEEDED:
            self.spawn(self._send_blob(work, *arguments))

    async def _send_blob(
        self, work: "Work", address: str, digest: bytes, request: int
    ) -> None:
        """Send a worker of the cluster a blob in parts, or why there is none."""
        reason = ""
        try:
            path = await work.fetch(digest)
            with path.open("rb") as file:
                while data := await asyncio.to_thread(file.read, PART):
                    await self._tell(address, "receive_blob", digest, request, data, "")
        except (Unavailable, OSError) as error:
            reason = str(error)
        with suppress(Unavailable):
            await self._tell(address, "receive_blob", digest, request, b"", reason)


@dataclass(slots=True, eq=False)
class Work:
    """A call or call stream in the cluster; ``address`` is empty until it is known."""

    fetch: FetchBlob
    on_progress: OnProgress | None = None
    on_started: Callable[[], None] | None = None
    number: int = 0
    address: str = ""


class _DaskStream:
    """A call stream that is a task of Dask's.

    If Dask begins it anew, because the worker of the cluster was lost, the calls that
    have not returned are made again.
    """

    def __init__(
        self,
        caller: DaskCaller,
        stream: CallStream,
        fetch: FetchBlob,
        on_returned: Callable[[list[CallResult]], None],
        on_closed: Callable[[], None],
        grant: str,
    ) -> None:
        self._caller = caller
        self._on_returned = on_returned
        self._on_closed = on_closed
        self._work = Work(fetch, on_started=self._on_started)
        self._open: dict[int, StreamedCall] = {}  # not returned yet, in order
        self._unsent: list[tuple[str, list[Any]]] = []  # methods with their argument
        self._changed = asyncio.Event()
        self._closed = False
        self._running = caller.spawn(self._run(stream, grant))
        self._helpers: list[asyncio.Task[None]] = []

    @property
    def idle(self) -> bool:
        return not self._open

    def push(self, calls: Sequence[StreamedCall]) -> None:
        if len(self._open) + len(calls) > limits.STREAM_CALLS_MAX:
            self._on_returned(too_many_calls(calls))
            return
        self._open.update((each.number, each) for each in calls)
        self._send("push", [*calls])

    def recall(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._open.pop(number, None)
        self._send("recall", [*numbers])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._end_helpers()
            self._running.cancel()
            self._on_closed()

    def _send(self, method: str, argument: list[Any]) -> None:
        if self._work.address:
            self._unsent.append((method, argument))
            self._changed.set()

    async def _run(self, stream: CallStream, grant: str) -> None:
        try:
            await self._caller.run(self._work, "stream", stream, grant)
            reason = "the call stream has ended in the Dask cluster"
        except ShoalError as error:
            reason = str(error)
        self._end_helpers()
        if not self._closed:
            self._return([CallResult(each, b"", reason) for each in self._open])

    def _on_started(self) -> None:
        """Begin to send and to take, also after Dask has moved the stream."""
        self._end_helpers()
        self._unsent = [("push", [*self._open.values()])]
        self._changed.set()
        self._helpers = [
            self._caller.spawn(self._send_all()),
            self._caller.spawn(self._take_all()),
        ]

    def _end_helpers(self) -> None:
        for each in self._helpers:
            each.cancel()

    async def _send_all(self) -> None:
        """Send in order, all that has come meanwhile at once."""
        with suppress(Unavailable):
            while True:
                await self._changed.wait()
                self._changed.clear()
                unsent, self._unsent = self._unsent, []
                await self._caller.tell(self._work, "change", unsent)

    async def _take_all(self) -> None:
        with suppress(Unavailable):
            while (
                returns := await self._caller.tell(self._work, "take_returns")
            ) is not None:
                self._return(returns)

    def _return(self, returns: list[CallResult]) -> None:
        """Return the results of calls that have none yet: calls may be made twice."""
        new = [each for each in returns if self._open.pop(each.number, None)]
        if new:
            self._on_returned(new)


def _place(address: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT, perhaps after a scheme.

    Raises ValueError.
    """
    found = host_and_port(address.rpartition("://")[2])
    if found is None:
        raise ValueError("not HOST:PORT")
    return found


def _unusable(address: str, error: Exception) -> str:
    """Return why a cluster is unusable, and a remedy."""
    if "No module named 'shoal'" in str(error):
        return (
            f"the Dask cluster at {address} has no shoal to run calls; install on its "
            f"workers: {this_installation().same_elsewhere(__version__)}"
        )
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"--dask-address {address}: the Dask cluster cannot be used: {lines[-1]}"
