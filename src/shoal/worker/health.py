"""Measures this machine's load, and whether it is fit for work."""

import psutil

from shoal.domain.worker import MachineHealth, WorkerLoad

PROCESSOR_SENSORS = frozenset({"coretemp", "k10temp", "zenpower", "cpu_thermal"})
"""Drivers of processors' sensors; others report implausible values."""


class HealthMeter:
    """Measures the machine; the processor load is that since the last measurement.

    psutil stores that time per process, so one meter is enough.
    """

    def __init__(self) -> None:
        self.measure()  # the first load covers no time

    def measure(self) -> MachineHealth:
        """Return the load; None for values that the system hides, as Android does."""
        try:
            cpu = psutil.cpu_percent(None)
        except OSError:
            cpu = None
        try:
            memory = psutil.virtual_memory().percent
        except OSError:
            memory = None
        return MachineHealth(cpu, memory)

    def load(self) -> WorkerLoad:
        """Return whether the machine is fit for work.

        Only Linux reports the temperature of a processor and its limit.
        """
        sensors = getattr(psutil, "sensors_temperatures", None)
        if sensors is None:
            return WorkerLoad()
        try:
            measured = sensors()
        except (OSError, ValueError):
            return WorkerLoad()  # a faulty driver
        for driver in PROCESSOR_SENSORS & measured.keys():
            for each in measured[driver]:
                if each.critical and each.current >= each.critical:
                    return WorkerLoad(
                        unfit=f"the processor is at {each.current:.0f} °C"
                    )
        return WorkerLoad()
