"""One round of one engine: a function of no work, called again and again.

``python tasks_peer.py ENGINE``, run by bench/tasks.py in the engine's own environment;
it prints what it measured as a line of JSON.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import psutil

WARM = 300  # calls before anything is measured
SEQUENTIAL = 500  # calls, one after the other
IN_FLIGHT = 5_000  # calls at once
WORKERS = 2  # processes that run the function
HERE = Path(__file__).parent

Calls: TypeAlias = tuple[Callable[[int], Any], Callable[[int], list[Any]]]
"""One call and its result; and so many at once, and their results."""


@contextmanager
def ray() -> Iterator[Calls]:
    import ray

    ray.init(
        address="local",  # and not to a cluster that is there already
        num_cpus=WORKERS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    function = ray.remote(num_cpus=1)(same)
    yield (
        lambda x: ray.get(function.remote(x)),
        lambda count: ray.get([function.remote(x) for x in range(count)]),
    )
    ray.shutdown()


@contextmanager
def dask() -> Iterator[Calls]:
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=WORKERS, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        yield (
            lambda x: client.submit(same, x, pure=False).result(),
            lambda count: client.gather(client.map(same, range(count), pure=False)),
        )


def shoal(*, durable: bool) -> Callable[[], contextlib.AbstractContextManager[Calls]]:
    @contextmanager
    def run() -> Iterator[Calls]:
        import shoal

        with tempfile.TemporaryDirectory() as folder:
            quiet = ["--json", "--log-level", "warning"]
            keys = ["--api-key", "sk-bench", "--join-token", "bench-token"]
            ports = [
                "--macfleet-heartbeat-port",
                "0",
                "--macfleet-transport-port",
                "0",
            ]
            serve = ["serve", "--port", "0", "--data-dir", folder, *keys, *ports]
            with run_shoal(*serve, *quiet) as ready:
                tasks = ["--tasks", str(HERE / "tasks_same.py")]
                there = [ready["url"], "--token", "bench-token", "--name", "bench"]
                slots = ["--slots", str(WORKERS)]
                with (
                    run_shoal("join", *there, *tasks, *slots, *quiet),
                    shoal.Pool(
                        ready["url"], api_key="sk-bench", durable=durable
                    ) as pool,
                ):
                    yield (
                        lambda x: pool.submit("bench.same", x).result(),
                        lambda count: list(pool.map("bench.same", range(count))),
                    )

    return run


@contextmanager
def run_shoal(*arguments: str) -> Iterator[dict[str, Any]]:
    """Run ``shoal`` within the block; yield the first line that it prints."""
    command = [sys.executable, "-m", "shoal", *arguments]
    environment = os.environ | {"SHOAL_DATA_DIR": tempfile.gettempdir()}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            first: dict[str, Any] = json.loads(process.stdout.readline())
            yield first
        finally:
            process.terminate()


def same(x: int) -> int:
    return x


ENGINES: dict[str, Callable[[], contextlib.AbstractContextManager[Calls]]] = {
    "ray": ray,
    "dask": dask,
    "shoal": shoal(durable=False),
    "shoal durable": shoal(durable=True),
}


def main(engine: str) -> None:
    began = time.perf_counter()
    with ENGINES[engine]() as (call, many):
        assert call(1) == 1
        start = time.perf_counter() - began
        for x in range(WARM):
            call(x)
        many(WARM)
        took = []
        for x in range(SEQUENTIAL):
            at = time.perf_counter()
            assert call(x) == x
            took.append(time.perf_counter() - at)
        cpu, at = cpu_of_all(), time.perf_counter()
        assert many(IN_FLIGHT) == list(range(IN_FLIGHT))
        seconds, used = time.perf_counter() - at, cpu_of_all() - cpu
        memory = sum(memory_of(each) for each in tree())
    found = {
        "start": start,
        "sequential": statistics.median(took) * 1e3,
        "rate": IN_FLIGHT / seconds,
        "cpu": used / IN_FLIGHT * 1e6,
        "memory": memory / 1e6,
    }
    print(json.dumps(found))


def tree() -> list[psutil.Process]:
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def memory_of(process: psutil.Process) -> float:
    """Return what a process has to itself, with its share of what it shares."""
    with contextlib.suppress(psutil.Error):
        pss: float = process.memory_full_info().pss
        return pss
    return 0.0


def cpu_of_all() -> float:
    used = 0.0
    for process in tree():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            used += times.user + times.system
    return used


if __name__ == "__main__":
    main(sys.argv[1])
