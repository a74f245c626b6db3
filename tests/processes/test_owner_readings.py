"""What the owner of a machine does with it."""

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from shoal.processes.owner_readings import read_idle, read_on_battery
from shoal.processes.programs import RunProgram

NOW = 1_700_000_000.0


def programs(outputs: Mapping[str, str]) -> RunProgram:
    """Return a machine's programs: their outputs by the beginning of the command."""

    def run(command: Sequence[str]) -> str:
        line = " ".join(command)
        return next(
            (out for start, out in outputs.items() if line.startswith(start)), ""
        )

    return run


def terminal(root: Path, name: str, idle: float) -> None:
    """Make what stands for a terminal whose user typed so many seconds ago."""
    path = root / "dev" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (NOW - idle, NOW))  # it printed something just now


def idle(root: Path, outputs: Mapping[str, str] = {}, system: str = "linux") -> float:
    found = read_idle(NOW, system, root, programs(outputs))
    assert found is not None
    return found


def test_without_terminals_and_desktops_there_was_no_input(tmp_path: Path) -> None:
    assert idle(tmp_path) == math.inf


def test_terminal_that_was_typed_at_last_counts(tmp_path: Path) -> None:
    terminal(tmp_path, "pts/3", 90.0)
    terminal(tmp_path, "tty1", 700.0)
    terminal(tmp_path, "pts/ptmx", 0.0)  # no terminal: it makes them
    terminal(tmp_path, "ttyS0", 0.0)  # a serial port

    assert idle(tmp_path) == 90.0


def test_clock_that_was_set_back_is_an_input_now(tmp_path: Path) -> None:
    terminal(tmp_path, "pts/0", -3600.0)

    assert idle(tmp_path) == 0.0


SESSIONS = """\
 c1 1000 ada seat0 tty2 active idle 5min
  7 1000 ada -     pts/0
"""
GRAPHICAL = "Type=wayland\nState=active\n"


@pytest.mark.parametrize(
    ("outputs", "seconds"),
    [
        ({"xprintidle": "4200\n"}, 4.2),
        ({"gdbus call --session --dest org.gnome": "(uint64 61500,)\n"}, 61.5),
        ({"loginctl list": SESSIONS, "loginctl show-session c1": GRAPHICAL}, 0.0),
        (
            {
                "loginctl list": SESSIONS,
                "loginctl show-session c1": GRAPHICAL
                + f"IdleHint=yes\nIdleSinceHint={int((NOW - 300) * 1e6)}\n",
            },
            300.0,
        ),
        (
            {"loginctl list": SESSIONS, "loginctl show-session": "Type=tty\n"},
            math.inf,  # its terminal tells
        ),
        # The desktop's own time is exact, and the hint only says that it is not idle.
        (
            {
                "xprintidle": "250000\n",
                "loginctl list": SESSIONS,
                "loginctl show-session": GRAPHICAL + "IdleHint=no\n",
            },
            250.0,
        ),
        ({"xprintidle": "couldn't open display\n"}, math.inf),
    ],
)
def test_desktops_of_linux_tell_their_last_input(
    tmp_path: Path, outputs: Mapping[str, str], seconds: float
) -> None:
    assert idle(tmp_path, outputs) == pytest.approx(seconds)


def test_earlier_of_terminal_and_desktop_counts(tmp_path: Path) -> None:
    terminal(tmp_path, "pts/0", 30.0)

    assert idle(tmp_path, {"xprintidle": "90000\n"}) == 30.0
    assert idle(tmp_path, {"xprintidle": "1000\n"}) == 1.0


def test_mac_tells_the_time_since_its_last_input(tmp_path: Path) -> None:
    printed = '    | |   "HIDIdleTime" = 12500000000\n    | |   "HIDParameters" = {}\n'
    terminal(tmp_path, "ttys001", 60.0)

    assert idle(tmp_path, {"ioreg -c IOHIDSystem": printed}, "darwin") == 12.5
    assert idle(tmp_path, {}, "darwin") == 60.0


@pytest.mark.skipif(sys.platform == "win32", reason="has no terminals like these")
def test_typing_at_a_real_terminal_is_seen() -> None:
    ours, theirs = os.openpty()
    os.write(ours, b"ls\n")
    os.read(theirs, 3)

    seconds = read_idle(time.time())
    os.close(ours)
    os.close(theirs)

    # The kernel notes it every 8 seconds.
    assert seconds is not None
    assert seconds < 60.0


def test_battery_of_this_machine_is_read() -> None:
    assert read_on_battery() in (None, True, False)
