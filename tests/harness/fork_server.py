"""Starts ``python -m MODULE`` by a fork of a process that has imported Shoal.

Importing takes most of the processor time of a program that a test starts.  The child
of the fork has its own environment, folder, arguments and files, is in the network
namespace of the thread that asked, and runs the module as ``python -m`` does.  Its
command line, as ``ps`` shows it, is that of the server.
"""

import atexit
import ctypes
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import IO, Any, TypeAlias

PRELOADED = (
    "shoal.app.server",
    "shoal.app.worker_ports",
    "shoal.cli.main",
    "shoal.cli.pool.join",
    "shoal.cli.pool.serve",
    "shoal.cli.worker.join_target",
    "shoal.cli.use.models.pull",
    "shoal.cli.worker.run_worker",
)
# Variables that matter while modules are imported, or earlier.
EARLY = ("PYTHON", "SSL_", "LD_", "OTEL_", "COV_")
REQUEST_MAX = 1 << 20  # bytes
# Not as the first test that starts a program has them: it may have changed them.
ENVIRONMENT, INTERPRETER = dict(os.environ), sys.executable
NETWORK = "/proc/thread-self/ns/net"
CLONE_NEWNET = 0x40000000  # linux/sched.h
LINUX = sys.platform.startswith("linux")  # elsewhere each has a process of its own


class ForkedProcess:
    """A process of the server, with what tests use of ``subprocess.Popen``."""

    def __init__(self, status: int, stdout: IO[str]) -> None:
        self.stdout = stdout
        self.returncode: int | None = None
        self._status = os.fdopen(status)
        self.pid = int(self._status.readline())
        self._waiting = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return the exit status."""
        if (code := self._wait(timeout)) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> int | None:
        with self._waiting:
            if self.returncode is None:
                if not select.select([self._status], [], [], timeout)[0]:
                    return None
                code, seconds = self._status.readline().split()
                self.returncode = int(code)
                self._status.close()
                _spent.append(float(seconds))
            return self.returncode


Process: TypeAlias = ForkedProcess | subprocess.Popen[str]


class ForkServer:
    """The process that forks; it ends with the process that made it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_MAX)
        self._requests = ours
        with theirs:
            self._process = subprocess.Popen(
                [INTERPRETER, __file__, str(theirs.fileno())],
                env=ENVIRONMENT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # interrupts from the keyboard are not for it
            )

    def close(self) -> None:
        """End it."""
        self._requests.close()
        self._process.wait()

    def can_run(self, environment: Mapping[str, str]) -> bool:
        """Return whether a program may be a child of the server.

        It may not where variables matter early, nor by another interpreter.
        """

        def early(variables: Mapping[str, str]) -> dict[str, str]:
            return {
                name: value
                for name, value in variables.items()
                if name.startswith(EARLY) and name != "PYTHONPATH"
            }

        return (
            early(environment) == early(ENVIRONMENT) and sys.executable == INTERPRETER
        )

    def run(
        self,
        module: str,
        arguments: tuple[str, ...],
        folder: str,
        environment: Mapping[str, str],
        errors: IO[str],
    ) -> ForkedProcess:
        request = json.dumps([module, arguments, folder, dict(environment)]).encode()
        read, write = os.pipe()
        status_read, status_write = os.pipe()
        network = os.open(NETWORK, os.O_RDONLY)  # of this thread
        try:
            socket.send_fds(
                self._requests,
                [request],
                [write, errors.fileno(), status_write, network],
            )
        finally:
            for each in (write, status_write, network):
                os.close(each)
        return ForkedProcess(status_read, os.fdopen(read))


_spent: list[float] = []  # by processes that have ended


def processor_seconds() -> float:
    """Return what the processes that have ended used, and what they waited for."""
    return sum(_spent)


@cache
def _server() -> ForkServer:
    server = ForkServer()
    atexit.register(server.close)
    return server


def started(
    module: str,
    arguments: tuple[str, ...],
    folder: str,
    environment: Mapping[str, str],
    errors: IO[str],
) -> Process:
    """Start ``python -m module`` in a folder; its standard output is a pipe."""
    if LINUX and (server := _server()).can_run(environment):
        return server.run(module, arguments, folder, environment, errors)
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environment,
    )


def serve(requests: socket.socket) -> None:
    """Fork for each request; tell of each child its id, and later its status."""
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    home = os.open(NETWORK, os.O_RDONLY)
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests.fileno(), ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            while running:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if not pid:
                    break
                seconds = usage.ru_utime + usage.ru_stime
                _tell(running[pid], f"{os.waitstatus_to_exitcode(status)} {seconds}")
                os.close(running.pop(pid))
        if requests.fileno() in ready:
            request, descriptors, _, _ = socket.recv_fds(requests, REQUEST_MAX, 4)
            if not request:
                return
            stdout, stderr, status_to, network = descriptors
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (ended, wake, status_to, *running.values()):
                    os.close(each)
                requests.close()
                os.dup2(stdout, 1)
                os.dup2(stderr, 2)
                if not os.path.sameopenfile(network, home):
                    enter_network(network)
                for each in (home, stdout, stderr, network):
                    os.close(each)
                run(*json.loads(request))
                return
            for each in (stdout, stderr, network):
                os.close(each)
            running[pid] = status_to
            _tell(status_to, str(pid))


def run(
    module: str, arguments: list[str], folder: str, environment: dict[str, Any]
) -> None:
    """Run a module as ``python -m`` does in a process of its own."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [folder, *(each for each in paths if each)]
    sys.argv = [module, *arguments]
    sys.orig_argv = [sys.executable, "-m", *sys.argv]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def enter_network(descriptor: int) -> None:
    """Move this thread to a network namespace: setns(2), which Python has from 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _tell(descriptor: int, text: str) -> None:
    with suppress(BrokenPipeError):  # whoever asked has ended
        os.write(descriptor, f"{text}\n".encode())


if __name__ == "__main__":
    import gc
    import importlib

    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection)
