"""Reads how hot this machine is from its sensors.

Sources: the limits of Linux's processor sensors; NVIDIA's reasons for reduced clocks
(NVML API Reference, "NvmlClocksEventReasons"); the thermal pressure that macOS
publishes (``OSThermalNotification.h``).  Windows publishes nothing without
administrator rights, and some processors of AMD have no known limit: what cannot be
read does not count.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from shoal.domain.worker import ThermalLevel
from shoal.processes.programs import RunProgram, program_output

PROCESSOR_SENSORS = frozenset(
    {"coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "x86_pkg_temp"}
)
"""Drivers of processors' sensors; others report implausible values."""

LEVEL_BY_MARGIN: Sequence[tuple[float, ThermalLevel]] = (
    (0.0, ThermalLevel.CRITICAL),
    (3.0, ThermalLevel.SERIOUS),  # the processor slows itself down, or is about to
    (10.0, ThermalLevel.FAIR),
)
"""The level of a processor, by the degrees to its critical temperature."""

HARDWARE_SLOWDOWN = 0x40  # NVIDIA: the GPU halves its clocks, or worse
SOFTWARE_SLOWDOWN = 0x20  # NVIDIA: the driver lowers the clocks
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""NVIDIA's names for the reasons; drivers before 535 know only the second one."""

_GPU_READING = re.compile(r"\b(0x[0-9a-fA-F]{1,16})(?:, (\d{1,3})\b)?")

MAC_PRESSURE = "com.apple.system.thermalpressurelevel"
MAC_LEVELS = (
    ThermalLevel.NOMINAL,
    # "Moderate" and "heavy": Apple's ProcessInfo calls both of them fair.
    ThermalLevel.FAIR,
    ThermalLevel.FAIR,
    ThermalLevel.SERIOUS,  # "trapping"
    ThermalLevel.CRITICAL,  # "sleeping"
)
"""The level by the pressure's number; the names in quotes are those of the header."""


@dataclass(frozen=True, slots=True)
class ThermalReading:
    """A level, and the sensor that shows it, for people; empty: nothing is known.

    ``celsius`` is the highest temperature of a processor or GPU.
    """

    level: ThermalLevel = ThermalLevel.NOMINAL
    sensor: str = ""
    celsius: float | None = None


ReadSensors = Callable[[], Mapping[str, Sequence[Any]]]
"""Returns the temperature sensors by driver, as ``psutil.sensors_temperatures``."""


def read_sensors() -> Mapping[str, Sequence[Any]]:
    """Return the temperature sensors; psutil has them on Linux and FreeBSD only."""
    read: ReadSensors = getattr(psutil, "sensors_temperatures", dict)
    return read()


def read_thermal_level(
    system: str = sys.platform,
    run: RunProgram = program_output,
    sensors: ReadSensors = read_sensors,
) -> ThermalReading:
    """Return the reading of the hottest part.  Never raises; may take seconds.

    ``system`` is ``sys.platform``, and ``run`` runs a program of the machine.
    """
    readings = [*_gpus(run)]
    if system == "darwin":
        readings += _mac(run)
    else:
        readings += _processors(sensors)
    order = [*ThermalLevel]
    worst = max(
        readings, key=lambda each: order.index(each.level), default=ThermalReading()
    )
    measured = (each.celsius for each in readings if each.celsius is not None)
    return replace(worst, celsius=max(measured, default=None))


def _processors(sensors: ReadSensors) -> Iterable[ThermalReading]:
    try:
        measured = sensors()
    except (OSError, ValueError):
        return  # a faulty driver
    for driver in PROCESSOR_SENSORS & measured.keys():
        for each in measured[driver]:
            if not each.critical:
                yield ThermalReading(celsius=each.current)
            else:
                margin = each.critical - each.current
                level = next(
                    (level for limit, level in LEVEL_BY_MARGIN if margin <= limit),
                    ThermalLevel.NOMINAL,
                )
                text = f"processor at {each.current:.0f} of {each.critical:.0f} °C"
                yield ThermalReading(level, text, each.current)


def _gpus(run: RunProgram) -> Iterable[ThermalReading]:
    for field in REASONS:
        output = run(
            [
                "nvidia-smi",
                f"--query-gpu={field},temperature.gpu",
                "--format=csv,noheader,nounits",
            ]
        )
        found = _GPU_READING.findall(output)
        for reasons, degrees in found:
            celsius = float(degrees) if degrees else None
            if int(reasons, 16) & HARDWARE_SLOWDOWN:
                level, text = ThermalLevel.SERIOUS, "the GPU protects itself"
            elif int(reasons, 16) & SOFTWARE_SLOWDOWN:
                level, text = ThermalLevel.FAIR, "the GPU lowers its clocks"
            else:
                level, text = ThermalLevel.NOMINAL, ""
            yield ThermalReading(level, text, celsius)
        if found:
            return


def _mac(run: RunProgram) -> Iterable[ThermalReading]:
    found = re.search(
        rf"^{re.escape(MAC_PRESSURE)} (\d+)$",
        run(["notifyutil", "-g", MAC_PRESSURE]),
        re.MULTILINE,
    )
    if found is not None:
        level = MAC_LEVELS[min(int(found[1]), len(MAC_LEVELS) - 1)]
        yield ThermalReading(level, f"thermal pressure {found[1]}")
