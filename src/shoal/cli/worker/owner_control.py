"""What the owner of this machine lends: by ``shoal throttle``, and by rules."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeAlias

from shoal.config import JoinConfig
from shoal.config.schedule import parse_window
from shoal.config.throttle_file import ThrottleFile
from shoal.domain.errors import ConfigError
from shoal.domain.worker import THROTTLE_MAX
from shoal.processes.owner_readings import read_idle, read_on_battery
from shoal.transports.clock import LoopClock
from shoal.worker.agent import WorkerEvent
from shoal.worker.health import HealthMeter
from shoal.worker.owner_throttle import (
    OwnerPause,
    OwnerReadings,
    OwnerRules,
    OwnerThrottle,
)

Watch: TypeAlias = Callable[[], Coroutine[None, None, None]]


class OwnerControl:
    """The throttle of a worker, and what changes it.

    ``data`` is the folder with the owner's file, and ``meter`` measures the heat.
    """

    def __init__(self, config: JoinConfig, data: Path, meter: HealthMeter) -> None:
        self.rules = owner_rules(config)
        self._file = ThrottleFile(data)
        self._meter = meter
        self._clock = LoopClock()
        self._pause = OwnerPause(self.rules)
        percent = config.throttle
        if percent is None:
            percent = self._file.read()  # as it was set last
        self.throttle = OwnerThrottle(THROTTLE_MAX if percent is None else percent)

    async def start(self) -> None:
        """Apply the rules for the first time.

        Raises ConfigError if a rule needs a value that this machine does not report.
        """
        readings = await self._read()
        check_readings(self.rules, readings)
        self.throttle.pause(self._pause.update(readings, self._clock.now()))

    def watches(self, report: Callable[[], None]) -> Sequence[Watch]:
        """Return what follows the owner, until cancelled; ``report`` gets changes."""
        throttle, pause = self.throttle, self._pause
        follow = partial(
            throttle.follow_rules, pause, self._read, self._clock.now, report
        )
        by_rules = () if self.rules == OwnerRules() else (follow,)
        return (partial(throttle.watch, self._file, pause, report), *by_rules)

    async def _read(self) -> OwnerReadings:
        """Read what the rules need, and nothing else: some readings run a program."""
        idle = on_battery = None
        wall = self._clock.wall()
        if self.rules.active_within:
            idle = await asyncio.to_thread(read_idle, wall)
        if self.rules.on_battery:
            on_battery = await asyncio.to_thread(read_on_battery)
        if self.rules.above:
            await self._meter.read_sensors()
        celsius = self._meter.celsius
        return OwnerReadings(datetime.fromtimestamp(wall), idle, on_battery, celsius)


def owner_rules(config: JoinConfig) -> OwnerRules:
    """Return the rules of a configuration.  Raises ConfigError for an invalid one."""
    return OwnerRules(
        60 * config.pause_when_active,
        config.pause_on_battery,
        config.pause_above,
        tuple(map(parse_window, config.schedule)),
    )


def check_readings(rules: OwnerRules, readings: OwnerReadings) -> None:
    """Raise ConfigError for a rule that could never pause, because nothing is read.

    A machine without a battery is never on battery.
    """
    if rules.active_within and readings.idle is None:
        raise ConfigError(
            "--pause-when-active: this system does not report when its user was last "
            "active; remove the option"
        )
    if rules.above and readings.celsius is None:
        raise ConfigError(
            "--pause-above: cannot read the temperature of a processor or a GPU here; "
            "remove the option"
        )


def throttle_event(throttle: OwnerThrottle) -> tuple[int, WorkerEvent]:
    """Return the lent share, in percent, and the event that reports it."""
    percent = 0 if throttle.paused else throttle.percent
    kind = {0: "paused", THROTTLE_MAX: "resumed"}.get(percent, "throttled")
    return percent, WorkerEvent(kind, throttle.pause_reason if throttle.percent else "")
