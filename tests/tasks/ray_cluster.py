"""One real Ray cluster, of this machine, for all tests of a run."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

START = (
    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
    *("--port=0", "--num-cpus=2", "--node-ip-address=127.0.0.1"),
    *("--include-dashboard=false", "--disable-usage-stats"),
)
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Its own secret, so that none is put into the home of whoever runs the tests.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
}
DEMO_FILE = str(Path(__file__).with_name("demo_tasks.py"))
TYPED_FILE = str(Path(__file__).with_name("typed_tasks.py"))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """Start a cluster with two processors; yield its address."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        cluster = subprocess.Popen(
            START,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert cluster.stdout is not None
        try:
            output = ""
            for line in cluster.stdout:
                output += line
                if found := re.search(r"--address='([^']+)'", line):
                    break
            else:
                raise AssertionError(f"Ray did not start:\n{output}")
            yield found[1]
        finally:
            os.killpg(cluster.pid, signal.SIGKILL)  # it takes its time otherwise
            cluster.stdout.read()
            cluster.wait()
            cluster.stdout.close()
