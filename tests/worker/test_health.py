"""Measurements of this machine."""

import psutil
import pytest

from shoal.domain.worker import ThermalLevel, WorkerLoad
from shoal.processes.thermal import ThermalReading
from shoal.worker.health import HealthMeter


def test_load_and_memory_are_percentages() -> None:
    health = HealthMeter().measure()

    assert health.cpu is not None
    assert 0 <= health.cpu <= 100
    assert health.memory is not None
    assert 0 < health.memory < 100
    assert health.jobs is None


def test_unavailable_measurements_are_omitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError("/proc/stat")

    monkeypatch.setattr(psutil, "cpu_percent", forbidden)
    monkeypatch.setattr(psutil, "virtual_memory", forbidden)

    health = HealthMeter().measure()

    assert (health.cpu, health.memory) == (None, None)


async def test_the_load_is_that_of_the_last_reading() -> None:
    readings = [
        ThermalReading(ThermalLevel.FAIR, "processor at 92 of 100 °C"),
        ThermalReading(ThermalLevel.SERIOUS, "processor at 98 of 100 °C"),
    ]
    meter = HealthMeter(lambda: readings.pop(0))
    assert meter.load() == WorkerLoad()

    await meter.read_sensors()
    assert meter.load() == WorkerLoad(speed=0.8, thermal=ThermalLevel.FAIR)
    assert meter.load(50).speed == 0.4

    await meter.read_sensors()
    hot = "too hot: processor at 98 of 100 °C"
    assert meter.load() == WorkerLoad(hot, thermal=ThermalLevel.SERIOUS)


def test_a_paused_machine_is_unfit() -> None:
    paused = HealthMeter().load(0)

    assert paused == WorkerLoad("paused by its owner", throttle=0)
