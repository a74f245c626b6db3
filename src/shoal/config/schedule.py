"""Weekly schedules: the times at which a machine may work."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from shoal.domain.errors import ConfigError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MINUTES = 24 * 60  # of a day

_WINDOW = re.compile(
    r"(?:(?P<first>[a-z]{3})(?:-(?P<last>[a-z]{3}))? +)?"
    r"(?P<begin>[0-9]{1,2}:[0-9]{2})-(?P<end>[0-9]{1,2}:[0-9]{2})"
)


@dataclass(frozen=True, slots=True)
class ScheduleWindow:
    """A time of some days of the week; Monday is 0.

    ``begin`` and ``end`` are minutes since midnight.  A window whose end is not after
    its begin ends on the next day.
    """

    days: frozenset[int]
    begin: int
    end: int

    def contains(self, local: datetime) -> bool:
        """Return whether a local time is within the window."""
        today, minute = local.weekday(), 60 * local.hour + local.minute
        if self.begin < self.end:
            return today in self.days and self.begin <= minute < self.end
        yesterday = (today - 1) % len(DAYS)
        return (today in self.days and minute >= self.begin) or (
            yesterday in self.days and minute < self.end
        )


def parse_window(text: str) -> ScheduleWindow:
    """Parse ``22:00-07:00`` or ``mon-fri 18:00-08:00``.

    Raises ConfigError naming the text.
    """
    found = _WINDOW.fullmatch(text.strip().lower())
    expected = "expected a time such as 22:00-07:00 or 'mon-fri 18:00-08:00'"
    if found is None:
        raise ConfigError(f"--schedule {text!r}: {expected}")
    try:
        days = _days(found["first"], found["last"])
        return ScheduleWindow(days, _minute(found["begin"]), _minute(found["end"]))
    except ValueError as error:
        raise ConfigError(f"--schedule {text!r}: {error}; {expected}") from error


def is_open(schedule: Sequence[ScheduleWindow], local: datetime) -> bool:
    """Return whether a local time is within a schedule; without windows, any is."""
    return not schedule or any(window.contains(local) for window in schedule)


def _days(first: str | None, last: str | None) -> frozenset[int]:
    """Return the days from the first to the last; without them, all.

    Raises ValueError for an unknown day.
    """
    if first is None:
        return frozenset(range(len(DAYS)))
    for day in (first, last or first):
        if day not in DAYS:
            raise ValueError(f"unknown day {day}")
    begin, end = DAYS.index(first), DAYS.index(last or first)
    count = (end - begin) % len(DAYS) + 1
    return frozenset((begin + number) % len(DAYS) for number in range(count))


def _minute(text: str) -> int:
    """Return a time of day in minutes; raises ValueError after 24:00."""
    hour, _, minute = text.partition(":")
    minutes = 60 * int(hour) + int(minute)
    if int(minute) > 59 or minutes > MINUTES:
        raise ValueError(f"there is no time {text}")
    return minutes
