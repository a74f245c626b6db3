"""A shard: some layers of a model, held by llama.cpp's rpc-server in a child process.

Assume that the machine which uses a shard can run code in it.  Where the system allows
it, the child has a network, process ids and a user namespace of its own, and sees no
files but its cache; see ``is_isolated`` and ``hides_files``.
"""

import asyncio
import os
import shutil
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from shoal.domain.errors import Unavailable
from shoal.engines.engine import Activity
from shoal.engines.engine_child import EngineChild, activity_of, last_unformatted_line
from shoal.engines.resources import processors, threads_for
from shoal.engines.shards import shard_child
from shoal.engines.shards.programs import (
    CPU,
    ShardPrograms,
    free_port,
    program_environment,
)
from shoal.engines.shards.shard_child import ShardOptions, ShardReply

CONNECT_TIMEOUT = 10.0  # seconds
OWN_MEMORY = 128 << 20  # bytes that rpc-server needs beside what is stored in it
PORT = 50052  # in a network of its own
HANDS_OUT = sys.platform != "win32"  # the child connects
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

ISOLATIONS = (
    "unshare --user --map-root-user --net --ipc --pid --fork --kill-child --mount-proc",
    # Where a system allows namespaces to programs that it knows.
    "bwrap --unshare-all --die-with-parent --dev-bind / / --proc /proc --tmpfs /run --",
    "unshare --user --map-root-user --net",  # in containers, which hide parts of /proc
)
"""Commands that run another one in isolation, the best first."""

SYSTEM_FILES = (
    *("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/opt", "/nix/store"),
    *("/proc", "/sys", "/etc/OpenCL", "/etc/vulkan"),
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


class ShardProcess:
    """A running shard; its owner must always ``close`` it.

    ``is_isolated``: nothing listens that others reach; otherwise the shard has a
    loopback port.  ``hides_files``: it can read none but the system's and its own.
    """

    def __init__(
        self,
        child: EngineChild,
        worker: socket.socket,
        programs: ShardPrograms,
        port: int,
        is_isolated: bool,
        reply: ShardReply,
    ) -> None:
        self.pid = child.pid
        self.protocol = programs.protocol
        self.is_isolated = is_isolated
        self.hides_files = reply["hides_files"]
        self.exited = child.exited
        self._child = child
        self._worker = worker
        self._port = port
        self._connecting = asyncio.Lock()
        self._number = 0  # of the last connection that was asked for
        self._processes = _chain(child.pid)

    @classmethod
    async def start(
        cls,
        programs: ShardPrograms,
        folder: Path,
        *,
        cache: Path | None = None,
        memory: int | None = None,
        threads: int | None = None,
    ) -> "ShardProcess":
        """Start a shard without layers, which its client sends.

        Args:
            programs: llama.cpp's programs of this machine.
            folder: what it may change, for this model alone; made if it is missing.
            cache: the folder that has the large tensors of its layers, which it only
                reads; None: it keeps those that it is sent in its own one.
            memory: bytes that the layers, their context and its computations may take;
                Linux enforces it for processors, but not for GPUs.
            threads: CPU threads; None: Shoal's choice for this machine.

        Raises Unavailable.
        """
        try:
            await asyncio.to_thread(folder.mkdir, 0o700, parents=True, exist_ok=True)
            isolation = await _isolation()
            port = PORT if isolation else free_port()
            options = ShardOptions(
                command=[
                    *(str(programs.rpc_server), "--cache", "--device", programs.device),
                    *("--threads", str(threads or threads_for(*processors()))),
                ],
                port=port,
                has_network=bool(isolation),
                memory=_memory_limit(programs, memory),
                readable=[
                    *(*SYSTEM_FILES, *_folders_of(programs.rpc_server)),
                    *([] if cache is None else [str(cache)]),
                ],
                own=[
                    str(folder),
                    *(DEVICES if programs.device == CPU else ("/dev", *DEVICES)),
                ],
            )
            process, worker = await _spawn(isolation, options, folder, cache or folder)
        except OSError as error:
            raise Unavailable(f"a shard cannot be started: {error}") from error
        child = EngineChild(process, _explain_exit)
        assert process.stdout is not None
        try:
            line = await process.stdout.readline()
            if not line:
                raise Unavailable(f"a shard cannot be started: {await child.exited}")
            reply = msgspec.json.decode(line, type=ShardReply)
            if reply["error"]:
                raise Unavailable(f"a shard cannot be started: {reply['error']}")
            return cls(child, worker, programs, port, bool(isolation), reply)
        except BaseException as error:
            worker.close()
            await child.end()
            if isinstance(error, psutil.Error):
                raise Unavailable("a shard ended when it had begun") from error
            raise

    async def connect(self) -> socket.socket:
        """Return a new connection to rpc-server, which serves one at a time.

        The socket does not block.  Raises Unavailable.
        """
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT), self._connecting:
                connected = await self._connected()
        except (OSError, TimeoutError) as error:
            reason = self.fault() or str(error) or "it does not answer"
            raise Unavailable(f"the shard cannot be reached: {reason}") from error
        connected.setblocking(False)
        return connected

    def activity(self) -> Activity | None:
        """Return what rpc-server has done so far; None: it has ended."""
        return activity_of(self._processes[-1].pid)

    def fault(self) -> str | None:
        """Return why the shard does not work; None: it works."""
        if self._child.exited.done():
            return self._child.exit_reason
        try:
            if any(each.status() in STOPPED for each in self._processes):
                return "the shard's process is stopped"
        except psutil.Error:
            return "the shard's process has ended"
        return None

    async def close(self) -> None:
        """End the shard, and wait for its end."""
        self._worker.close()
        await self._child.end()

    async def _connected(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        if not HANDS_OUT:
            own = socket.socket()
            own.setblocking(False)
            await loop.sock_connect(own, ("127.0.0.1", self._port))
            return own
        number = self._number = (self._number + 1) % 256
        await loop.sock_sendall(self._worker, bytes([number]))
        while True:
            answer, fds = await self._receive()
            sockets = [socket.socket(fileno=each) for each in fds]
            if not answer:
                raise ConnectionResetError("it has ended")
            if answer == bytes([number]):
                break
            for each in sockets:  # of a request that was cancelled
                each.close()
        if not sockets:
            raise ConnectionRefusedError("it does not answer")
        return sockets[0]

    async def _receive(self) -> tuple[bytes, Sequence[int]]:
        """Receive one answer of the child: a number, and no or one descriptor."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._worker, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._worker)
        if sys.platform == "win32":
            return b"", ()  # the child hands nothing out
        answer, fds, _, _ = socket.recv_fds(self._worker, 1, 1)
        return answer, fds


async def can_isolate() -> bool:
    """Return whether a shard on this machine would have no port."""
    return bool(await _isolation())


async def _isolation() -> Sequence[str]:
    """Return the command that runs another in isolation; empty: there is none."""
    for program, *options in map(str.split, ISOLATIONS):
        if (found := shutil.which(program)) is None:
            continue
        command = (found, *options)
        trial = await asyncio.create_subprocess_exec(
            *(*command, "true"), stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL
        )
        if await trial.wait() == 0:
            return command
    return ()


async def _spawn(
    isolation: Sequence[str], options: ShardOptions, folder: Path, cache: Path
) -> tuple[Process, socket.socket]:
    """Start the child; return the socket that it hands connections out by, too."""
    worker, stdin = socket.socketpair()
    worker.setblocking(False)
    with stdin:
        try:
            process = await asyncio.create_subprocess_exec(
                *(*isolation, sys.executable, "-I", "-S", shard_child.__file__),
                msgspec.json.encode(options).decode(),
                stdin=stdin.fileno() if HANDS_OUT else PIPE,
                stdout=PIPE,
                stderr=PIPE,
                cwd=folder,
                env=program_environment(LLAMA_CACHE=str(cache), HOME=str(folder)),
                start_new_session=True,  # Ctrl-C is the worker's
            )
        except BaseException:
            worker.close()
            raise
    return process, worker


def _memory_limit(programs: ShardPrograms, memory: int | None) -> int:
    # GPUs' drivers reserve addresses by the gigabyte.
    return memory + OWN_MEMORY if memory and programs.device == CPU else 0


def _folders_of(program: Path) -> list[str]:
    """Return the folders that a program may have its libraries in."""
    folder, paths = program.resolve().parent, os.environ.get("LD_LIBRARY_PATH", "")
    found = (program.parent, folder, folder.parent / "lib")
    return [*map(str, found), *filter(None, paths.split(os.pathsep))]


def _chain(pid: int) -> Sequence[psutil.Process]:
    """Return a process and its descendants, each the only child of the one before."""
    found = [psutil.Process(pid)]
    while children := found[-1].children():
        found.append(children[0])
    return found


def _explain_exit(ended: str, log: str) -> str:
    # It prints something for each connection, too.
    why = last_unformatted_line(log) if "SIGABRT" in ended or "status" in ended else ""
    return f"the shard {ended}{why}"
