"""The entry point of the commands."""

import gc
import subprocess
import sys

import pytest

from harness.speed import scaled
from shoal.cli.main import main

INTERRUPTED = """
import importlib.abc, os, signal, sys
from shoal.cli.main import main

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *rest):
        if name == "shoal.cli.version":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
raise SystemExit(main(["version"]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
def test_ctrl_c_during_an_import_is_silent() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )

    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_garbage_is_collected_once_a_command_is_imported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["version"]) == 0

    assert gc.isenabled()
    assert capsys.readouterr().out.startswith("shoal")
