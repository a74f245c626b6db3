"""How many threads a model should run on."""

import os
import sys
from pathlib import Path


def threads_for(logical: int, physical: int) -> int:
    """Return how many threads generate fastest beside everything else.

    llama.cpp's threads wait for each other by spinning.  With one for each processor,
    anything else that runs stops them all: with two processors and a busy neighbour,
    two threads were measured at a sixth of the speed of one.
    """
    return 1 if logical <= 2 else max(1, min(logical - 1, physical))


def processors() -> tuple[int, int]:
    """Return how many processors this process may use, and on how many cores."""
    if hasattr(os, "sched_getaffinity"):
        usable = os.sched_getaffinity(0)
        siblings = {
            siblings_of(Path(f"/sys/devices/system/cpu/cpu{number}"))
            for number in usable
        }
        return len(usable), len(siblings)
    logical = os.cpu_count() or 1
    # Macs have one thread a core or count so; elsewhere two is the safe guess.
    return logical, logical if sys.platform == "darwin" else max(1, logical // 2)


def siblings_of(processor: Path) -> str:
    """Return what the processors of one core have in common."""
    try:
        return (processor / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return processor.name
