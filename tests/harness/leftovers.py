"""Ends the leftover processes of a test process, however that ended.

Each process that runs tests puts a tag into its environment, which its children
inherit, and starts a reaper: a process that waits for the end of a pipe that only the
test process holds open.  The pipe ends with the test process, also if it is killed.
Then the reaper kills every process that carries the tag.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

VARIABLE = "SHOAL_TESTS_TAG"
ROUNDS = 10


class Reaper:
    """Watches this test process; one for each."""

    def __init__(self) -> None:
        above = os.environ.get(VARIABLE, "")
        # The reaper of the process above, if there is one, kills ours as well.
        self.tag = f"{above}/{os.getpid()}"
        os.environ[VARIABLE] = self.tag
        environment = dict(os.environ)
        del environment[VARIABLE]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), self.tag],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # an interrupt from the keyboard is not for it
        )

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def close(self) -> None:
        """Kill the leftovers, and wait for their end."""
        os.environ[VARIABLE] = self.tag.rpartition("/")[0]
        if not os.environ[VARIABLE]:
            del os.environ[VARIABLE]
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def kill_tagged(tag: str) -> None:
    """Kill the processes that carry this tag or one below it."""
    for _ in range(ROUNDS):  # what was killed may just have started another
        tagged = [process for process in psutil.process_iter() if _has(process, tag)]
        if not tagged:
            return
        for process in tagged:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(tagged, timeout=1.0)


def _has(process: psutil.Process, tag: str) -> bool:
    try:
        found = process.environ().get(VARIABLE, "")
        alive = process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):
        return False
    return alive and f"{found}/".startswith(f"{tag}/")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    kill_tagged(sys.argv[1])


if __name__ == "__main__":
    main()
