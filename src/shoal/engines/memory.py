"""How much memory a model may take."""

import ctypes
import os
import sys
from pathlib import Path

PROC = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def free_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """Return the bytes that can be used without swapping; None if nobody tells.

    Where only the whole is known (macOS), half of it counts as free.
    """
    if sys.platform == "win32":
        return _windows()
    if (available := _available(proc)) is None:
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        except (ValueError, OSError):
            return None
    room = _room_in(cgroup)
    return available if room is None else min(available, room)


def _available(proc: Path) -> int | None:
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


def _room_in(cgroup: Path) -> int | None:
    """Return what a container may still take; None if it is not limited."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = (cgroup / "memory.current").read_text().strip()
    except OSError:
        return None
    return max(0, int(limit) - int(used)) if limit.isdecimal() else None


def _windows() -> int | None:
    """Ask ``GlobalMemoryStatusEx``, whose structure is of 64 bytes."""

    class Status(ctypes.Structure):
        _fields_ = (
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            ("total", ctypes.c_ulonglong),
            ("available", ctypes.c_ulonglong),
            ("others", ctypes.c_ulonglong * 5),
        )

    status = Status(length=ctypes.sizeof(Status))
    windll = getattr(ctypes, "windll", None)
    if windll is None or not windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None
    return int(status.available)
