"""Other programs of this machine: what they print, how they end, who has a port.

Some know its sensors.  A driver that does not answer costs a child process and two
seconds; a library that calls it here, such as NVIDIA's NVML, would hold a thread that
nothing can end.
"""

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

COMMAND_TIMEOUT = 2.0  # seconds for a system program to answer

RunProgram: TypeAlias = Callable[[Sequence[str]], str]
"""Returns the output of a program; empty if it is missing or does not answer."""

FILES_MAX = 65_536  # open files

LISTENING = "0A"  # TCP_LISTEN in the kernel's tables
ESTABLISHED = 1  # TCP_ESTABLISHED


STOP_WITH_STDIN = "SHOAL_STOP_WITH_STDIN"
"""The variable of a command that stops when its standard input ends.

The parent holds the other end of that pipe: even where it is killed, the child ends.
"""


def allow_files() -> None:
    """Let this process open as many files as the system allows, up to ``FILES_MAX``.

    Each connection is one, and a program begins with 1,024 on most systems.
    """
    if sys.platform != "win32":
        import resource  # there is none on Windows

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = FILES_MAX if most == resource.RLIM_INFINITY else min(most, FILES_MAX)
        with suppress(OSError, ValueError):  # macOS may allow less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def name_process(name: str) -> None:
    """Name this process, in at most 15 bytes, as ``ps`` and ``top`` show it on Linux.

    Its command line stays as it is.
    """
    with suppress(OSError):  # other systems have no such file
        Path("/proc/self/comm").write_text(name)


def port_user(port: int, proc: Path = Path("/proc")) -> str | None:
    """Name the program that listens on a TCP port, and its process id.

    Returns None where that cannot be known: on other systems than Linux, and for
    other people's processes.
    """
    sockets = {f"socket:[{inode}]" for inode in _listeners(port, proc)}
    if not sockets:
        return None
    for process in proc.glob("[0-9]*"):
        try:
            links = (str(fd.readlink()) for fd in (process / "fd").iterdir())
            if not sockets.isdisjoint(links):
                name = (process / "comm").read_text().strip()
                return f"{name}, process {process.name}"
        except OSError:
            continue  # not permitted, or gone
    return None


def _listeners(port: int, proc: Path) -> list[str]:
    """Return the inodes of the sockets that listen on a port (see ``man 5 proc``)."""
    inodes = []
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.append(fields[9])
    return inodes


def connected_user(source: int, target: int) -> int | None:
    """Return the id of the user who connected from one loopback port to another.

    Asks Linux for this connection alone, since there may be thousands (sock_diag(7));
    returns None if there is none, or on another system.  Raises OSError.
    """
    if sys.platform != "linux":
        return None
    loopback = socket.inet_aton("127.0.0.1")
    by_family, any_state, any_interface, no_cookie = 20, 0xFFFFFFFF, 0, b"\xff" * 8
    query = struct.pack("=BBHI", socket.AF_INET, socket.IPPROTO_TCP, 0, any_state)
    query += struct.pack("!HH16s16s", source, target, loopback, loopback)
    query += struct.pack("=I8s", any_interface, no_cookie)
    header = struct.pack("=IHHII", 16 + len(query), by_family, 1, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 4) as kernel:
        kernel.send(header + query)
        reply = kernel.recv(4096)
    (kind,) = struct.unpack_from("=H", reply, 4)
    if kind != by_family or reply[17] != ESTABLISHED:  # a listener is found, too
        return None
    # After the header: 4 bytes, 48 of the two ends, and 3 numbers.
    user: int = struct.unpack_from("=I", reply, 16 + 64)[0]
    return user


def claim_pipes() -> tuple[int, int]:
    """Return the file descriptors of a child's input and output, for messages only.

    Native code and tasks may print.  From here on, standard output is redirected to
    standard error, and standard input is empty.
    """
    messages_in, messages_out = os.dup(0), os.dup(1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return messages_in, messages_out


def write_all(pipe: int, data: bytes) -> None:
    """Write to a pipe, blocking while it is full.  Raises OSError if it is closed."""
    unsent = memoryview(data)
    while unsent:
        unsent = unsent[os.write(pipe, unsent) :]


def describe_exit(code: int | None) -> str:
    """Describe an exit code, as the end of a sentence; None: it is unknown."""
    if code is None:
        return "ended"
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def program_output(command: Sequence[str]) -> str:
    """Return the output of a program; empty if it is missing or does not answer."""
    if (program := shutil.which(command[0])) is None:
        return ""
    try:
        done = subprocess.run(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
