"""``shoal serve``, which tells on SIGUSR1 what it holds: one JSON object a line.

``python -m live.counted_coordinator serve ...``.  Its memory is counted after it has
returned what is free, as it does once a minute, and with the garbage that it has not
collected yet; objects are counted without that.  It keeps few events, so that a short
run has as many at its end as after its first seconds, at any pace.
"""

import gc
import json
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

from shoal.app.background import trim_memory
from shoal.cli.main import main
from shoal.gateway.operators import event_log

HELD = signal.SIGUSR1
EVENTS = 50


def counts() -> dict[str, object]:
    """Return the descriptors, threads, bytes, objects and entries of this process.

    ``objects`` counts by type what the garbage collector knows.  ``entries`` is the
    length of all containers together: text and numbers in them are no such objects.
    """
    trim_memory()
    memory = anonymous_memory()
    gc.unfreeze()  # containers that were made at the start grow as well
    for _ in range(3):  # finalizers leave garbage, too
        gc.collect()
    objects: Counter[str] = Counter()
    entries = 0
    for each in gc.get_objects():
        kind = type(each)
        objects[f"{kind.__module__}.{kind.__qualname__}"] += 1
        if kind in (dict, list, set):
            entries += len(each)
    gc.freeze()
    return {
        "event": "counts",
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "memory": memory,
        "entries": entries,
        "objects": objects,
    }


def anonymous_memory(process: str = "self") -> int:
    """Return the resident bytes of a process that belong to no file.

    The pages of libraries and of the database come and go as the system wants.
    """
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (size,) = [each.split()[1] for each in lines if each.startswith("RssAnon:")]
    return int(size) << 10


def tell() -> None:
    """Tell at each signal what is held."""
    while True:
        signal.sigwait({HELD})
        print(json.dumps(counts()), flush=True)


if __name__ == "__main__":
    event_log.EVENTS_MAX = EVENTS
    # In all threads, for the one that waits to get it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {HELD})
    threading.Thread(target=tell, daemon=True).start()
    sys.exit(main())
