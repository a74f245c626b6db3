"""Lends the slot of a task while it waits for the calls that it has made itself.

Otherwise tasks that wait for each other's slots would wait for ever.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LEND_AFTER = 0.05  # seconds of a wait after which the slot is lent


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
