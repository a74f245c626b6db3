"""The heat of a machine, from what its sensors and programs say."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from shoal.domain.worker import ThermalLevel
from shoal.processes.thermal import ThermalReading, read_thermal_level

NOMINAL, FAIR, SERIOUS, CRITICAL = ThermalLevel


def nothing(command: Sequence[str]) -> str:
    """Answer like a machine without the program."""
    return ""


def sensor(current: float, critical: float | None) -> SimpleNamespace:
    return SimpleNamespace(label="", current=current, high=None, critical=critical)


@pytest.mark.parametrize(
    ("current", "level"),
    [
        (60.0, NOMINAL),
        (89.9, NOMINAL),
        (90.0, FAIR),
        (97.0, SERIOUS),
        (100.0, CRITICAL),
        (105.0, CRITICAL),
    ],
)
def test_a_processor_is_hot_near_its_critical_temperature(
    current: float, level: ThermalLevel
) -> None:
    found = {"coretemp": [sensor(40.0, 100.0), sensor(current, 100.0)]}

    reading = read_thermal_level("linux", nothing, lambda: found)

    assert reading.level is level
    assert reading.celsius == current
    if level is not NOMINAL:
        assert reading.sensor == f"processor at {current:.0f} of 100 °C"


@pytest.mark.parametrize("driver", ["nvme", "acpitz"])
def test_sensors_of_no_processor_do_not_count(driver: str) -> None:
    found = {driver: [sensor(99.0, 80.0)]}

    assert read_thermal_level("linux", nothing, lambda: found) == ThermalReading()


def test_a_processor_without_a_limit_has_a_temperature_and_no_level() -> None:
    found = {"k10temp": [sensor(99.0, None)]}

    reading = read_thermal_level("linux", nothing, lambda: found)

    assert reading == ThermalReading(celsius=99.0)


@pytest.mark.parametrize("error", [OSError("no such device"), ValueError("NaN")])
def test_a_faulty_driver_does_not_count(error: Exception) -> None:
    def broken() -> dict[str, Sequence[object]]:
        raise error

    assert read_thermal_level("linux", nothing, broken) == ThermalReading()


@pytest.mark.parametrize(
    ("reasons", "level", "celsius"),
    [
        ("0x0000000000000001, 31\n", NOMINAL, 31),  # idle
        ("0x0000000000000004, 70\n", NOMINAL, 70),  # the power limit
        ("0x0000000000000024, 85\n", FAIR, 85),
        ("0x0000000000000000, 60\n0x0000000000000048, 91\n", SERIOUS, 91),
        ("0x0000000000000024, [N/A]\n", FAIR, None),
        ("[N/A], [N/A]\n", NOMINAL, None),
    ],
)
@pytest.mark.parametrize("prefix", ["clocks_event_reasons", "clocks_throttle_reasons"])
def test_a_gpu_that_lowers_its_clocks_is_hot(
    prefix: str, reasons: str, level: ThermalLevel, celsius: float | None
) -> None:
    def run(command: Sequence[str]) -> str:
        # Drivers refuse a field that they do not know.
        query = f"--query-gpu={prefix}.active,temperature.gpu"
        return reasons if query in command else ""

    for system in ("linux", "win32"):
        reading = read_thermal_level(system, run, dict)
        assert (reading.level, reading.celsius) == (level, celsius)


@pytest.mark.parametrize(
    ("output", "level"),
    [
        ("com.apple.system.thermalpressurelevel 0\n", NOMINAL),
        ("com.apple.system.thermalpressurelevel 1\n", FAIR),
        ("com.apple.system.thermalpressurelevel 2\n", FAIR),
        ("com.apple.system.thermalpressurelevel 3\n", SERIOUS),
        ("com.apple.system.thermalpressurelevel 4\n", CRITICAL),
        ("com.apple.system.thermalpressurelevel 50\n", CRITICAL),
        ("", NOMINAL),
        ("com.apple.system.thermalpressurelevel: failed\n", NOMINAL),
    ],
)
def test_a_mac_tells_its_thermal_pressure(output: str, level: ThermalLevel) -> None:
    def run(command: Sequence[str]) -> str:
        return output if command[0] == "notifyutil" else ""

    assert read_thermal_level("darwin", run).level is level


def test_this_machine_can_be_read() -> None:
    assert read_thermal_level().level in ThermalLevel
