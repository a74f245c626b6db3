"""A worker's child process that runs one call at a time.

The worker runs it as ``python -m shoal.tasks.child``.  It reads
commands from standard input and ends when that is closed.  Output of tasks goes to
standard error.
"""

import ctypes
import faulthandler
import mmap
import os
import select
import signal
import sys
from functools import partial
from io import FileIO
from typing import Any

import msgspec

from shoal.domain.errors import ConfigError, Unavailable
from shoal.processes.programs import claim_pipes
from shoal.tasks import process_messages
from shoal.tasks.child_io import ChildPipes, ParentExited, TaskOutput
from shoal.tasks.invocation import FunctionInvoker, Invoke, hint_remarks, load_tasks
from shoal.tasks.limits import MAPPED_MAX
from shoal.tasks.running_call import RUNNING, set_lending_handler, set_progress_handler

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    # Ctrl-C reaches the whole process group; when to end is the worker's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()  # a crash prints a traceback
    end_group_with_worker()
    pipes = open_pipes()
    try:
        exit_with_parent(int(sys.argv[1]))
        serve(pipes)
    except ParentExited:
        pass
    # Do not wait for threads and exit handlers of tasks.
    os._exit(0)


def open_pipes() -> ChildPipes:
    """Return the pipes to the worker, and redirect what tasks print."""
    pipes = ChildPipes(*claim_pipes())
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)
    return pipes


def end_group_with_worker() -> None:
    """End what tasks start, too, once the worker is gone, however that ended.

    A process of their group waits until the other end of the worker's pipe is closed.
    The worker kills the group when this process ends.
    """
    if sys.platform == "win32":
        return
    # No child of this process: tasks may wait for any of theirs.
    if between := os.fork():
        os.waitpid(between, 0)
        return
    if os.fork():
        os._exit(0)
    os.closerange(1, 3)  # the worker waits for the end of the output
    closing = select.poll()
    closing.register(0, 0)  # hanging up is always reported
    closing.poll()
    os.killpg(0, signal.SIGKILL)


def exit_with_parent(parent: int) -> None:
    """End with the worker, even during a call.

    Only Linux supports this; elsewhere the call finishes first.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            raise ParentExited  # the worker ended before prctl took effect


def serve(pipes: ChildPipes) -> None:
    """Carry out commands until there are no more."""
    output = TaskOutput()
    (_, modules, trust), _ = pipes.next_with(process_messages.PREPARE)
    try:
        tasks = load_tasks(modules)
    except ConfigError as error:
        pipes.send((process_messages.IMPORT_FAILED, str(error)))
        raise ParentExited from error
    ready = (process_messages.READY, 1, hint_remarks())
    pipes.send(ready, msgspec.msgpack.encode(tasks))
    functions = FunctionInvoker(MappedBlobs(pipes).get, trust=trust)
    set_lending_handler(partial(_report_waiting, pipes))
    invoke, flush_each = functions.invoker("", process_messages.Mode(0)), False
    while True:
        head, tail = pipes.next()
        if head[0] == process_messages.PUSH:
            calls = process_messages.decode_pushed(tail)
            if len(calls) > 1 and not flush_each:
                pipes.flush_in_background()
            for number, args, kwargs in calls:
                # A mark for each call would take longer than a quick call.
                if flush_each or output.written:
                    output.mark_call()
                RUNNING.number = number
                pipes.send_return(number, invoke(args, kwargs))
                if flush_each:
                    pipes.flush()
        elif head[0] == process_messages.CALL:
            output.mark_call()
            _run_call(pipes, functions, head, tail)
        else:
            assert head[0] == process_messages.OPEN_STREAM, (
                "unexpected message from the worker"
            )
            output.mark_call()
            _, name, mode, flush_each, RUNNING.grant = head
            invoke = functions.invoker(name, process_messages.Mode(mode))


def _report_waiting(pipes: ChildPipes, waits: bool) -> None:
    pipes.flush()  # the results of earlier calls do not wait as well
    pipes.send((process_messages.WAITING, waits))


def _run_call(
    pipes: ChildPipes, functions: FunctionInvoker, head: list[Any], tail: memoryview
) -> None:
    _, number, name, mode, args_size, _, RUNNING.grant = head
    RUNNING.number = 0
    invoke: Invoke = functions.invoker(name, process_messages.Mode(mode))
    set_progress_handler(
        lambda share, remark: pipes.send(
            (process_messages.PROGRESS, number, share, remark)
        )
    )
    returned = invoke(tail[:args_size], tail[args_size:])
    set_progress_handler(None)
    pipes.send(*returned.message(number))


class MappedBlobs:
    """Maps the worker's files of large arguments, which its processes share.

    Each mapping is private: a function may write to its arguments, and pages that it
    does not write to are shared.
    """

    def __init__(self, pipes: ChildPipes) -> None:
        self._pipes = pipes
        # Open, since the worker may remove them.  The most recently used is last.
        self._files: dict[bytes, FileIO] = {}

    def get(self, digest: bytes) -> memoryview:
        """Return a value in MessagePack; raises Unavailable if it is missing."""
        file = self._files.pop(digest, None)
        if file is None:
            self._pipes.send((process_messages.BLOB_NEEDED, digest))
            (_, path, reason), _ = self._pipes.next_with(process_messages.BLOB)
            if not path:
                raise Unavailable(reason)
            file = FileIO(path)
        self._files[digest] = file
        if len(self._files) > MAPPED_MAX:
            self._files.pop(next(iter(self._files))).close()
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


if __name__ == "__main__":
    main()
