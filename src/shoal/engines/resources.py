"""The memory and the number of threads that a model may use."""

import asyncio
import ctypes
import os
import re
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

GPU_LIMIT = 30.0  # seconds for llama.cpp to look for GPUs
# Of a process of its own: it loads 100 MB of native code, and drivers.
_ASK_GPUS = """
import xllamacpp
devices = xllamacpp.get_device_info()
gpus = [each for each in devices if each["type"].name.endswith("_TYPE_GPU")]
print(sum(each["memory_free"] for each in gpus))
"""

_VISIBLE_GPUS = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GGML_VK_VISIBLE_DEVICES",
)

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


async def free_memory_of_gpus(script: str = _ASK_GPUS) -> int:
    """Return the free bytes of the GPUs that the embedded engine runs models on.

    0: it runs them on the processor, or nothing is known.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(GPU_LIMIT):
            output, _ = await process.communicate()
    except TimeoutError:
        return 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    last = output.split()[-1:]
    return int(last[0]) if last and last[0].isdigit() else 0


def use_gpus(
    numbers: Sequence[int], environment: MutableMapping[str, str] = os.environ
) -> None:
    """Hide all other GPUs from the engines that this process starts from now on.

    They read these variables of CUDA, ROCm and llama.cpp's Vulkan; the order is that of
    the bus, as in ``nvidia-smi``.  No number: the environment stays as it is.
    """
    if numbers:
        shown = ",".join(map(str, numbers))
        environment.update(dict.fromkeys(_VISIBLE_GPUS, shown))
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"


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
    """Return the memory that a container may still allocate; None: unlimited.

    As in Linux's ``MemAvailable``, what is only kept of files counts as free.
    """
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        stat = (cgroup / "memory.stat").read_text()
    except OSError:
        return None
    kept = re.findall(r"^(?:in)?active_file (\d+)$", stat, re.MULTILINE)
    if not limit.isdecimal():
        return None
    return max(0, int(limit) - used + sum(map(int, kept)))


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
