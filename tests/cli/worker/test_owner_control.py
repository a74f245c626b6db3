"""What the owner of a machine lends, by options and readings."""

from datetime import datetime
from pathlib import Path

import pytest

from shoal.cli.worker.owner_control import (
    OwnerControl,
    check_readings,
    owner_rules,
    throttle_event,
)
from shoal.config import JoinConfig
from shoal.config.schedule import DAYS, parse_window
from shoal.config.throttle_file import ThrottleFile
from shoal.domain.errors import ConfigError
from shoal.processes.thermal import ThermalReading
from shoal.worker.agent import WorkerEvent
from shoal.worker.health import HealthMeter
from shoal.worker.owner_throttle import OwnerReadings, OwnerRules, OwnerThrottle

NOW = datetime(2026, 1, 5)


def test_options_are_rules() -> None:
    config = JoinConfig(
        pause_when_active=5.0,
        pause_on_battery=True,
        pause_above=85.0,
        schedule=("22:00-07:00",),
    )

    assert owner_rules(JoinConfig()) == OwnerRules()
    assert owner_rules(config) == OwnerRules(
        300.0, on_battery=True, above=85.0, schedule=(parse_window("22:00-07:00"),)
    )


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (OwnerRules(active_within=60.0), "--pause-when-active: this system"),
        (OwnerRules(above=80.0), "--pause-above: cannot read"),
    ],
)
def test_rule_that_nothing_is_read_for_is_an_error(
    rules: OwnerRules, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_readings(rules, OwnerReadings(NOW))


def test_machine_without_a_battery_is_never_on_battery() -> None:
    check_readings(OwnerRules(on_battery=True), OwnerReadings(NOW))
    check_readings(OwnerRules(60.0, above=80.0), OwnerReadings(NOW, 0.0, celsius=50.0))


@pytest.mark.parametrize(
    ("percent", "reason", "lent", "event"),
    [
        (100, "", 100, WorkerEvent("resumed")),
        (50, "", 50, WorkerEvent("throttled")),
        (0, "", 0, WorkerEvent("paused")),
        (50, "on battery", 0, WorkerEvent("paused", "on battery")),
        (0, "on battery", 0, WorkerEvent("paused")),
    ],
)
def test_event_tells_what_is_lent(
    percent: int, reason: str, lent: int, event: WorkerEvent
) -> None:
    throttle = OwnerThrottle(percent)
    throttle.pause(reason)

    assert throttle_event(throttle) == (lent, event)


async def test_worker_starts_with_the_last_throttle_and_paused_by_its_rules(
    tmp_path: Path,
) -> None:
    ThrottleFile(tmp_path).write(25)
    meter = HealthMeter(lambda: ThermalReading(celsius=50.0))
    # A minute of a day that is neither today nor tomorrow.
    other = f"{DAYS[(datetime.now().weekday() + 3) % 7]} 12:00-12:01"

    stored = OwnerControl(JoinConfig(), tmp_path, meter)
    given = OwnerControl(JoinConfig(throttle=75, schedule=(other,)), tmp_path, meter)
    for each in (stored, given):
        await each.start()

    assert (stored.throttle.percent, stored.throttle.paused) == (25, False)
    assert given.throttle.percent == 75
    assert given.throttle.why_paused == "paused: outside of its schedule"
    assert len(stored.watches(lambda: None)) == 1
    assert len(given.watches(lambda: None)) == 2
