"""The processes of a coordinator with fronts: one that has the hub, and the fronts.

The first process, which starts them, has the listening sockets, and nothing else.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from shoal.config import ServeConfig
from shoal.domain.errors import ConfigError
from shoal.processes.programs import STOP_WITH_STDIN
from shoal.transports.acceptor import BoundAddress
from shoal.transports.http_server import listen_for_http

PART = "SHOAL_PART"
"""The variable that tells a process which part of a coordinator it is."""

FRONTS_MAX = 64
LINK_SOCKET = "link"
HTTP_SOCKET = "http"
OLLAMA_SOCKET = "ollama"
RETURN_SECONDS = 2.0  # seconds in which clients come back to a new hub
LOOK_EVERY = 0.02  # seconds between looks whether a hub is ready
SHORT_LIFE = 5.0  # seconds: a process that ended so soon waits before it is repeated
PAUSE_MAX = 5.0  # seconds of such a wait
STOP_TIMEOUT = 5.0  # seconds that a front gets to end

log = logging.getLogger("shoal.app")


HUB_NAME, FRONT_NAME = "shoal-hub", "shoal-front"  # of their processes


class HubPart(msgspec.Struct, frozen=True, tag=True):
    """The process with the hub.

    ``folder`` has the sockets by which fronts reach it.  They listen at ``host`` and
    ``port``, and for Ollama's API at ``ollama_port``.  ``announces``: it is the first.
    """

    folder: str
    host: str
    port: int
    ollama_port: int | None
    announces: bool = True

    @property
    def bound(self) -> BoundAddress:
        """Where the fronts listen."""
        return BoundAddress(self.host, self.port)

    def socket(self, name: str) -> Path:
        """Return the path of a socket."""
        return Path(self.folder, name)


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


def check_fronts(count: int) -> None:
    """Raise ConfigError if there cannot be so many fronts."""
    if not 0 <= count <= FRONTS_MAX:
        raise ConfigError(f"--fronts {count}: expected 0 to {FRONTS_MAX}")
    if count and sys.platform == "win32":
        raise ConfigError(
            "--fronts: Windows has no Unix sockets for asyncio, by which fronts reach "
            "the hub; leave the option out"
        )


async def run_parts(config: ServeConfig, stop: asyncio.Event) -> int:
    """Run the parts of a coordinator until ``stop``; return the exit status.

    Raises ConfigError if a port cannot be listened at.
    """
    http = await listen_for_http(config.host, config.port, "--port")
    ollama: list[socket.socket] = []
    if config.ollama_port is not None:
        ollama = await listen_for_http(config.host, config.ollama_port, "--ollama-port")
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        supervisor = _Supervisor(folder, config.fronts, http, ollama, stop)
        try:
            return await supervisor.run()
        finally:
            supervisor.kill()
            for each in (*http, *ollama):
                each.close()


class _Supervisor:
    """Starts the parts, and starts those again that end."""

    def __init__(
        self,
        folder: str,
        fronts: int,
        http: Sequence[socket.socket],
        ollama: Sequence[socket.socket],
        stop: asyncio.Event,
    ) -> None:
        self._folder = folder
        self._link = str(Path(folder, LINK_SOCKET))
        self._fronts = fronts
        self._http = http
        self._ollama = ollama
        self._stop = stop
        self._hub: asyncio.subprocess.Process | None = None
        self._children: set[asyncio.subprocess.Process] = set()
        self._ready = asyncio.Event()  # set once there has been a hub

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
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
                _signal(each, signal.SIGTERM)
            status = await hub
            await asyncio.wait(fronts, timeout=STOP_TIMEOUT)
            return status
        finally:
            loop.remove_signal_handler(signal.SIGHUP)
            for task in (stopping, hub, *fronts):
                task.cancel()

    def kill(self) -> None:
        """Kill what still runs."""
        for each in self._children:
            _signal(each, signal.SIGKILL)

    def _replace_hub(self) -> None:
        """Let the hub end at once, and the next one go on; clients stay."""
        if self._hub is not None and self._ready.is_set():
            log.info("replacing the hub")
            _signal(self._hub, signal.SIGHUP)

    async def _keep_hub(self) -> int:
        """Keep a hub until it is to stop, or it ends with an error that stays.

        Returns its exit status.
        """
        bound = BoundAddress.of(self._http[0])
        ollama_port = BoundAddress.of(self._ollama[0]).port if self._ollama else None
        pauses = _Pauses()
        while True:
            began = not self._ready.is_set()
            part = HubPart(
                self._folder, *(bound.address, bound.port), ollama_port, began
            )
            self._hub = hub = await self._start(part, ())
            if began:
                await self._wait_ready(hub)
            status = await hub.wait()
            self._children.discard(hub)
            self._hub = None
            if self._stop.is_set() or not self._ready.is_set() or status > 1:
                return status
            log.warning("the hub ended status=%d; starting the next one", status)
            await pauses.wait()
            if self._stop.is_set():
                return status

    async def _wait_ready(self, hub: asyncio.subprocess.Process) -> None:
        while hub.returncode is None:
            if os.path.exists(self._link):  # noqa: ASYNC240  # in memory
                self._ready.set()
                return
            await asyncio.sleep(LOOK_EVERY)

    async def _keep_front(self) -> None:
        await self._ready.wait()
        http = tuple(each.fileno() for each in self._http)
        ollama = tuple(each.fileno() for each in self._ollama)
        part = FrontPart(self._folder, self._fronts, http, ollama)
        pauses = _Pauses()
        while not self._stop.is_set():
            front = await self._start(part, (*http, *ollama))
            status = await front.wait()
            self._children.discard(front)
            if not self._stop.is_set():
                log.warning("a front ended status=%d; starting another", status)
                await pauses.wait()

    async def _start(
        self, part: HubPart | FrontPart, sockets: tuple[int, ...]
    ) -> asyncio.subprocess.Process:
        """Start a process as this one was started, for a part.

        Its standard input ends with this process, and then it ends, too.
        """
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "shoal", *sys.argv[1:]),
            stdin=subprocess.PIPE,
            env={
                **os.environ,
                PART: msgspec.json.encode(part).decode(),
                STOP_WITH_STDIN: "1",
            },
            pass_fds=sockets,
            start_new_session=True,
        )
        self._children.add(child)
        if self._stop.is_set():  # it was set meanwhile
            _signal(child, signal.SIGTERM)
        return child


class _Pauses:
    """Waits before a process is repeated that has ended soon, ever longer."""

    def __init__(self) -> None:
        self._at = asyncio.get_running_loop().time()
        self._pause = 0.0

    async def wait(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._at > SHORT_LIFE:
            self._pause = 0.0
        await asyncio.sleep(self._pause)
        self._pause = min(PAUSE_MAX, max(0.1, 2 * self._pause))
        self._at = asyncio.get_running_loop().time()


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        process.send_signal(number)
