"""Programs at a terminal of their own."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.speed import PATIENCE

if TYPE_CHECKING:
    import pexpect


def at_terminal(
    arguments: Sequence[str], *, columns: int = 100
) -> "pexpect.spawn[str]":
    """Start ``shoal`` at a terminal; the caller closes it.

    Ctrl-C and a closed terminal end it even where the tests run in the background,
    whose children ignore them.
    """
    import pexpect  # not on Windows

    return pexpect.spawn(
        sys.executable,
        ["-m", "shoal", *arguments],
        encoding="utf-8",
        timeout=PATIENCE,
        dimensions=(24, columns),
        env={**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"},
        preexec_fn=_allow_interrupts,
    )


def _allow_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
