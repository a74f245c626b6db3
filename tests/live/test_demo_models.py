"""`make demo-models`: a model is loaded, copied, and outlives its first machine."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from live.programs import demonstrate
from shoal.engines.gguf_files import DEMO_PACKAGE

DEMO = Path(__file__).parents[2] / "scripts" / "demo_models.py"


@pytest.mark.skipif(
    find_spec(DEMO_PACKAGE) is None, reason="the demo's model is not installed"
)
def test_each_answer_ends_whole_though_the_first_machine_is_lost() -> None:
    lines = [line for _, line in demonstrate(DEMO)]

    assert lines[4:6] == [
        "a chat asks for storyteller, which is loaded nowhere",
        "storyteller is loaded on otter",
    ]
    assert "beaver copied 98 MB from otter, and loaded the model" in lines
    after = lines[lines.index("⟨otter was killed⟩") + 1 :]
    assert [each.partition(":")[0] for each in after[:2]] == ["an answer is whole"] * 2
