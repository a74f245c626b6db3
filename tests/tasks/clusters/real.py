"""Real clusters of Ray and of Dask on this machine, one each for all tests of a run."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
TASKS = Path(__file__).parents[1]
DEMO_FILE = str(TASKS / "demo_tasks.py")
TYPED_FILE = str(TASKS / "typed_tasks.py")


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


DASK = """
import sys
from distributed import LocalCluster

if __name__ == "__main__":
    with LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        dashboard_address=None,
        scheduler_port=int(sys.argv[1]),
    ) as it:
        print(it.scheduler_address, flush=True)
        sys.stdin.read()
"""


@pytest.fixture(scope="session")
def dask_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a cluster with two workers of one thread; yield its address."""
    with started_dask(tmp_path_factory.mktemp("dask")) as (address, _):
        yield address


@contextmanager
def started_dask(
    folder: Path, port: int = 0
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Start a cluster of Dask; yield its address, and what kills it."""
    folder.mkdir(exist_ok=True)
    script = folder / "cluster.py"
    script.write_text(DASK)
    cluster = subprocess.Popen(
        [sys.executable, script, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,
    )
    assert cluster.stdin is not None
    assert cluster.stdout is not None

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.killpg(cluster.pid, signal.SIGKILL)
        cluster.wait()  # its port is free

    try:
        address = cluster.stdout.readline().strip()
        assert address, "Dask did not start"
        yield address, kill
    finally:
        kill()
        cluster.stdin.close()
        cluster.stdout.close()
