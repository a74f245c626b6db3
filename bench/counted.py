"""``shoal``, which tells on SIGUSR1 how often its functions were called since the last.

As ``counted.py serve …``.  Calls are those of functions of Python, and resumptions of
coroutines, in all threads of the process; what it tells is one line of JSON.
"""

import cProfile
import gc
import json
import signal
import sys
import threading
from collections import Counter
from contextlib import suppress
from types import CodeType

LOOK = signal.SIGUSR1

_profiles: list[cProfile.Profile] = []


def count(*_: object) -> None:
    """Count in this thread from now on."""
    sys.setprofile(None)
    profile = cProfile.Profile(subcalls=False, builtins=False)
    with suppress(ValueError):  # from Python 3.12 on, the first is for all threads
        profile.enable()
        _profiles.append(profile)


def tell() -> None:
    """Tell at each signal what was called since the one before."""
    before: Counter[int] = Counter()
    while True:
        signal.sigwait({LOOK})
        now: Counter[int] = Counter()  # by the id of the code: its hash takes long
        codes: dict[int, CodeType] = {}
        gc.disable()  # or it may let another thread run, and so change what is read
        for profile in _profiles:
            for entry in profile.getstats():
                now[id(entry.code)] += entry.callcount
                codes[id(entry.code)] = entry.code
        gc.enable()
        calls: Counter[str] = Counter()
        for key, times in (now - before).items():
            code = codes[key]
            place = f"{code.co_filename}:{code.co_firstlineno}"
            calls[f"{place} {code.co_qualname}"] += times
        print(json.dumps({"event": "calls", "calls": calls}), flush=True)
        before = now


if __name__ == "__main__":
    # First, for what is imported not to be counted, and looked through, each time.
    from shoal.app import server as _server  # noqa: F401
    from shoal.cli.main import main
    from shoal.cli.worker import run_worker as _run_worker  # noqa: F401

    # In all threads, for the one that waits to get it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {LOOK})
    threading.Thread(target=tell, daemon=True).start()
    threading.setprofile(count)
    count()
    sys.exit(main())
