"""`make demo-cluster`: each answer ends whole, whatever is killed."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from live.programs import demonstrate
from shoal.engines.gguf_files import DEMO_PACKAGE

DEMO = Path(__file__).parents[2] / "scripts" / "demo_cluster.py"
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="nodes are tested on Linux"
)


@pytest.mark.skipif(
    find_spec(DEMO_PACKAGE) is None, reason="the demo's model is not installed"
)
def test_each_answer_ends_whole_and_the_books_balance() -> None:
    times, lines = zip(*demonstrate(DEMO), strict=True)

    assert [*times] == sorted(times)
    killed = [each for each in lines if "killed⟩" in each]
    assert killed == [
        "⟨the hub, a process of north, was killed⟩",
        "⟨PostgreSQL was killed⟩",
        "⟨the whole node north was killed⟩",
    ]
    assert len([each for each in lines if "is whole: " in each]) == 8
    assert re.fullmatch("(east|south) has the pool", lines[lines.index(killed[-1]) + 1])
    assert lines[-4] == "8 questions, and as many jobs, each done once"
    assert lines[-3].endswith("accounts, which sum to zero")
    assert lines[-2].endswith("no damage found")
