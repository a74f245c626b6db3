"""When a worker pauses for the sake of its machine's owner."""

from dataclasses import replace
from datetime import datetime

from hypothesis import given
from hypothesis import strategies as st

from shoal.config.schedule import parse_window
from shoal.worker.owner_throttle import (
    ACTIVE,
    COOLER,
    HOLD,
    ON_BATTERY,
    OUT_OF_SCHEDULE,
    OwnerPause,
    OwnerReadings,
    OwnerRules,
)

NOON = datetime(2026, 1, 5, 12)  # a Monday
CALM = OwnerReadings(NOON)
NIGHT = parse_window("22:00-07:00")


def reasons(rules: OwnerRules, *readings: tuple[float, OwnerReadings]) -> list[str]:
    """Return the reasons after readings, each at its time in seconds."""
    pause = OwnerPause(rules)
    return [pause.update(each, at) for at, each in readings]


def test_without_rules_nothing_pauses() -> None:
    alarming = OwnerReadings(NOON, 0.0, on_battery=True, celsius=120.0)

    assert reasons(OwnerRules(), (0, alarming), (99, alarming)) == ["", ""]


def test_activity_pauses_until_it_is_long_ago() -> None:
    idle = [(at, replace(CALM, idle=float(at))) for at in (0, 59, 60, 61)]
    again = (62.0, replace(CALM, idle=0.5))

    seen = reasons(OwnerRules(active_within=60.0), *idle, again)

    assert seen == [ACTIVE, ACTIVE, "", "", ACTIVE]


def test_battery_pauses_at_once_and_a_loose_plug_does_not_resume() -> None:
    on, off = replace(CALM, on_battery=True), replace(CALM, on_battery=False)

    seen = reasons(
        OwnerRules(on_battery=True),
        *((0, off), (5, on), (10, off), (15, on), (20, off)),
        *((20 + HOLD - 1, off), (20 + HOLD, off)),
    )

    assert seen == ["", *[ON_BATTERY] * 5, ""]


def test_heat_pauses_after_two_readings_until_it_was_cool_for_a_while() -> None:
    def at(celsius: float | None) -> OwnerReadings:
        return replace(CALM, celsius=celsius)

    hot = "hotter than 80 °C"
    seen = reasons(
        OwnerRules(above=80.0),
        *((0, at(95)), (5, at(60)), (10, at(95)), (15, at(80))),  # a peak does not
        *((20, at(79)), (20 + HOLD, at(76))),  # nearly as hot
        *((100, at(80 - COOLER)), (99 + HOLD, at(70)), (100 + HOLD, at(None))),
    )

    assert seen == ["", "", "", *[hot] * 5, ""]


def test_schedule_pauses_outside_of_its_windows() -> None:
    late, early = NOON.replace(hour=22), NOON.replace(hour=7)

    seen = reasons(
        OwnerRules(schedule=(NIGHT,)),
        *((0, CALM), (1, OwnerReadings(late)), (2, OwnerReadings(early))),
    )

    assert seen == [OUT_OF_SCHEDULE, "", OUT_OF_SCHEDULE]


def test_reason_that_lasts_longest_comes_first() -> None:
    every = OwnerRules(60.0, on_battery=True, above=80.0, schedule=(NIGHT,))
    readings = OwnerReadings(NOON, 0.0, on_battery=True, celsius=99.0)
    pause = OwnerPause(every)

    assert pause.update(readings, 0) == OUT_OF_SCHEDULE
    night = replace(readings, local=NOON.replace(hour=23))
    assert pause.update(night, 5) == ON_BATTERY
    powered = replace(night, on_battery=False)
    assert pause.update(powered, 10) == ON_BATTERY
    assert pause.update(powered, 10 + HOLD) == "hotter than 80 °C"


def test_order_ends_a_pause_until_the_rules_ask_for_another() -> None:
    active, idle = replace(CALM, idle=1.0), replace(CALM, idle=99.0)
    pause = OwnerPause(OwnerRules(active_within=60.0))
    assert pause.update(active, 0) == ACTIVE

    pause.override()

    assert pause.reason == ""
    assert pause.update(active, 5) == ""
    assert pause.update(idle, 100) == ""
    assert pause.update(active, 200) == ACTIVE


def test_order_before_a_pause_does_not_prevent_it() -> None:
    pause = OwnerPause(OwnerRules(active_within=60.0))
    pause.override()

    assert pause.update(replace(CALM, idle=1.0), 0) == ACTIVE


@given(
    st.lists(st.tuples(st.booleans(), st.floats(20, 120)), max_size=60),
    st.integers(1, 30),
)
def test_pause_for_the_machines_sake_lasts_for_a_while(
    readings: list[tuple[bool, float]], step: int
) -> None:
    """Whatever is read, the worker does not come and go within ``HOLD``."""
    pause = OwnerPause(OwnerRules(on_battery=True, above=80.0))
    began: float | None = None
    for number, (plugged, celsius) in enumerate(readings):
        now = float(number * step)
        read = replace(CALM, on_battery=not plugged, celsius=celsius)
        paused = bool(pause.update(read, now))
        if began is not None and not paused:
            assert now - began >= HOLD
        began = (now if began is None else began) if paused else None
