"""A worker's child process that runs one call at a time.

The worker runs it as ``python -m shoal.tasks.child``.  It reads orders from standard
input and ends when that is closed.  Output of tasks goes to standard error.
"""

import ctypes
import faulthandler
import mmap
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from shoal.domain.errors import ConfigError, Unavailable
from shoal.tasks import process_messages
from shoal.tasks.child_io import ChildPipes, ParentExited, TaskOutput
from shoal.tasks.invocation import FunctionInvoker, Invoke, load_tasks
from shoal.tasks.limits import MAPPED_MAX
from shoal.tasks.progress import set_progress_handler

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

_pushed = msgspec.msgpack.Decoder(list[tuple[int, bytes, bytes]])


def main() -> None:
    # Ctrl-C reaches the whole process group; when to end is the worker's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()  # a crash prints a traceback
    pipes = claim_pipes()
    try:
        exit_with_parent(int(sys.argv[1]))
        serve(pipes)
    except ParentExited:
        pass
    # Do not wait for threads and exit handlers of tasks.
    os._exit(0)


def claim_pipes() -> ChildPipes:
    """Return the pipes to the worker, and keep everything else off them."""
    pipes = ChildPipes(os.dup(0), os.dup(1))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)
    return pipes


def exit_with_parent(parent: int) -> None:
    """End with the worker, even during a call.

    Only Linux supports this; elsewhere the call finishes first.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            raise ParentExited  # the worker ended before prctl took effect


def serve(pipes: ChildPipes) -> None:
    """Carry out orders until there are no more."""
    printed = TaskOutput()
    (_, modules, trust), _ = pipes.next_with(process_messages.PREPARE)
    try:
        tasks = load_tasks(modules)
    except ConfigError as error:
        pipes.send((process_messages.IMPORT_FAILED, str(error)))
        raise ParentExited from error
    pipes.send((process_messages.READY, 1), msgspec.msgpack.encode(tasks))
    running = FunctionInvoker(MappedBlobs(pipes).get, trust=trust)
    step, at_once = running.invoker("", code=False), False
    while True:
        head, tail = pipes.next()
        if head[0] == process_messages.PUSH:
            calls = _pushed.decode(tail)
            if len(calls) > 1 and not at_once:
                pipes.flush_in_background()
            for number, args, kwargs in calls:
                # A mark for each call would take longer than a quick call.
                if at_once or printed.written:
                    printed.mark_call()
                pipes.send_return(number, step(args, kwargs))
                if at_once:
                    pipes.flush()
        elif head[0] == process_messages.CALL:
            printed.mark_call()
            _run_call(pipes, running, head, tail)
        else:
            assert head[0] == process_messages.OPEN_STREAM, (
                "the worker says nothing else"
            )
            printed.mark_call()
            _, name, code, at_once = head
            step = running.invoker(name, code=code)


def _run_call(
    pipes: ChildPipes, running: FunctionInvoker, head: list[Any], tail: memoryview
) -> None:
    _, number, name, code, args_size, _ = head
    step: Invoke = running.invoker(name, code=code)
    set_progress_handler(
        lambda share, remark: pipes.send(
            (process_messages.PROGRESS, number, share, remark)
        )
    )
    value, error, why = step(tail[:args_size], tail[args_size:])
    set_progress_handler(None)
    if error:
        pipes.send(
            (process_messages.RAISED, number, why), error.encode(errors="replace")
        )
    else:
        pipes.send((process_messages.DONE, number), value)


class MappedBlobs:
    """Maps the worker's files of large arguments, which its processes share."""

    def __init__(self, pipes: ChildPipes) -> None:
        self._pipes = pipes
        self._mapped: dict[bytes, memoryview] = {}  # the most recently used is last

    def get(self, digest: bytes) -> memoryview:
        """Return a value in MessagePack; raises Unavailable if it is missing."""
        found = self._mapped.pop(digest, None)
        if found is None:
            self._pipes.send((process_messages.BLOB_NEEDED, digest))
            (_, path, why), _ = self._pipes.next_with(process_messages.BLOB)
            if not path:
                raise Unavailable(why)
            with Path(path).open("rb") as file:
                found = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self._mapped[digest] = found
        if len(self._mapped) > MAPPED_MAX:
            del self._mapped[next(iter(self._mapped))]
        return found


if __name__ == "__main__":
    main()
