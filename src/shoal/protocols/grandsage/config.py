"""Settings, and the task ids that all connections of a coordinator share."""

from collections.abc import Container
from dataclasses import dataclass, field

TASK_ID_COUNT = 0x70000000  # as in the original: positive, signed or unsigned


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of the wire."""

    token: str = field(
        default="",
        metadata={
            "help": "token of nodes; empty: the coordinator's join token, and without "
            "that any token"
        },
    )
    max_new_tokens: int = field(
        default=1024,
        metadata={
            "help": "limit of generated tokens where the client sets none, for nodes "
            "that require one"
        },
    )
    silence: float = field(
        default=30.0,
        metadata={
            "help": "seconds of silence until a node counts as lost; nodes send a "
            "keepalive every 10"
        },
    )


class TaskIds:
    """Issues task ids and timestamps for all connections."""

    def __init__(self, start: int) -> None:
        """``start`` is in milliseconds since the epoch."""
        self._next_id = start % TASK_ID_COUNT
        self._start = start
        self._first_now: float | None = None

    def next_id(self, used: Container[int]) -> int:
        """Return the next task id that is not among ``used``.

        Ids increase across connections and, because they start at the clock, across
        restarts.  So frames of an old task, which a node sends after it reconnects,
        do not match a new task.
        """
        while (task_id := self._next_id) in used:
            self._next_id = (self._next_id + 1) % TASK_ID_COUNT
        self._next_id = (task_id + 1) % TASK_ID_COUNT
        return task_id

    def epoch(self, now: float) -> int:
        """Return whole seconds since the epoch at ``now``.

        The first call counts as the start, so the result lags by the time until the
        first node connects.  No known node reads it.
        """
        if self._first_now is None:
            self._first_now = now
        return int(self._start / 1000 + now - self._first_now)
