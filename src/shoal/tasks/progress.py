"""Progress reports of tasks (``shoal.progress``)."""

import threading
from collections.abc import Callable
from time import monotonic  # noqa: TID251  # a process of its own

from shoal.tasks.limits import PROGRESS_INTERVAL, PROGRESS_TEXT_MAX


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
