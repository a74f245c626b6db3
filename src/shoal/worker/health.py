"""Measures this machine's load, and how hot it is."""

import asyncio
from collections.abc import Callable

import psutil

from shoal.domain.worker import THROTTLE_MAX, MachineHealth, WorkerLoad, machine_load
from shoal.processes.thermal import ThermalReading, read_thermal_level

THERMAL_INTERVAL = 10.0  # seconds between readings of the sensors


class HealthMeter:
    """Measures the machine; the processor load is that since the last measurement.

    psutil stores that time per process, so one meter is enough.

    Args:
        read: reads the sensors; it may block for seconds.
    """

    def __init__(self, read: Callable[[], ThermalReading] = read_thermal_level) -> None:
        self._read = read
        self._thermal = ThermalReading()
        self.measure()  # the first load covers no time

    async def watch(self) -> None:
        """Read the sensors periodically, until cancelled."""
        while True:
            await self.read_sensors()
            await asyncio.sleep(THERMAL_INTERVAL)

    async def read_sensors(self) -> None:
        """Read the sensors, for the loads that follow."""
        self._thermal = await asyncio.to_thread(self._read)

    def measure(self) -> MachineHealth:
        """Return the health; None for values that the system hides, as Android does."""
        try:
            cpu = psutil.cpu_percent(None)
        except OSError:
            cpu = None
        try:
            memory = psutil.virtual_memory().percent
        except OSError:
            memory = None
        return MachineHealth(cpu, memory, temperature=self._thermal.celsius)

    @property
    def celsius(self) -> float | None:
        """The highest temperature of the last reading; None: unknown."""
        return self._thermal.celsius

    def load(self, throttle: int = THROTTLE_MAX, paused: str = "") -> WorkerLoad:
        """Return the load by the last reading, and the owner's throttle in percent.

        ``paused`` is as in ``machine_load``.
        """
        sensor = self._thermal.sensor
        return machine_load(self._thermal.level, throttle, sensor=sensor, paused=paused)
