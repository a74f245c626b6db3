"""Training loops in processes of their own."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.ports import free_port
from harness.speed import scaled

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_loop.py"
LIMIT = scaled(240.0)  # seconds


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_run_that_was_killed_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), str(free_port())],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    codes = re.findall(r"^(\w+) \[(.*)\]$", done.stdout, re.MULTILINE)
    assert codes == [
        ("undisturbed", "0, 0, 0"),
        ("killed", f"1, {-signal.SIGKILL}, 1"),
        ("killed", "0, 0, 0"),
    ]
    digests = re.findall(r"^rank \d step 17 digest (\w+)$", done.stdout, re.MULTILINE)
    assert len(digests) == 6
    assert len({*digests}) == 1
    folders = {each.name for each in (tmp_path / "killed").iterdir()}
    assert folders == {"step-00000010", "step-00000015", "step-00000017"}
