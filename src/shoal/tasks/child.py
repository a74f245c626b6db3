"""A process that makes one call at a time, for a worker, and can be killed meanwhile.

Run by the worker as ``python -m shoal.tasks.child``, it takes its orders from standard
input and ends when that is closed.  What tasks print goes to standard error.
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
from shoal.tasks import orders
from shoal.tasks.limits import MAPPED_MAX
from shoal.tasks.pipes import Gone, Pipes
from shoal.tasks.printed import Printed
from shoal.tasks.progress import tell_progress_to
from shoal.tasks.running import Running, Step, prepared

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

_pushed = msgspec.msgpack.Decoder(list[tuple[int, bytes, bytes]])


def main() -> None:
    # Ctrl-C reaches the whole process group; when to end is the worker's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()  # what is said of a crash tells where it was
    pipes = claim_pipes()
    try:
        end_with(int(sys.argv[1]))
        serve(pipes)
    except Gone:
        pass
    # Tasks may have left threads and what is to be done at the end: nobody waits.
    os._exit(0)


def claim_pipes() -> Pipes:
    """Return the pipes to the worker, and keep everything else off them."""
    pipes = Pipes(os.dup(0), os.dup(1))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)
    return pipes


def end_with(parent: int) -> None:
    """End when the worker does, also in the middle of a call.

    Only Linux has that; elsewhere the call is finished first.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            raise Gone  # it has ended before it could be asked for


def serve(pipes: Pipes) -> None:
    """Carry out orders until there are no more."""
    printed = Printed()
    (_, modules, trust), _ = pipes.next_of(orders.PREPARE)
    try:
        tasks = prepared(modules)
    except ConfigError as error:
        pipes.send((orders.UNFIT, str(error)))
        raise Gone from error
    pipes.send((orders.READY, 1), msgspec.msgpack.encode(tasks))
    running = Running(Blobs(pipes).get, trust=trust)
    step, at_once = running.step("", code=False), False
    while True:
        head, tail = pipes.next()
        if head[0] == orders.PUSH:
            calls = _pushed.decode(tail)
            if len(calls) > 1 and not at_once:
                pipes.expect_many()
            for number, args, kwargs in calls:
                # A mark for each would cost quick calls more than they take.
                if at_once or printed.something:
                    printed.begin()
                pipes.give(number, step(args, kwargs))
                if at_once:
                    pipes.flush()
        elif head[0] == orders.CALL:
            printed.begin()
            _call(pipes, running, head, tail)
        else:
            assert head[0] == orders.LANE, "the worker says nothing else"
            printed.begin()
            _, name, code, at_once = head
            step = running.step(name, code=code)


def _call(pipes: Pipes, running: Running, head: list[Any], tail: memoryview) -> None:
    _, number, name, code, args_size, _ = head
    step: Step = running.step(name, code=code)
    tell_progress_to(
        lambda share, remark: pipes.send((orders.SAID, number, share, remark))
    )
    value, error, why = step(tail[:args_size], tail[args_size:])
    tell_progress_to(None)
    if error:
        pipes.send((orders.RAISED, number, why), error.encode(errors="replace"))
    else:
        pipes.send((orders.DONE, number), value)


class Blobs:
    """Large arguments: files that the worker keeps, which all its processes share."""

    def __init__(self, pipes: Pipes) -> None:
        self._pipes = pipes
        self._mapped: dict[bytes, memoryview] = {}  # the latest used is last

    def get(self, digest: bytes) -> memoryview:
        """Return a value in MessagePack; raises Unavailable if nobody gives it."""
        found = self._mapped.pop(digest, None)
        if found is None:
            self._pipes.send((orders.LACKS, digest))
            (_, path, why), _ = self._pipes.next_of(orders.BLOB)
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
