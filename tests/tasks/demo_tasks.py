"""The functions that tests call, by name and in processes.

``demo.*`` are those that the recorded MacFleet worker had (``vectors/macfleet.json``),
but for the one in ``typed_tasks``.
"""

import ctypes
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal import current_pool
from shoal.tasks.registry import task
from shoal.tasks.running_call import progress, slot_lent


@task(name="demo.add")
def add(x: float, y: float = 0) -> float:
    return x + y


@task(name="demo.bytes")
def some_bytes() -> bytes:
    return b"\x00\xff"


@task(name="demo.echo")
def echo(*args: Any, **kwargs: Any) -> Any:
    return [list(args), kwargs]


@task(name="demo.fail")
def fail(text: str) -> None:
    raise ValueError(text)


@task(name="demo.ident")
def ident(x: Any) -> Any:
    return x


@task(name="demo.sleep")
def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@task(name="demo.unserializable")
def unserializable() -> object:
    return object()


@dataclass
class Point:
    x: int
    y: int = 0


@task(name="mirror")
def mirror(point: Point) -> Point:
    return Point(point.y, point.x)


@task(name="pid")
def pid() -> int:
    return os.getpid()


@task(name="crash")
def crash() -> None:
    ctypes.string_at(0)


@task(name="leave")
def leave(status: int) -> None:
    print("so long", file=sys.stderr, flush=True)
    os._exit(status)


@task(name="quit")
def quit_() -> None:
    sys.exit(3)


@task(name="patient", timeout=0.05)
def patient() -> None:
    time.sleep(60)


@task(name="steps")
def steps(count: int) -> int:
    for number in range(count):
        progress(number / count, f"step {number}")
    progress(1.0, "done")
    return count


@task(name="speaks")
def speaks(text: str, status: int | None = None) -> None:
    """Print without a newline, by Python and by the system; exit with a status."""
    os.write(1, text.encode())
    print(text, end="")
    if status is not None:
        os._exit(status)


@task(name="prints")
def prints(text: str) -> str:
    print(text)
    os.write(1, text.encode())
    return text


@task(name="awaits")
async def awaits(value: int) -> int:
    return value


@task(name="marks")
def marks(path: str) -> None:
    Path(path).touch()


@task(name="waits")
def waits(begun: str, go: str) -> None:
    """Report the start of the call to a FIFO, and wait on another."""
    Path(begun).write_text("begun")
    Path(go).read_text()


@task(name="lends")
def lends(begun: str, go: str) -> str:
    """Wait as ``waits`` does, as for a call of its own."""
    with slot_lent():
        waits(begun, go)
    return "went on"


@task(name="nests")
def nests(depth: int) -> int:
    """Count the calls below this one, which are made on the same workers."""
    pool = current_pool()
    if not depth:
        return 1
    return 1 + sum(pool.map(nests, [depth - 1] * 2))


@task(name="adds")
def adds(x: float, y: float) -> float:
    """Have the pool add."""
    return current_pool().submit(add, x, y).result()


@task(name="queries", openai=True)
def queries(model: str, question: str) -> tuple[str, str]:
    """Ask a model of the pool; return the answer, and the credential."""
    from openai import OpenAI

    with OpenAI() as client:
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question}]
        )
    return answer.choices[0].message.content or "", os.environ["OPENAI_API_KEY"]


@task(name="either")
def either(path: str, go: str = "") -> None:
    """Make a file, or wait between two FIFOs."""
    if go:
        waits(path, go)
    else:
        marks(path)


@task(name="leaves_child")
def leaves_child(pid: str) -> None:
    """Start a process that outlives the call, report its PID, and wait."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pid).write_text(str(child.pid))
    threading.Event().wait()


@task(name="dies_with_child")
def dies_with_child(pid: str) -> None:
    """Start a process, report its PID, and end without it."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pid).write_text(str(child.pid))
    os._exit(7)


@task(name="crash_if")
def crash_if(number: int, bad: int) -> int:
    if number == bad:
        os._exit(7)
    return number
