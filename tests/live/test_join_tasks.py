"""``shoal join --tasks`` as a process: functions, for real coordinators and clients."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from aiohttp import web

import shoal
from live.programs import (
    KEY,
    PATIENCE,
    TESTS,
    TINY,
    Pool,
    Program,
    Programs,
    eventually,
)
from live.test_moving import serving
from models.tiny_answers import ANSWERS
from originals.dispatch import OriginalCoordinator
from tasks.demo_tasks import (
    Point,
    add,
    crash,
    fail,
    leaves_child,
    nests,
    pid,
    queries,
)

LONG = "join-me-please"
FLAGS = ("--join-token", LONG)
FLEET = ("--macfleet-heartbeat-port", "0", "--macfleet-transport-port", "0")
DEMO = ("--tasks", "tasks.demo_tasks")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)


@pytest.fixture
def coordinator(programs: Programs) -> Pool:
    return programs.serve(*FLAGS, *FLEET)


@pytest.fixture
def client(coordinator: Pool) -> Iterator[shoal.Pool]:
    with shoal.Pool(coordinator.url, KEY) as pool:
        yield pool


def test_printed_command_joins_with_models_and_tasks_beside_a_fleets_token(
    programs: Programs,
) -> None:
    fleet = ("--macfleet-token", "of the fleet", "--macfleet-fleet", "lab")
    pool = programs.serve(*FLEET, *fleet)
    command = pool.ready["join"].split()[1:]

    worker = programs.run(*command, "--json", "--model", f"tiny={TINY}", *DEMO)

    joined = [worker.event("joined") for _ in range(2)]
    assert {each["model"] for each in joined if "model" in each} == {"tiny"}
    assert any("demo.add" in each.get("tasks", ()) for each in joined)
    with shoal.Pool(pool.url, KEY) as client:
        assert client.submit(add, 20, 22).result(PATIENCE) == 42


def test_functions_are_called_in_both_ways(
    coordinator: Pool, client: shoal.Pool
) -> None:
    tasks = (*DEMO, "--tasks", "tasks.typed_tasks")
    worker = coordinator.join("calls", *tasks, "--slots", "2", token=LONG)
    joined = worker.event("joined")

    assert {"demo.add", "mirror"} <= set(joined["tasks"])
    assert (joined["slots"], joined["trust_code"]) == (2, False)
    assert client.submit(add, 20, 22).result(PATIENCE) == 42
    assert client.submit("mirror", Point(1, 2)).result(PATIENCE) == Point(2, 1)
    assert client.submit("total", np.ones(200_000)).result(PATIENCE) == 200_000.0
    with pytest.raises(ValueError, match="zap"):
        client.submit(fail, "zap").result(PATIENCE)
    with shoal.Pool(coordinator.url, KEY, durable=False) as quick:
        assert [*quick.map(add, range(500))] == [*range(500)]


def test_calls_of_a_task_run_in_the_slot_that_it_lends(
    coordinator: Pool, client: shoal.Pool
) -> None:
    coordinator.join("calls", *DEMO, "--slots", "1", token=LONG).event("joined")

    assert client.submit(nests, 2).result(PATIENCE) == 7
    in_memory = client.with_options(durable=False)
    assert [*in_memory.map(nests, [1] * 3, timeout=PATIENCE)] == [3] * 3


def test_task_uses_the_models_of_the_pool_as_its_caller(
    coordinator: Pool, client: shoal.Pool
) -> None:
    coordinator.join("calls", *DEMO, "--slots", "1", token=LONG).event("joined")
    model = ("--model", f"tiny={TINY}")
    coordinator.join("models", *model, token=LONG).event("joined")
    with coordinator.client() as admin:
        made: Any = admin.post(
            f"{coordinator.url}/admin/keys", body={"name": "alice"}, cast_to=object
        )
    with shoal.Pool(coordinator.url, made["key"]) as alice:
        on_progress = alice.with_options(on_progress=lambda share, remark: None)
        for pool in (alice, on_progress, alice.with_options(durable=False)):
            answer, credential = pool.submit(queries, "tiny", "hi").result(PATIENCE)
            assert answer
            with pytest.raises(shoal.ShoalError, match="rejects the API key"):
                shoal.Pool(coordinator.url, credential).submit(add, 1).result(PATIENCE)
    jobs = coordinator.admin("jobs?owner=alice")["data"]
    assert [each["model"] for each in jobs].count("tiny") == 3


def test_crash_fails_the_call_and_not_the_worker(
    coordinator: Pool, client: shoal.Pool
) -> None:
    coordinator.join("calls", *DEMO, "--slots", "1", token=LONG).event("joined")

    with pytest.raises(shoal.TaskError, match="SIGSEGV"):
        client.submit(crash).result(PATIENCE)

    assert client.submit(add, 1).result(PATIENCE) == 1


def test_code_runs_only_where_it_is_trusted(
    coordinator: Pool, client: shoal.Pool
) -> None:
    coordinator.join("calls", *DEMO, "--slots", "1", token=LONG).event("joined")
    with pytest.raises(shoal.CodeRefused, match="--trust-code"):
        client.submit(lambda: 42).result(PATIENCE)

    trusting = coordinator.join("trusts", "--trust-code", "--slots", "1", token=LONG)

    assert trusting.event("joined")["trust_code"] is True
    assert client.submit(lambda: 42).result(PATIENCE) == 42


def test_models_and_functions_are_two_memberships(
    coordinator: Pool, client: shoal.Pool
) -> None:
    both = ("--model", f"tiny={TINY}", *DEMO, "--slots", "1")
    worker = coordinator.join("both", *both, token=LONG)
    said = [worker.event("joined"), worker.event("joined")]

    assert {each.get("model") for each in said} == {"tiny", None}
    assert client.submit(add, 1).result(PATIENCE) == 1
    assert worker.terminate() == 0


def test_processes_end_with_a_worker_that_is_killed(
    coordinator: Pool, client: shoal.Pool, tmp_path: Path
) -> None:
    worker = coordinator.join("calls", *DEMO, "--slots", "1", token=LONG)
    worker.event("joined")
    task, started = client.submit(pid).result(PATIENCE), tmp_path / "pid"
    call = client.submit(leaves_child, str(started))
    eventually(lambda: started.exists() and started.read_text(), "it has a child")
    child = int(started.read_text())
    assert _runs(child)

    worker.kill()

    eventually(lambda: not (_runs(task) or _runs(child)), "both end as well")
    call.cancel()


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tasks", "of_nobody"], "--tasks of_nobody: no such module"),
        (["--tasks", "none.py"], "no such file"),
        (["--tasks", "json"], "no task found"),
        ([*DEMO, "--slots", "5000"], "--slots 5000: at most 1024"),
    ],
)
def test_error_names_wrong_tasks(
    coordinator: Pool, arguments: list[str], said: str
) -> None:
    worker = coordinator.join("calls", *arguments, token=LONG)

    assert worker.wait() == 1
    assert said in worker.errors


def test_import_error_shows_only_its_cause(coordinator: Pool, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import shoal\n\n1 / 0\n")

    worker = coordinator.join("x", "--tasks", str(tmp_path / "broken.py"), token=LONG)

    assert worker.wait() == 1
    assert "ZeroDivisionError: division by zero" in worker.errors
    assert "broken.py" in worker.errors
    assert "importing.py" not in worker.errors
    assert "importlib" not in worker.errors


def test_coordinator_without_the_wire_is_an_error(programs: Programs) -> None:
    short = "short"  # for that wire
    coordinator = programs.serve("--join-token", short)
    worker = coordinator.join("x", *DEMO, "--wire", "macfleet", token=short)

    assert worker.wait() == 1
    assert "has no port for functions" in worker.errors


def test_wrong_token_ends_the_worker_with_a_hint(coordinator: Pool) -> None:
    worker = coordinator.join("x", *DEMO, "--slots", "1", token="not-the-token")

    assert "--token" in worker.event("refused")["reason"]
    assert worker.wait() == 1


def test_open_fleet_is_joined_without_a_token(programs: Programs) -> None:
    coordinator = programs.serve(*FLAGS, *FLEET, "--macfleet-open")
    trusting = ("--slots", "1", "--trust-code", "--wire", "macfleet")
    worker = coordinator.join("calls", *DEMO, *trusting, token="")

    assert first_of(worker) == "joined"
    with shoal.Pool(coordinator.url, KEY) as client:
        assert client.submit(add, 20, 22).result(PATIENCE) == 42
        # Nothing protects what is sent there.
        with pytest.raises(shoal.CodeRefused, match="--trust-code"):
            client.submit(lambda: 1).result(PATIENCE)


@pytest.mark.parametrize(
    ("wire", "worker_id"),
    [("auto", "shoal:machine"), ("macfleet", "macfleet:machine-worker")],
)
def test_worker_named_like_its_coordinator_joins(
    programs: Programs, wire: str, worker_id: str
) -> None:
    coordinator = programs.serve(*FLAGS, *FLEET, "--name", "machine")
    flags = ("--slots", "1", "--wire", wire)
    worker = coordinator.join("machine", *DEMO, *flags, token=LONG)

    assert first_of(worker) == "joined"
    eventually(lambda: coordinator.workers(), "it is a worker")
    assert [each["id"] for each in coordinator.workers()] == [worker_id]


def test_older_of_two_with_one_name_and_key_is_replaced(
    coordinator: Pool, client: shoal.Pool
) -> None:
    slot = (*DEMO, "--slots", "1")
    older = coordinator.join("twin", *slot, token=LONG)
    older.event("joined")
    newer = coordinator.join("twin", *slot, token=LONG)
    newer.event("joined")

    assert "--name" in older.event("left")["reason"]
    assert older.wait() == 1
    assert client.submit(add, 20, 22).result(PATIENCE) == 42
    assert len(coordinator.workers()) == 1


def test_second_machine_with_a_name_is_rejected(
    coordinator: Pool, client: shoal.Pool, tmp_path: Path
) -> None:
    slot = (*DEMO, "--slots", "1")
    coordinator.join("twin", *slot, token=LONG).event("joined")
    elsewhere = Programs(tmp_path / "elsewhere")
    try:
        second = elsewhere.run(
            *("join", coordinator.url, "--json", "--name", "twin", "--token", LONG),
            *slot,
        )

        assert "--name" in second.event("refused")["reason"]
        assert second.wait() == 1
        assert client.submit(add, 20, 22).result(PATIENCE) == 42
    finally:
        elsewhere.close()


def first_of(worker: Program) -> str:
    """Return a worker's first report."""
    event: str = json.loads(worker.line() or "{}")["event"]
    return event


@pytest.mark.parametrize(
    ("model", "capabilities"),
    [((), ["TASK"]), (("--model", f"tiny={TINY}"), ["LLM_INFER", "TASK"])],
)
async def test_coordinator_of_another_program_gets_tasks_of_ones_own(
    programs: Programs, model: tuple[str, ...], capabilities: list[str]
) -> None:
    coordinator, ended = OriginalCoordinator(), asyncio.Event()
    jobs: dict[str, tuple[str, dict[str, Any]]] = {
        "mine": ("TASK", {"task_type": "demo.echo", "input": "great"}),
        "sdk": ("TASK", {"job_type": "TASK", "task_type": "demo.echo", "input": "x"}),
        "unknown": ("TASK", {"task_type": "no.such", "input": "x"}),
        "chat": ("LLM_INFER", {"prompt": "ping"}),
    }

    async def handle(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        registration = json.loads((await socket.receive()).data)
        assert registration["capabilities"] == capabilities
        for text in coordinator.receive(json.dumps(registration)):
            await socket.send_str(text)
        for job_id, (kind, payload) in jobs.items():
            await socket.send_str(coordinator.assign(job_id, kind, payload))
        while len(coordinator.done) < len(jobs):
            for text in coordinator.receive((await socket.receive()).data):
                await socket.send_str(text)
        ended.set()
        return socket

    async with serving(handle) as address, asyncio.timeout(PATIENCE):
        flags = ("--wire", "dispatch", "--json", "--name", "desk", *DEMO, *model)
        programs.run("join", f"http://{address}", *flags)
        await ended.wait()

    outputs = {job_id: output for job_id, (output, _) in coordinator.done.items()}
    assert outputs["mine"] == [[], {"input": "great"}]
    assert outputs["sdk"] == [[], {"input": "x"}]
    assert "no.such" in outputs["unknown"]["error"]
    if model:
        assert outputs["chat"] == {"text": ANSWERS["ping"], "model": "tiny"}
    else:
        assert outputs["chat"]["error"].endswith("does not offer any model")
    assert all(verified for _, verified in coordinator.done.values())
    assert coordinator.forgotten == []
