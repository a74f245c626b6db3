"""Programs that are started by a fork are as those of ``python -m``."""

import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from harness.fork_server import ForkedProcess, ForkServer, Process, started
from live.machines import two_machines

SHOWN = """
import json, os, signal, sys
print(json.dumps([
    __name__, sys.argv[1:], os.getcwd(), dict(os.environ), sys.path[:2],
    sys.modules["__main__"].__dict__ is globals(),
    str(signal.getsignal(signal.SIGCHLD)), len(os.listdir("/proc/self/fd")),
    os.readlink("/proc/self/ns/net"),
]), flush=True)
print("an error", file=sys.stderr, flush=True)
if sys.argv[1:]:
    sys.exit(int(sys.argv[1]))
signal.pause()
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it forks")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shown.py").write_text(SHOWN)
    return tmp_path


def run(folder: Path, environment: Mapping[str, str], *arguments: str) -> Process:
    with (folder / "errors").open("w") as errors:
        return started("shown", arguments, str(folder), environment, errors)


@pytest.mark.long
def test_program_runs_as_in_a_process_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as changed:
        changed.setenv("OTEL_SERVICE_NAME", "of the first test that needs a server")
        changed.setattr(sys, "executable", "/of/that/test")
        same = ForkServer()  # only for its rule
    with closing(same):
        assert same.can_run(os.environ)
        early = dict(os.environ) | {"PYTHONUTF8": "1"}
        assert not same.can_run(early)
    outputs = []
    for environment in (os.environ | {"SHOWN": "1"}, early | {"SHOWN": "1"}):
        environment = {**environment, "PYTHONPATH": str(folder / "more")}
        process = run(folder, environment, "3")
        assert process.stdout is not None
        with process.stdout as stdout:
            output = json.load(stdout)
        assert process.wait(60) == process.poll() == 3
        assert (folder / "errors").read_text() == "an error\n"
        assert output[3].pop("PYTHONUTF8", None) == environment.get("PYTHONUTF8")
        outputs.append(output)

    assert outputs[0] == outputs[1]
    assert outputs[0][:3] == ["__main__", ["3"], str(folder)]


@pytest.mark.long
def test_program_is_in_the_network_of_the_thread_that_starts_it(folder: Path) -> None:
    networks = []
    with two_machines() as machines:
        for machine in machines:
            with machine.inside():
                process = run(folder, dict(os.environ), "0")
                networks.append(os.readlink("/proc/thread-self/ns/net"))
            assert isinstance(process, ForkedProcess)
            with process.stdout as stdout:
                assert json.load(stdout)[-1] == networks[-1]
            assert process.wait(60) == 0
    networks.append(os.readlink("/proc/thread-self/ns/net"))

    assert len({*networks}) == 3


def test_program_that_is_killed_tells_the_signal(folder: Path) -> None:
    process = run(folder, dict(os.environ))
    assert process.stdout is not None
    with process.stdout as stdout:
        stdout.readline()
        assert process.poll() is None

        process.kill()

        assert process.wait(60) == -signal.SIGKILL
        process.terminate()  # of one that has ended
        assert not Path(f"/proc/{process.pid}").exists()
