"""Measures this machine's load, and whether it is fit for work."""

import psutil

from shoal.domain.worker import MachineHealth, WorkerLoad

PROCESSOR_SENSORS = frozenset({"coretemp", "k10temp", "zenpower", "cpu_thermal"})
"""The drivers of sensors in processors; others have been seen to make things up."""


class HealthMeter:
    """Measures the machine; the processors' load is that since the last time.

    One is enough for a process: psutil remembers the last time itself.
    """

    def __init__(self) -> None:
        self.measure()  # for the first load is of no time at all

    def measure(self) -> MachineHealth:
        """Return the load; None for what the system does not tell, as Android."""
        try:
            cpu = psutil.cpu_percent(None)
        except OSError:
            cpu = None
        try:
            memory = psutil.virtual_memory().percent
        except OSError:
            memory = None
        return MachineHealth(cpu, memory)

    def condition(self) -> WorkerLoad:
        """Return whether the machine is fit for work, as far as it tells.

        Linux alone lets programs read how hot a processor is, and may be.
        """
        sensors = getattr(psutil, "sensors_temperatures", None)
        if sensors is None:
            return WorkerLoad()
        try:
            measured = sensors()
        except (OSError, ValueError):
            return WorkerLoad()  # a driver that gives no sense
        for driver in PROCESSOR_SENSORS & measured.keys():
            for each in measured[driver]:
                if each.critical and each.current >= each.critical:
                    return WorkerLoad(
                        unfit=f"the processor is at {each.current:.0f} °C"
                    )
        return WorkerLoad()
