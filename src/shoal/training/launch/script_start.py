"""Becomes a script, which ends with the process that started it.

``python -I -S script_start.py PARENT PYTHON ARGUMENTS…``: run as a file, before
anything is imported, because each rank starts through it.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    parent, python, *arguments = sys.argv[1:]
    # The task process ignores Ctrl-C; the script may want it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        import ctypes

        # It outlives exec(2).  Elsewhere the worker ends the whole process group.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(parent):
            return  # it ended before prctl took effect
    os.execv(python, [python, "-u", *arguments])


if __name__ == "__main__":
    main()
