"""What a machine lends to a run."""

from contextlib import closing
from pathlib import Path

import pytest

from shoal.config.throttle_file import ThrottleFile
from shoal.domain.worker import ThermalLevel
from shoal.processes.thermal import ThermalReading
from shoal.training.loop.train import LentShare


@pytest.mark.parametrize(
    ("level", "percent", "share"),
    [
        (ThermalLevel.NOMINAL, None, 1.0),
        (ThermalLevel.NOMINAL, 50, 0.5),
        (ThermalLevel.FAIR, 50, 0.4),
        (ThermalLevel.SERIOUS, 100, 0.0),
        (ThermalLevel.NOMINAL, 0, 0.0),
    ],
)
def test_a_machine_lends_less_when_it_is_hot_or_its_owner_says_so(
    tmp_path: Path, level: ThermalLevel, percent: int | None, share: float
) -> None:
    if percent is not None:
        ThrottleFile(tmp_path).write(percent)

    with closing(LentShare(tmp_path, lambda: ThermalReading(level))) as lent:
        found = lent.value

    assert found == pytest.approx(share)


def test_the_owner_may_change_it_at_any_time(tmp_path: Path) -> None:
    with closing(LentShare(tmp_path, ThermalReading)) as lent:
        before = lent.value
        ThrottleFile(tmp_path).write(25)

        assert (before, lent.value) == (1.0, 0.25)
