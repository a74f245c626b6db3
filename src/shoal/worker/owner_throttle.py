"""The share of its speed that the owner of a machine lends to pools, and pauses."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from weakref import WeakMethod

from msgspec.structs import replace

from shoal.config.schedule import ScheduleWindow, is_open
from shoal.config.throttle_file import ThrottleFile
from shoal.domain.worker import PAUSED, THROTTLE_MAX, Offer

WATCH_INTERVAL = 1.0  # seconds between checks of the owner's file
RULES_INTERVAL = 5.0  # seconds between readings for the owner's rules


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

    It begins at once, except for heat, and ends when its cause has been absent for a
    while, so that the worker does not come and go.  An activity is such a while by
    itself.
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


class OwnerThrottle:
    """The throttle of one worker, in percent; 0: it is paused.

    Part of a machine's speed is lent as part of its slots: see ``lent``.
    ``pause_reason`` is why the owner's rules pause the worker; empty: they do not.
    Running jobs end before a pause by the throttle, and are handed over for one by
    the rules.
    """

    def __init__(self, percent: int = THROTTLE_MAX) -> None:
        self.percent = percent
        self.pause_reason = ""
        self._share = percent or THROTTLE_MAX  # the last one above 0
        self._listeners: list[Callable[[], None]] = []
        # Of slots, which come and go with the connection to a cluster.
        self._methods: list[WeakMethod[Callable[[], None]]] = []

    @property
    def paused(self) -> bool:
        """Whether the owner lends nothing: no new job starts."""
        return bool(self.why_paused)

    @property
    def why_paused(self) -> str:
        """Why the worker gets no jobs, for its coordinator; empty: it gets some."""
        if self.percent == 0:
            return PAUSED
        return f"paused: {self.pause_reason}" if self.pause_reason else ""

    def lent(self, slots: int) -> int:
        """Return how many of some slots are lent, rounded up.

        A paused worker keeps its slots: its running jobs go on.
        """
        return -(-slots * self._share // THROTTLE_MAX)

    def limit(self, offers: Sequence[Offer]) -> tuple[Offer, ...]:
        """Return offers with the slots that are lent."""
        return tuple(replace(each, slots=self.lent(each.slots)) for each in offers)

    def set(self, percent: int) -> None:
        """Change the throttle."""
        self.percent = percent
        self._share = percent or self._share
        self._notify()

    def pause(self, reason: str) -> None:
        """Pause for a reason of the owner's rules, or end such a pause if empty."""
        self.pause_reason = reason
        self._notify()

    def _notify(self) -> None:
        for method in [*self._methods]:
            if (listener := method()) is not None:
                listener()
        for listener in [*self._listeners]:
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call a bound method after each change, for as long as its object exists."""
        self._methods.append(WeakMethod(listener, self._methods.remove))

    @contextmanager
    def observed(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call a function after each change, within the block."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    async def watch(
        self, file: ThrottleFile, pause: OwnerPause, report: Callable[[], None]
    ) -> None:
        """Follow the owner's file until cancelled; ``report`` is called on changes.

        An order to lend something ends a ``pause`` of the rules.
        """
        while True:
            await asyncio.sleep(WATCH_INTERVAL)
            percent = file.poll()
            if percent is None:
                continue
            overridden = bool(percent and self.pause_reason)
            if overridden:
                pause.override()
                self.pause_reason = ""
            if overridden or percent != self.percent:
                self.set(percent)
                report()

    async def follow_rules(
        self,
        pause: OwnerPause,
        read: Callable[[], Awaitable[OwnerReadings]],
        now: Callable[[], float],
        report: Callable[[], None],
    ) -> None:
        """Pause by the owner's rules until cancelled.

        ``read`` reads the machine; ``report`` is called when a pause begins or ends.
        """
        while True:
            before, reason = self.paused, pause.update(await read(), now())
            if reason != self.pause_reason:
                self.pause(reason)
                if self.paused is not before:
                    report()
            await asyncio.sleep(RULES_INTERVAL)
