"""Runs end with a model, or with the cause, whatever is killed or stopped."""

from pathlib import Path

import pytest

from live.train_siege import Fault, besieged

pytestmark = pytest.mark.long

FAULTS = (
    [Fault("rank", begun=False, delay=0.0, stop=0.0)],
    [Fault("worker", begun=True, delay=0.2, stop=0.0)],
    [
        Fault("coordinator", begun=True, delay=0.2, stop=0.0),
        Fault("rank", begun=True, delay=0.0, stop=3.0),
    ],
)


def test_runs_under_faults_end_with_a_model_or_the_cause(tmp_path: Path) -> None:
    with besieged(tmp_path, seed=1, seconds=3.0) as siege:
        endings = [siege.run(*each) for each in enumerate(FAULTS)]

    assert [each.fault for each in endings] == [""] * len(FAULTS), endings
    assert [each.status for each in endings[:2]] == [0, 0], endings
