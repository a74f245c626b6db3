"""Measurements of this machine."""

from types import SimpleNamespace

import psutil
import pytest

from shoal.domain.worker import WorkerLoad
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


@pytest.mark.parametrize(
    ("driver", "current", "critical", "unfit"),
    [
        ("coretemp", 101.0, 100.0, "the processor is at 101 °C"),
        ("coretemp", 99.0, 100.0, ""),
        ("k10temp", 99.0, None, ""),
        ("nvme", 99.0, 80.0, ""),
    ],
    ids=["too hot", "hot", "without a limit", "no processor"],
)
def test_machine_is_unfit_while_its_processor_overheats(
    driver: str,
    current: float,
    critical: float | None,
    unfit: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sensor = SimpleNamespace(label="", current=current, high=None, critical=critical)
    monkeypatch.setattr(
        psutil, "sensors_temperatures", lambda: {driver: [sensor]}, raising=False
    )

    assert HealthMeter().load() == WorkerLoad(unfit)


def test_missing_sensors_are_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(psutil, "sensors_temperatures", raising=False)

    assert HealthMeter().load() == WorkerLoad()
