"""The memory and the number of threads that a model may use."""

import ctypes
import os
import sys
from pathlib import Path

PROC = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def free_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """Return the bytes that can be used without swapping; None if unknown.

    Where only the total is known (macOS), half of it counts as free.
    """
    if sys.platform == "win32":
        return _windows_free_memory()
    if (available := _available_memory(proc)) is None:
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        except (ValueError, OSError):
            return None
    cgroup_free = _cgroup_free(cgroup)
    return available if cgroup_free is None else min(available, cgroup_free)


def _available_memory(proc: Path) -> int | None:
    """Read Linux's ``MemAvailable``, which is in KiB (proc(5))."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _cgroup_free(cgroup: Path) -> int | None:
    """Return the memory that a container may still allocate; None: unlimited."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = (cgroup / "memory.current").read_text().strip()
    except OSError:
        return None
    return max(0, int(limit) - int(used)) if limit.isdecimal() else None


def _windows_free_memory() -> int | None:
    """Call ``GlobalMemoryStatusEx``, whose structure has 64 bytes."""

    class MemoryStatus(ctypes.Structure):
        _fields_ = (
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            ("total", ctypes.c_ulonglong),
            ("available", ctypes.c_ulonglong),
            ("others", ctypes.c_ulonglong * 5),
        )

    status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
    windll = getattr(ctypes, "windll", None)
    if windll is None or not windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None
    return int(status.available)


def threads_for(logical: int, physical: int) -> int:
    """Return the number of threads that generates fastest on a machine with other load.

    llama.cpp's threads wait for each other by spinning.  With one for each processor,
    any other load stalls them all: with two processors and another busy process, two
    threads were measured at a sixth of the speed of one.
    """
    return 1 if logical <= 2 else max(1, min(logical - 1, physical))


def processors() -> tuple[int, int]:
    """Return the number of processors of this process, and of their cores."""
    if hasattr(os, "sched_getaffinity"):
        usable = os.sched_getaffinity(0)
        siblings = {
            siblings_of(Path(f"/sys/devices/system/cpu/cpu{number}"))
            for number in usable
        }
        return len(usable), len(siblings)
    logical = os.cpu_count() or 1
    # Macs have one thread a core, or report it so; elsewhere, assume two.
    return logical, logical if sys.platform == "darwin" else max(1, logical // 2)


def siblings_of(processor: Path) -> str:
    """Return the key that the processors of one core share."""
    try:
        return (processor / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return processor.name
