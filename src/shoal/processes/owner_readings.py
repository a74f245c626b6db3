"""Reads what the owner of this machine does with it: the last input, and the power.

Sources: ``xprintidle`` (X11's screen saver extension), GNOME's IdleMonitor on D-Bus
(Wayland, too), logind's session properties (``org.freedesktop.login1(5)``), the access
times of terminals, as ``w`` reads them, ``HIDIdleTime`` of macOS, and
``GetLastInputInfo`` of Windows.
"""

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from shoal.processes.programs import RunProgram, program_output

TERMINALS = ("pts/[0-9]*", "tty[0-9]*", "ttys[0-9]*", "ttyv[0-9]*")
"""Patterns of terminals below /dev: Linux's, then those of macOS and FreeBSD."""

GNOME = (
    *("gdbus", "call", "--session", "--dest", "org.gnome.Mutter.IdleMonitor"),
    *("--object-path", "/org/gnome/Mutter/IdleMonitor/Core"),
    *("--method", "org.gnome.Mutter.IdleMonitor.GetIdletime"),
)
GRAPHICAL = frozenset({"x11", "wayland", "mir"})  # types of logind's sessions
SESSIONS_MAX = 8  # of logind that are asked


def read_idle(
    now: float,
    system: str = sys.platform,
    root: Path = Path("/"),
    run: RunProgram = program_output,
) -> float | None:
    """Return the seconds since the last input of any user; inf: there was none.

    None: the system does not report it.  ``now`` is a Unix time, ``system`` is
    ``sys.platform``, ``root`` the root folder, and ``run`` runs a program.
    """
    if system == "win32":
        return _windows()
    times = [*_terminals(root, now)]
    if system == "darwin":
        times += _mac(run)
    else:
        # Only a desktop that does not report the time of the input itself is asked for
        # its hint, which comes minutes late.
        times += [*_desktop(run)] or _logind(run, now)
    return max(0.0, min(times, default=math.inf))


def _terminals(root: Path, now: float) -> Iterator[float]:
    for pattern in TERMINALS:
        for terminal in (root / "dev").glob(pattern):
            try:
                yield now - terminal.stat().st_atime
            except OSError:
                continue  # it was closed


def _desktop(run: RunProgram) -> Iterator[float]:
    """Yield the time since the last input of this user's desktop, in seconds."""
    if (printed := run(["xprintidle"]).strip()).isdecimal():
        yield int(printed) / 1e3
    elif found := re.search(r"uint64 (\d+)", run(GNOME)):
        yield int(found[1]) / 1e3


def _logind(run: RunProgram, now: float) -> list[float]:
    """Return the time since each graphical session has been idle, in seconds."""
    times = []
    listed = run(["loginctl", "list-sessions", "--no-legend"]).split("\n")
    for line in listed[:SESSIONS_MAX]:
        if not (words := line.split()):
            continue
        properties = ("Type", "State", "IdleHint", "IdleSinceHint")
        shown = run(["loginctl", "show-session", words[0], *_flags(properties)])
        session = dict(each.split("=", 1) for each in shown.split("\n") if "=" in each)
        if session.get("Type") not in GRAPHICAL or session.get("State") == "closing":
            continue
        since = session.get("IdleSinceHint", "")
        idle = session.get("IdleHint") == "yes" and since.isdecimal()
        times.append(now - int(since) / 1e6 if idle else 0.0)
    return times


def _flags(properties: tuple[str, ...]) -> list[str]:
    return [f"--property={each}" for each in properties]


def _mac(run: RunProgram) -> list[float]:
    found = re.search(r'"HIDIdleTime" = (\d+)', run(["ioreg", "-c", "IOHIDSystem"]))
    return [] if found is None else [int(found[1]) / 1e9]


def _windows() -> float | None:
    """Return the seconds since the last input of this session."""
    if sys.platform != "win32":
        return None
    import ctypes

    class LastInput(ctypes.Structure):
        _fields_ = (("size", ctypes.c_uint), ("time", ctypes.c_uint))

    last = LastInput(ctypes.sizeof(LastInput))
    if not ctypes.windll.user32.GetLastInputInfo(ctypes.byref(last)):
        return None
    elapsed = ctypes.windll.kernel32.GetTickCount() - last.time
    return float(elapsed % (1 << 32)) / 1e3


def read_on_battery() -> bool | None:
    """Return whether this machine runs on battery; None: it has none."""
    try:
        # Not every system has it.
        battery = getattr(psutil, "sensors_battery", lambda: None)()
    except (OSError, ValueError, RuntimeError):
        return None  # a faulty driver
    return None if battery is None else battery.power_plugged is False
