"""``shoal join --engine ray`` and ``dask``: real clusters, in a real pool."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import shoal
from harness.ports import free_port
from live.programs import (
    KEY,
    PATIENCE,
    GatedModel,
    Pool,
    Program,
    Programs,
    answer_to,
    text_in,
)
from models.tiny_answers import ANSWERS
from tasks.clusters.real import DEMO_FILE, started_dask
from tasks.demo_tasks import add, adds, pid

LONG = "join-me-please"
PORTS = ("--macfleet-heartbeat-port", "0", "--macfleet-transport-port", "0")
QUESTION = next(iter(ANSWERS))


@pytest.fixture
def model() -> Iterator[GatedModel]:
    """A server in place of Ray Serve."""
    model = GatedModel(pause=0)
    model.go_on.set()
    yield model
    model.close()


@pytest.fixture
def coordinator(programs: Programs) -> Pool:
    return programs.serve("--join-token", LONG, *PORTS)


def test_cluster_runs_tasks_and_chats_and_reconnects(
    ray_cluster: str, coordinator: Pool, model: GatedModel
) -> None:
    worker = coordinator.join(
        *("ray", "--engine", "ray", "--ray-address", ray_cluster, *model.flags),
        *("--tasks", DEMO_FILE),
        token=LONG,
    )
    joined = [worker.event("joined") for _ in range(2)]

    (functions,) = [each for each in joined if "tasks" in each]
    (models,) = [each for each in joined if "model" in each]
    assert functions["slots"] == 2
    assert models["model"] == "tiny"
    with coordinator.client() as client, answer_to(client, QUESTION) as stream:
        assert "".join(text_in(stream)) == ANSWERS[QUESTION]
    with shoal.Pool(coordinator.url, KEY, durable=False) as quick:
        assert [*quick.map(add, range(500))] == [*range(500)]
    with shoal.Pool(coordinator.url, KEY) as pool:
        assert pool.submit(add, 20, 22).result(PATIENCE) == 42
        assert pool.submit(pid).result(PATIENCE) not in _family(worker)
        # Calls of a task's own, in memory and durable, as the caller of the task.
        assert pool.submit(adds, 20, 22).result(PATIENCE) == 42
        in_memory = pool.with_options(durable=False)
        assert in_memory.submit(adds, 1, 2).result(PATIENCE) == 3

        for process in _family(worker).values():
            if "shoal.tasks.on_ray.driver" in process.cmdline():
                process.kill()
        assert "the Ray cluster has ended" in worker.event("unavailable")["reason"]
        worker.event("available")
        worker.event("joined")

        assert pool.submit(add, 20, 22).result(PATIENCE) == 42
    assert worker.terminate() == 0


def test_dask_cluster_runs_tasks_and_the_worker_reconnects(
    coordinator: Pool, tmp_path: Path
) -> None:
    port = free_port()
    with started_dask(tmp_path / "first", port) as (address, kill):
        worker = coordinator.join(
            *("dask", "--engine", "dask", "--dask-address", address),
            *("--tasks", DEMO_FILE),
            token=LONG,
        )
        assert worker.event("joined")["slots"] == 2
        with shoal.Pool(coordinator.url, KEY, durable=False) as quick:
            assert [*quick.map(add, range(200))] == [*range(200)]
        with shoal.Pool(coordinator.url, KEY) as pool:
            assert pool.submit(add, 20, 22).result(PATIENCE) == 42
            assert pool.submit(pid).result(PATIENCE) not in _family(worker)
            assert pool.submit(adds, 20, 22).result(PATIENCE) == 42
            kill()
            assert "Dask cluster has ended" in worker.event("unavailable")["reason"]
            with started_dask(tmp_path / "second", port):
                worker.event("available")
                worker.event("joined")
                assert pool.submit(add, 20, 22).result(PATIENCE) == 42
                assert worker.terminate() == 0


def _family(worker: Program) -> dict[int, psutil.Process]:
    """Return a worker's processes on this side of the cluster, by number."""
    one = psutil.Process(worker.process.pid)
    return {each.pid: each for each in (one, *one.children())}
