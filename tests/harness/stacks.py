"""The stacks of everything that a test runs, for the report of one that hangs.

Its threads, by faulthandler; the tasks of its event loop, each down to what it awaits;
and the threads of the programs that it has started, by py-spy.
"""

import asyncio
import faulthandler
import os
import shutil
import subprocess
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TextIO

import psutil

TASKS_MAX = 50  # printed; a thousand simulated workers have ten thousand
DUMP_MAX = 10.0  # seconds for one program


def write_stacks(file: TextIO, besides: Container[int] = ()) -> None:
    """Write the stacks of this process and of those below it, but those of some ids."""
    faulthandler.dump_traceback(file)
    _write_tasks(file)
    for process in psutil.Process().children(recursive=True):
        if process.pid not in besides:
            _write_program(process, file)
    file.flush()


def _write_tasks(file: TextIO) -> None:
    """Write the tasks of the event loop that runs, if one does."""
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        return
    for task in [*tasks][:TASKS_MAX]:
        print(f"\nTask {task.get_name()!r} (most recent await last):", file=file)
        for place in _awaits(task.get_coro()):
            print(f"  {place}", file=file)
    if len(tasks) > TASKS_MAX:
        print(f"\n{len(tasks) - TASKS_MAX} more tasks", file=file)


def _awaits(awaited: object) -> Iterator[str]:
    """Yield where a coroutine waits, where the one waits that it awaits, and so on."""
    while awaited is not None:
        match awaited:
            case CoroutineType():
                frame, inner = awaited.cr_frame, awaited.cr_await
            case AsyncGeneratorType():
                frame, inner = awaited.ag_frame, awaited.ag_await
            case GeneratorType():
                frame, inner = awaited.gi_frame, awaited.gi_yieldfrom
            case _:
                return  # a future, say
        if frame is not None:
            code = frame.f_code
            yield f'File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}'
        awaited = inner


def _write_program(process: psutil.Process, file: TextIO) -> None:
    beside = Path(sys.executable).with_name("py-spy")
    tool = beside if beside.exists() else shutil.which("py-spy")
    print(file=file)
    if tool is None:
        print(f"Process {process.pid}: install py-spy to see its stacks", file=file)
        return
    try:
        dumped = subprocess.run(
            [os.fspath(tool), "dump", "--pid", str(process.pid)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DUMP_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        print(f"Process {process.pid}: its stacks took too long to find", file=file)
        return
    print(dumped.stdout, file=file)
