"""Decides when a worker pauses for the sake of its machine's owner."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from shoal.config.schedule import ScheduleWindow, is_open

HOLD = 60.0  # seconds to be cool, or plugged in, before the worker resumes
COOLER = 5.0  # °C below the limit, before the worker resumes
READINGS_HOT = 2  # in a row: sensors have peaks

OUT_OF_SCHEDULE = "outside of its schedule"
ON_BATTERY = "on battery"
ACTIVE = "its user is active"


@dataclass(frozen=True, slots=True)
class OwnerRules:
    """When to pause: each rule is off at 0, False or without a window.

    ``active_within`` is in seconds since the user's last input, ``above`` in °C.
    """

    active_within: float = 0.0
    on_battery: bool = False
    above: float = 0.0
    schedule: tuple[ScheduleWindow, ...] = ()


@dataclass(frozen=True, slots=True)
class OwnerReadings:
    """The state of a machine; None: unknown, or the rule for it is off.

    ``idle`` is in seconds since the user's last input, ``celsius`` the highest
    temperature, and ``local`` the time of the machine's clock on the wall.
    """

    local: datetime
    idle: float | None = None
    on_battery: bool | None = None
    celsius: float | None = None


class OwnerPause:
    """The pause that the rules ask for; ``reason`` is empty without one.

    It begins at once, but for heat, and ends when nothing has asked for it for a while,
    so that the worker does not come and go.  An activity is such a while by itself.
    """

    def __init__(self, rules: OwnerRules) -> None:
        self.reason = ""
        self._rules = rules
        self._battery = _Latch()
        self._heat = _Latch(READINGS_HOT)
        self._overridden = False

    def update(self, readings: OwnerReadings, now: float) -> str:
        """Return the reason to pause, by new readings; empty: none."""
        reason = self._wanted(readings, now)
        self._overridden = self._overridden and bool(reason)
        self.reason = "" if self._overridden else reason
        return self.reason

    def override(self) -> None:
        """End the pause; the rules count again once they have asked for none."""
        self._overridden = bool(self.reason) or self._overridden
        self.reason = ""

    def _wanted(self, readings: OwnerReadings, now: float) -> str:
        """Return the first reason, of those that change least often first."""
        rules = self._rules
        reasons: Sequence[tuple[bool, str]] = (
            (not is_open(rules.schedule, readings.local), OUT_OF_SCHEDULE),
            (self._on_battery(readings, now), ON_BATTERY),
            (self._too_hot(readings, now), f"hotter than {rules.above:g} °C"),
            (_is_below(readings.idle, rules.active_within), ACTIVE),
        )
        return next((reason for holds, reason in reasons if holds), "")

    def _on_battery(self, readings: OwnerReadings, now: float) -> bool:
        on = self._rules.on_battery and readings.on_battery is True
        return self._battery.update(on=on, off=not on, now=now)

    def _too_hot(self, readings: OwnerReadings, now: float) -> bool:
        limit, celsius = self._rules.above, readings.celsius
        if not limit or celsius is None:
            return self._heat.update(on=False, off=True, now=now)
        return self._heat.update(
            on=celsius >= limit, off=celsius <= limit - COOLER, now=now
        )


class _Latch:
    """Is on after some readings in a row, and off after ``HOLD`` seconds of others."""

    def __init__(self, readings: int = 1) -> None:
        self._needed = readings
        self._readings = 0
        self._is_on = False
        self._off_since: float | None = None

    def update(self, *, on: bool, off: bool, now: float) -> bool:
        """Take a reading, which may be neither; return whether the latch is on."""
        self._readings = self._readings + 1 if on else 0
        if self._readings >= self._needed:
            self._is_on = True
        if not off:
            self._off_since = None
        elif self._off_since is None:
            self._off_since = now
        elif now - self._off_since >= HOLD:
            self._is_on = False
        return self._is_on


def _is_below(value: float | None, limit: float) -> bool:
    return value is not None and value < limit
