"""What is measured of this very machine."""

import psutil
import pytest

from shoal.worker.health import Meter


def test_load_and_memory_are_shares_in_percent() -> None:
    health = Meter().measure()

    assert health.cpu is not None
    assert 0 <= health.cpu <= 100
    assert health.memory is not None
    assert 0 < health.memory < 100
    assert health.jobs is None


def test_what_the_system_does_not_tell_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError("/proc/stat")

    monkeypatch.setattr(psutil, "cpu_percent", forbidden)
    monkeypatch.setattr(psutil, "virtual_memory", forbidden)

    health = Meter().measure()

    assert (health.cpu, health.memory) == (None, None)
