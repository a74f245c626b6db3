"""The context of the running call of a task process: its coordinator and caller.

It makes calls of its own at the coordinator, lends its slot while it waits for them, so
that tasks do not wait for each other's slots for ever, and reports its progress.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic  # noqa: TID251  # a process of its own

from shoal.tasks.limits import PROGRESS_INTERVAL, PROGRESS_TEXT_MAX

COORDINATOR_URL = "SHOAL_COORDINATOR_URL"
COORDINATOR_FINGERPRINT = "SHOAL_COORDINATOR_FINGERPRINT"
"""Variables of a worker's processes: the URLs of the pool, and its coordinators' key.

The first URL is that of the coordinator that the worker joined; commas separate them.
"""


LEND_AFTER = 0.05  # seconds of a wait after which the slot is lent


class RunningCall:
    """The call that this process runs.

    ``grant`` is as in ``RunJob``, and ``number`` that of the call in its call stream.
    """

    __slots__ = ("grant", "number")

    def __init__(self) -> None:
        self.grant = ""
        self.number = 0


RUNNING = RunningCall()


def call_access() -> tuple[str, str] | None:
    """Return the URLs of the coordinator, and the credential of the running call.

    None: the coordinator gave it none, or has no URL.
    """
    url = os.environ.get(COORDINATOR_URL)
    if not url or not RUNNING.grant:
        return None
    # Most calls make none of their own.
    from shoal.domain.credentials import call_credential, with_fingerprint

    credential = call_credential(RUNNING.grant, RUNNING.number)
    fingerprint = bytes.fromhex(os.environ.get(COORDINATOR_FINGERPRINT, ""))
    return url, with_fingerprint(credential, fingerprint or None)


def set_openai_variables() -> None:
    """Let OpenAI's clients in this process use the pool as the running call."""
    if (access := call_access()) is not None:
        urls, credential = access
        url = urls.partition(",")[0]  # these clients know one
        os.environ |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": credential}


class _ProgressTarget:
    """The receiver of the running call's reports, if there is one."""

    __slots__ = ("handler", "last", "lock")

    def __init__(self) -> None:
        self.handler: Callable[[float | None, str], None] | None = None
        self.last = float("-inf")
        self.lock = threading.Lock()


_target = _ProgressTarget()


def progress(share: float | None = None, remark: str = "") -> None:
    """Report the progress of the current task to the program that called it.

    Reports within 0.05 seconds of the previous one are dropped, except a share of 1.
    Outside a task, this does nothing.

    Args:
        share: the completed share of the work, from 0 to 1; None if it is unknown.
        remark: text for people; only the first 200 characters are sent.

    Raises:
        ValueError: ``share`` is below 0 or above 1.
    """
    if share is not None and not 0 <= share <= 1:
        raise ValueError(f"progress: {share!r}: expected a number from 0 to 1")
    with _target.lock:
        now = monotonic()
        if _target.handler is None:
            return
        if now - _target.last < PROGRESS_INTERVAL and share != 1:
            return
        _target.last = now
        _target.handler(
            None if share is None else float(share), str(remark)[:PROGRESS_TEXT_MAX]
        )


def set_progress_handler(handler: Callable[[float | None, str], None] | None) -> None:
    """Set the receiver of reports; None: none."""
    with _target.lock:
        _target.handler = handler
        _target.last = float("-inf")


class _Slot:
    """The slot of this process, and the number of its threads that wait."""

    __slots__ = ("handler", "lock", "waits")

    def __init__(self) -> None:
        self.handler: Callable[[bool], None] | None = None
        self.waits = 0
        self.lock = threading.Lock()


_slot = _Slot()


def set_lending_handler(handler: Callable[[bool], None] | None) -> None:
    """Set the receiver of whether the slot is lent; None: there is no slot."""
    with _slot.lock:
        _slot.handler, _slot.waits = handler, 0


def runs_tasks() -> bool:
    """Return whether this process runs the tasks of a worker."""
    return _slot.handler is not None


@contextmanager
def slot_lent() -> Iterator[None]:
    """Lend the slot for the length of the block."""
    _change(1)
    try:
        yield
    finally:
        _change(-1)


def _change(waits: int) -> None:
    with _slot.lock:
        before, _slot.waits = _slot.waits, _slot.waits + waits
        if _slot.handler is not None and (not before or not _slot.waits):
            _slot.handler(_slot.waits > 0)
