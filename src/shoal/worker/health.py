"""How this machine is doing."""

import psutil

from shoal.domain.worker import Health


class Meter:
    """Measures the machine; the processors' load is that since the last time.

    One is enough for a process: psutil remembers the last time itself.
    """

    def __init__(self) -> None:
        self.measure()  # for the first load is of no time at all

    def measure(self) -> Health:
        """Return the load; None for what the system does not tell, as Android."""
        try:
            cpu = psutil.cpu_percent(None)
        except OSError:
            cpu = None
        try:
            memory = psutil.virtual_memory().percent
        except OSError:
            memory = None
        return Health(cpu, memory)
