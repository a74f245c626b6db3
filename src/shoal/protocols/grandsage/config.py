"""What the connections of one coordinator share: the configuration and the task ids."""

from collections.abc import Container
from dataclasses import dataclass, field

TASK_ID_COUNT = 0x70000000  # the original counts this far: positive however it is read


@dataclass(frozen=True, slots=True)
class Config:
    """How nodes are let in and what they are told."""

    token: str = field(
        default="",
        metadata={
            "help": "what nodes present as their token; empty: the coordinator's join "
            "token, and if there is none either, any token will do"
        },
    )
    max_new_tokens: int = field(
        default=1024,
        metadata={
            "help": "tokens a node may generate when the client names no limit, for "
            "nodes that must be told one"
        },
    )
    silence: float = field(
        default=30.0,
        metadata={
            "help": "seconds without a word after which a node is given up; real "
            "nodes send a keepalive every 10"
        },
    )


class TaskIds:
    """What the connections of one coordinator share: task ids and the time of day."""

    def __init__(self, start: int) -> None:
        """``start`` is in milliseconds since the epoch."""
        self._next_id = start % TASK_ID_COUNT
        self._start = start
        self._first_now: float | None = None

    def next_id(self, used: Container[int]) -> int:
        """Return the next task id that is not among ``used``.

        Ids go on from one connection to the next and, as they begin at the clock, from
        one start to the next.  So a node that comes back with an old task does not
        speak of a new one.
        """
        while (task_id := self._next_id) in used:
            self._next_id = (self._next_id + 1) % TASK_ID_COUNT
        self._next_id = (task_id + 1) % TASK_ID_COUNT
        return task_id

    def epoch(self, now: float) -> int:
        """Return whole seconds since the epoch at ``now``.

        The first call is taken for the start, so this lags by as long as the first
        node let us wait.  No node is known to read it.
        """
        if self._first_now is None:
            self._first_now = now
        return int(self._start / 1000 + now - self._first_now)
