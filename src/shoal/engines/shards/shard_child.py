"""The process around a shard: it confines llama.cpp's rpc-server, and connects to it.

rpc-server trusts its client, which can make it run any code.  This child starts it
without rights, secrets or files, and where it has a network of its own, with nothing
that listens outside it: it hands connected sockets out.

It is run by its path with the standard library alone, so that as little as possible
is in reach.  Standard input asks for a connection by each byte, which is a local socket
over which that comes.  It ends with that, so it never outlives the worker; standard
output gets one line of JSON, a ``ShardReply``.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TypedDict

LOOPBACK = "127.0.0.1"
START_TIMEOUT = 30.0  # seconds until rpc-server listens
CONNECT_TIMEOUT = 5.0  # seconds
BY_SIGNAL = 128  # and the signal's number: how shells say it


class ShardOptions(TypedDict):
    """How to start rpc-server; it may read ``readable`` paths and change ``own`` ones.

    ``memory`` is the most that it may allocate, in bytes; 0: no limit.
    """

    command: Sequence[str]
    port: int
    has_network: bool  # of its own
    memory: int
    readable: Sequence[str]
    own: Sequence[str]


class ShardReply(TypedDict):
    """It listens, or there is an ``error``; ``hides_files``: it sees its own alone."""

    error: str
    hides_files: bool


def main() -> None:
    # So that what ends this process ends the program, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    options: ShardOptions = json.loads(sys.argv[1])
    try:
        if options["has_network"]:
            raise_loopback()
            cover_services()
        place = ["-H", LOOPBACK, "-p", str(options["port"])]
        program = subprocess.Popen(
            [*options["command"], *place],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            # No thread runs yet.
            preexec_fn=None if sys.platform == "win32" else partial(confine, options),
        )
    except (OSError, subprocess.SubprocessError) as error:
        fail(str(error))
    try:
        await_listener(program, options["port"])
        # An end by itself ends this process; the worker knows from that.
        threading.Thread(target=end_with, args=[program], daemon=True).start()
        reply(ShardReply(error="", hides_files=landlock_version() > 0))
        hand_out(options["port"])
    finally:
        program.kill()
    os._exit(0)


def reply(message: ShardReply) -> None:
    """Send the worker its one line."""
    print(json.dumps(message), flush=True)


def fail(error: str) -> None:
    """Say why the shard does not start, and exit."""
    reply(ShardReply(error=error, hides_files=False))
    sys.exit(1)


def await_listener(program: subprocess.Popen[bytes], port: int) -> None:
    """Wait until the program listens; exit if it does not."""
    deadline = time.monotonic() + START_TIMEOUT
    while program.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection((LOOPBACK, port), CONNECT_TIMEOUT).close()
            return
        except OSError:
            time.sleep(0.01)
    if (code := program.poll()) is None:
        fail(f"it does not listen after {START_TIMEOUT:.0f} s")
    else:
        sys.exit(status_of(code))


def hand_out(port: int) -> None:
    """Connect to the program for each byte of standard input, until that ends."""
    if sys.platform == "win32":
        sys.stdin.buffer.read()  # the worker connects by itself
        return
    with socket.socket(fileno=os.dup(0)) as worker:
        while number := worker.recv(1):  # which the answer repeats
            try:
                connected = socket.create_connection((LOOPBACK, port), CONNECT_TIMEOUT)
            except OSError:
                worker.send(number)
                continue
            with connected:
                socket.send_fds(worker, [number], [connected.fileno()])


def end_with(program: subprocess.Popen[bytes]) -> None:
    """Exit as the program does."""
    os._exit(status_of(program.wait()))


def status_of(code: int) -> int:
    """Return the exit status that stands for how a process ended."""
    return code if code >= 0 else BY_SIGNAL - code


def raise_loopback() -> None:
    """Bring up the loopback interface of a new network (netdevice(7)).

    Raises OSError.
    """
    if sys.platform == "win32":
        raise OSError("Windows has no network namespaces")
    import fcntl

    get_flags, set_flags, up, running = 0x8913, 0x8914, 0x1, 0x40
    with socket.socket() as any_socket:
        answer = fcntl.ioctl(any_socket, get_flags, struct.pack("16sh14x", b"lo", 0))
        (flags,) = struct.unpack_from("h", answer, 16)
        if not flags & up:  # bwrap has brought it up, and leaves no right to do so
            wanted = struct.pack("16sh14x", b"lo", flags | up | running)
            fcntl.ioctl(any_socket, set_flags, wanted)


def cover_services() -> None:
    """Cover the local sockets of the system's services, which Landlock does not hide.

    It fails where mounts are not this process's own, or not allowed.
    """
    ctypes.CDLL(None).mount(b"none", b"/run", b"tmpfs", 0, None)


# In rpc-server's process, before it begins.


def confine(options: ShardOptions) -> None:
    """Leave this process what it needs to compute."""
    if sys.platform == "win32":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if options["memory"] and sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (options["memory"],) * 2)
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    die_with_parent, no_new_rights, drop = 1, 38, 24  # prctl(2)
    libc.prctl(die_with_parent, signal.SIGKILL, 0, 0, 0)
    libc.prctl(no_new_rights, 1, 0, 0, 0)
    for capability in range(64):  # it may be root, of a new user namespace at least
        libc.prctl(drop, capability, 0, 0, 0)
    hide_files(options["readable"], options["own"])


# Landlock (landlock(7)); the numbers are the same on all processors.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
EXECUTE, READ_FILE, READ_FOLDER, DEVICE = 1 << 0, 1 << 2, 1 << 3, 1 << 15
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # bits by version; no more since
READING = EXECUTE | READ_FILE | READ_FOLDER


def landlock_version() -> int:
    """Return the version of Landlock that the system has; 0: none."""
    if sys.platform != "linux":
        return 0
    return max(0, int(ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1)))


def hide_files(readable: Sequence[str], own: Sequence[str]) -> None:
    """Let this process use no other files from now on, if the system can.

    Raises OSError.
    """
    version = landlock_version()
    if sys.platform != "linux" or not version:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    all_rights = (1 << RIGHTS[min(version, 5)]) - 1
    size = 8  # bytes of the first version's structure, which is all that is used
    rules = libc.syscall(CREATE_RULESET, struct.pack("Q", all_rights), size, 0)
    for paths, rights in ((readable, READING), (own, all_rights)):
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
                granted = rights & all_rights
                if not os.path.isdir(path):
                    granted &= EXECUTE | 1 << 1 | READ_FILE | 1 << 14 | DEVICE
                rule = struct.pack("=Qi", granted, place)
                if libc.syscall(ADD_RULE, rules, 1, rule, 0):
                    raise OSError(ctypes.get_errno(), f"Landlock: {path}")
    if libc.syscall(RESTRICT_SELF, rules, 0):
        raise OSError(ctypes.get_errno(), "Landlock")


if __name__ == "__main__":
    main()
