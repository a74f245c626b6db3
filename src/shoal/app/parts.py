"""The processes of a coordinator with fronts: the hub, its standby, and the fronts.

The first process, which starts them, has the listening sockets, and nothing else.  The
standby has imported and read everything that a hub needs before it opens the store.
"""

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from shoal.config import ServeConfig
from shoal.domain.errors import ConfigError
from shoal.processes.programs import STOP_WITH_STDIN
from shoal.transports.acceptor import BoundAddress
from shoal.transports.http_server import listen_for_http

PART = "SHOAL_PART"
"""The variable that tells a process which part of a coordinator it is."""

FRONTS_MAX = 64
NO_FRONTS = (
    "--fronts: Windows has no Unix sockets for asyncio, by which fronts reach the hub; "
    "leave the option out"
)
LINK_SOCKET = "link"
HTTP_SOCKET = "http"
OLLAMA_SOCKET = "ollama"
SOCKETS = (LINK_SOCKET, HTTP_SOCKET, OLLAMA_SOCKET)
RETURN_SECONDS = 2.0  # seconds in which clients come back to a new hub
SHORT_LIFE = 5.0  # seconds: a process that ended so soon waits before it is repeated
STANDBY_SHORT_LIFE = 60.0  # the same of a standby, whose start may take most of it
STDIN = 0  # a socket, whose other end the first process has
# What a standby and a hub write to it.
PREPARED, SERVING, ALIVE, ENDED = b"p", b"s", b"a", b"e"
TURN = b"t"  # what a standby reads from it when it is to be the hub
STOP_TIMEOUT = 5.0  # seconds that a front gets to end
# Looks at the hub of a node without a sign of it, after which it is killed, and the
# pause between them: 3.5 seconds, in which this process runs.
SILENT_LOOKS = 14
LOOK_EVERY = 0.25  # seconds

log = logging.getLogger("shoal.app")


# Names of the processes, once they have begun.
HUB_NAME, STANDBY_NAME, FRONT_NAME = "shoal-hub", "shoal-standby", "shoal-front"


class HubPart(msgspec.Struct, frozen=True, tag=True):
    """The process with the hub.

    ``folder`` has the sockets by which fronts reach it.  They listen at ``host`` and
    ``port``, and for Ollama's API at ``ollama_port``.  ``announces``: it is the first.
    ``stands_by``: it waits to be the next one.
    """

    folder: str
    host: str
    port: int
    ollama_port: int | None
    announces: bool = True
    stands_by: bool = False

    @property
    def bound(self) -> BoundAddress:
        """Where the fronts listen."""
        return BoundAddress(self.host, self.port)

    def socket(self, name: str) -> Path:
        """Return the path of a socket."""
        return Path(self.folder, name)

    @property
    def sockets(self) -> dict[str, Path]:
        """The paths of the sockets, by name."""
        return {each: self.socket(each) for each in SOCKETS}


class FrontPart(msgspec.Struct, frozen=True, tag=True):
    """A front: one ``of`` several; it listens at the sockets with these numbers."""

    folder: str
    of: int
    http: tuple[int, ...]
    ollama: tuple[int, ...]

    def socket(self, name: str) -> Path:
        """Return the path of a socket of the hub's process."""
        return Path(self.folder, name)


def this_part() -> HubPart | FrontPart | None:
    """Return which part this process is; None: it is not one of several."""
    given = os.environ.get(PART)
    return (
        None if given is None else msgspec.json.decode(given, type=HubPart | FrontPart)
    )


def wait_turn() -> bool:
    """Wait in a standby until it is to be the hub; False: until it is to end."""
    _report(PREPARED)
    try:
        return bool(os.read(STDIN, len(TURN)))
    except OSError:  # the first process was killed before it had read that
        return False


def report_serving() -> None:
    """Report to the first process that the hub serves fronts."""
    _report(SERVING)


def report_taking_over() -> None:
    """Report to the first process that a node's hub will serve later than at once."""
    _report(PREPARED)


def report_alive() -> None:
    """Report to the first process that the hub of a node runs, twice a second or so."""
    _report(ALIVE)


def remove_sockets(part: HubPart) -> None:
    """Remove the sockets of a hub that ends, if no other process will."""
    if not _report(ENDED):
        shutil.rmtree(part.folder, ignore_errors=True)


def _report(sign: bytes) -> bool:
    """Report something to the first process; False: it was killed."""
    try:
        os.write(STDIN, sign)
    except OSError:
        return False
    return True


def check_fronts(count: int) -> None:
    """Raise ConfigError if the number of fronts is out of range."""
    if not 0 <= count <= FRONTS_MAX:
        raise ConfigError(f"--fronts {count}: expected 0 to {FRONTS_MAX}")
    if count and sys.platform == "win32":
        raise ConfigError(NO_FRONTS)


async def run_parts(config: ServeConfig, stop: asyncio.Event) -> int:
    """Run the parts of a coordinator until ``stop``; return the exit status.

    Raises ConfigError if a port cannot be listened at.
    """
    http = await listen_for_http(config.host, config.port, "--port")
    ollama: list[socket.socket] = []
    if config.ollama_port is not None:
        ollama = await listen_for_http(config.host, config.ollama_port, "--ollama-port")
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        supervisor = _Supervisor(
            *(folder, config.fronts, http, ollama, stop), is_node=bool(config.node)
        )
        try:
            return await supervisor.run()
        finally:
            supervisor.kill()
            for each in (*http, *ollama):
                each.close()


class _Child:
    """The process of a part, and this end of the socket that is its standard input."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._writer = writer
        self._reported = {each: asyncio.Event() for each in (PREPARED, SERVING, ENDED)}
        self._ended = False
        self._alive = False
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            self._process.send_signal(number)

    def hand_over(self) -> None:
        """Have a hub let a standby go on."""
        if sys.platform != "win32":
            self.signal(signal.SIGHUP)

    def kill(self) -> None:
        """Kill it, if it still runs."""
        with suppress(ProcessLookupError):
            self._process.kill()

    def begin(self) -> None:
        """Let a standby be the hub."""
        self._writer.write(TURN)

    async def reports(self, sign: bytes) -> bool:
        """Wait until it reports this; False: it has ended before."""
        await self._reported[sign].wait()
        return not self._ended

    async def kill_if_silent(self) -> None:
        """Kill the hub of a node that has served once it does not run any more."""
        silent = 0
        while silent < SILENT_LOOKS:
            await asyncio.sleep(LOOK_EVERY)
            silent += 1
            if self._alive or not self._reported[SERVING].is_set():
                silent = 0
            self._alive = False
        log.error("the hub is silent: killing it, for another to go on")
        self.kill()

    async def wait(self) -> int:
        """Wait until it has ended; return its exit status."""
        return await self._process.wait()

    def close(self) -> None:
        """Kill it, and end its link."""
        self.kill()
        self._writer.close()
        self._reading.cancel()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Take what it reports."""
        with suppress(OSError):
            while signs := await reader.read(64):
                for sign in (bytes((each,)) for each in signs):
                    if sign == ALIVE:
                        self._alive = True
                    else:
                        self._reported[sign].set()
                    if sign == PREPARED:  # a node's hub takes over: it begins anew
                        self._reported[SERVING].clear()
        self._ended = True
        for each in self._reported.values():
            each.set()


class _Supervisor:
    """Starts the parts, and starts those again that end."""

    def __init__(
        self,
        folder: str,
        fronts: int,
        http: Sequence[socket.socket],
        ollama: Sequence[socket.socket],
        stop: asyncio.Event,
        *,
        is_node: bool,
    ) -> None:
        self._is_node = is_node
        bound = BoundAddress.of(http[0])
        ollama_port = BoundAddress.of(ollama[0]).port if ollama else None
        self._first = HubPart(folder, bound.address, bound.port, ollama_port)
        self._next = replace(self._first, announces=False)
        self._fronts = fronts
        self._http = http
        self._ollama = ollama
        self._stop = stop
        self._hub: _Child | None = None
        self._standby: _Child | None = None
        self._keeping: asyncio.Task[None] | None = None  # a standby for this hub
        self._children: set[_Child] = set()
        self._ready = asyncio.Event()  # set once there has been a hub

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        if sys.platform != "win32":
            loop.add_signal_handler(signal.SIGHUP, self._replace_hub)
        stopping = loop.create_task(self._stop.wait())
        hub = loop.create_task(self._keep_hub())
        fronts = [loop.create_task(self._keep_front()) for _ in range(self._fronts)]
        try:
            await asyncio.wait(
                {stopping, hub, *fronts}, return_when=asyncio.FIRST_COMPLETED
            )
            self._stop.set()
            for each in self._children:  # fronts end after the hub
                each.signal(signal.SIGTERM)
            status = await hub
            await asyncio.wait(fronts, timeout=STOP_TIMEOUT)
            return status
        finally:
            if sys.platform != "win32":
                loop.remove_signal_handler(signal.SIGHUP)
            for task in (stopping, hub, *fronts):
                task.cancel()

    def kill(self) -> None:
        """Kill what still runs."""
        for each in self._children:
            each.close()

    async def _keep_hub(self) -> int:
        """Keep a hub until it is to stop, or it ends with an error that stays.

        Returns its exit status.
        """
        pauses = _Pauses(SHORT_LIFE)
        hub = await self._start(self._first)
        while True:
            self._hub = hub
            self._keep_standby(self._stand_by(hub))
            watching = asyncio.get_running_loop().create_task(self._watch(hub))
            status = await self._ended(hub)
            watching.cancel()
            self._hub = None
            self._keep_standby(None)
            if self._stop.is_set() or not self._ready.is_set() or status > 1:
                return status
            level = logging.WARNING if status else logging.INFO
            log.log(level, "the hub ended status=%d; starting the next one", status)
            await pauses.wait()
            if self._stop.is_set():
                return status
            standby, self._standby = self._standby, None
            if standby is not None:
                standby.begin()
            hub = standby or await self._start(self._next)

    async def _watch(self, hub: _Child) -> None:
        """Kill the hub of a node that is silent: other nodes take over from it, too."""
        if self._is_node:
            await hub.kill_if_silent()

    def _keep_standby(self, keeping: Coroutine[Any, Any, None] | None) -> None:
        """Keep the standby by a coroutine, in place of the one before."""
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
        if keeping is not None:
            self._keeping = asyncio.get_running_loop().create_task(keeping)

    async def _stand_by(self, hub: _Child) -> None:
        """Keep a standby once there is a hub, and its clients have come back."""
        if not await hub.reports(SERVING):
            return
        self._ready.set()
        await asyncio.sleep(RETURN_SECONDS)
        await self._repeat_standby()

    async def _repeat_standby(self) -> None:
        # A signal to all processes ends a standby before this one has handled it.
        pauses = _Pauses(STANDBY_SHORT_LIFE, first=RETURN_SECONDS)
        while True:
            if self._standby is None:
                self._standby = await self._start(replace(self._next, stands_by=True))
            status = await self._ended(self._standby)
            self._standby = None
            await pauses.wait()
            if self._stop.is_set():
                return
            log.warning("the standby ended status=%d; starting another", status)

    def _replace_hub(self) -> None:
        """Let a hub of the code that is installed now go on; clients stay."""
        if not self._ready.is_set():
            return
        if self._standby is not None:
            self._end(self._standby)
            self._standby = None
        if self._hub is not None:
            self._keep_standby(self._upgrade(self._hub))

    async def _upgrade(self, hub: _Child) -> None:
        """Start a standby, and let it be the hub once it has started."""
        self._standby = await self._start(replace(self._next, stands_by=True))
        if await self._standby.reports(PREPARED):
            log.info("replacing the hub")
            hub.hand_over()
        elif not self._stop.is_set():
            log.error("the hub stays: the one to replace it has ended")
        await self._repeat_standby()

    async def _keep_front(self) -> None:
        await self._ready.wait()
        http = tuple(each.fileno() for each in self._http)
        ollama = tuple(each.fileno() for each in self._ollama)
        part = FrontPart(self._first.folder, self._fronts, http, ollama)
        pauses = _Pauses(SHORT_LIFE)
        while not self._stop.is_set():
            front = await self._start(part, (*http, *ollama))
            status = await self._ended(front)
            if not self._stop.is_set():
                log.warning("a front ended status=%d; starting another", status)
                await pauses.wait()

    async def _start(
        self, part: HubPart | FrontPart, sockets: tuple[int, ...] = ()
    ) -> _Child:
        """Start a process as this one was started, for a part.

        Its standard input ends with this process, and then it ends, too.
        """
        if sys.platform == "win32":
            raise ConfigError(NO_FRONTS)
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, *sys.orig_argv[1:]),
                    stdin=theirs.fileno(),
                    env={
                        **os.environ,
                        PART: msgspec.json.encode(part).decode(),
                        STOP_WITH_STDIN: "1",
                    },
                    pass_fds=sockets,
                    start_new_session=True,
                )
            except BaseException:
                writer.close()
                raise
        child = _Child(process, reader, writer)
        self._children.add(child)
        if self._stop.is_set():  # it was set meanwhile
            child.signal(signal.SIGTERM)
        return child

    async def _ended(self, child: _Child) -> int:
        """Wait until a process has ended; return its exit status."""
        status = await child.wait()
        self._end(child)
        return status

    def _end(self, child: _Child) -> None:
        child.close()
        self._children.discard(child)


class _Pauses:
    """Growing pauses before a process that ended soon is started again.

    ``short``: seconds; a shorter life counts as short, and pauses are at most as long.
    ``first``: the pause after a long life.
    """

    def __init__(self, short: float, first: float = 0.0) -> None:
        self._short = short
        self._first = self._pause = first
        self._at = asyncio.get_running_loop().time()

    async def wait(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._at > self._short:
            self._pause = self._first
        await asyncio.sleep(self._pause)
        self._pause = min(self._short, max(0.1, 2 * self._pause))
        self._at = asyncio.get_running_loop().time()
