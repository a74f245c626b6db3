"""The part of its speed that this machine lends to a run: by its heat and its owner."""

import threading
from collections.abc import Callable
from pathlib import Path

from shoal.config.throttle_file import ThrottleFile
from shoal.domain.worker import THROTTLE_MAX, machine_load
from shoal.processes.thermal import ThermalReading, read_thermal_level

READ_INTERVAL = 10.0  # seconds between readings of the sensors


class LentShare:
    """Reads the sensors now and then, in a thread, and the owner's file when asked.

    Args:
        data: the data folder, where ``shoal throttle`` writes.
        read: reads the sensors; it may block for seconds.
    """

    def __init__(
        self, data: Path, read: Callable[[], ThermalReading] = read_thermal_level
    ) -> None:
        self._throttle = ThrottleFile(data)
        self._read = read
        self._thermal = read()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def value(self) -> float:
        """From 0, if the machine is too hot or paused by its owner, to 1."""
        percent = self._throttle.read()
        throttle = THROTTLE_MAX if percent is None else percent
        load = machine_load(self._thermal.level, throttle)
        return 0.0 if load.unfit else load.speed

    def close(self) -> None:
        """End the thread, without waiting for a sensor."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(READ_INTERVAL):
            self._thermal = self._read()
