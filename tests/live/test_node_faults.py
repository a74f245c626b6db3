"""Two faults at a time in a pool of three nodes, with work of all kinds under way.

Each of the hub, its whole node, another node, the database and a worker is killed and
paused.  Then the promises of ``docs/promises.md`` hold: R1, R2, R7 and R8.
"""

import asyncio
import base64
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from aiohttp import ClientSession

from harness.postgres import PostgresServer
from live import checker, databases
from live.clients import Clients, History
from live.programs import KEY, PATIENCE, PRICES, GatedModel, Programs, eventually
from live.test_batches import created, ended, results
from live.test_fronts import Fronts, Reading
from live.test_nodes import Nodes, nodes, server
from models.tiny_answers import ANSWERS
from shoal.app.parts import HUB_NAME

__all__ = ["nodes", "server"]  # fixtures

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="finds processes in /proc"
)

STORY = "Tell me a story."
LINES = 8  # of the batch
CLIENTS = 3
SLOTS = ("--slots", "8")
QUESTIONS = {f"q{number}": "It is still under way." for number in range(LINES)}
"""Those of the batch, with answers for which the gate is closed, too."""

PAIRS = (
    ("kill hub", "kill database"),
    ("pause hub", "kill standby"),
    ("kill node", "pause worker"),
    ("pause node", "kill worker"),
    ("pause database", "pause standby"),
)
MORE_PAIRS = (
    ("kill hub", "kill worker"),
    ("kill hub", "pause standby"),
    ("kill node", "kill database"),
    ("pause node", "kill database"),
    ("kill node", "pause standby"),
    ("pause node", "kill standby"),
    ("pause database", "kill worker"),
    ("kill database", "kill standby"),
)
"""Those of ``--every``."""
TAKEN_OVER = {"kill hub", "pause hub", "kill node", "pause node"}
"""The faults after which another process has the pool."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("--every")
    pairs = (*PAIRS, *MORE_PAIRS) if every else PAIRS
    metafunc.parametrize("pair", pairs, ids=" and ".join)


class Cluster:
    """Three nodes, two workers, and what is to be killed."""

    def __init__(self, nodes: Nodes, server: PostgresServer, model: GatedModel) -> None:
        self.server = server
        self.first = nodes.first(*PRICES)
        self.standby, self.third = nodes.standbys(2, *PRICES)
        self.nodes = (self.first, self.standby, self.third)
        other = self.third.pool.join("one", *model.flags, *SLOTS)
        self.worker = self.standby.pool.join("two", *model.flags, *SLOTS)
        for each in (other, self.worker):
            each.event("joined")

    def processes(self, what: str) -> list[psutil.Process]:
        """Return those of a target, in the order in which they are stopped."""
        if what == "hub":
            return [psutil.Process(pid) for pid in self.first.pids(HUB_NAME)]
        if what == "database":
            return family(self.server.pid)
        programs = {
            "node": self.first.pool.program,
            "standby": self.standby.pool.program,
            "worker": self.worker,
        }
        return family(programs[what].process.pid)

    @contextmanager
    def fault(self, how: str, what: str) -> Iterator[None]:
        """Kill or pause something; what can come back does at the end of the block."""
        processes = self.processes(what)
        for each in processes:
            each.suspend()
        try:
            if how == "kill" and what == "database":
                self.server.kill()
            elif how == "kill":
                for each in processes:
                    each.kill()
            yield
        finally:
            if (how, what) == ("kill", "database"):
                self.server.start()
            for each in processes:
                with suppress(psutil.NoSuchProcess):
                    each.resume()

    def holder(self) -> str:
        """Return the process that has the pool, once other nodes can reach it."""
        query = "SELECT holder FROM lease WHERE secret <> ''"
        with psycopg.connect(self.server.url()) as connection:
            row = connection.execute(query).fetchone()
        return "" if row is None else str(row[0])

    def open_jobs(self) -> int:
        query = "SELECT count(*) FROM jobs WHERE ended_at IS NULL"
        with psycopg.connect(self.server.url()) as connection:
            ((count,),) = connection.execute(query).fetchall()
        return int(count)


def family(pid: int) -> list[psutil.Process]:
    """Return a process and its children; it is stopped first, as it starts others."""
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


class DurableJobs:
    """Clients of the job interface, in a thread."""

    def __init__(self, node: Fronts) -> None:
        self.history = History()
        self._url = node.pool.url
        self._calm = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def finish(self) -> None:
        """Let the clients come to an end with what they have begun."""
        self._calm.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            asyncio.run(self._work())
        except BaseException as error:
            self._error = error

    async def _work(self) -> None:
        calm = asyncio.Event()
        async with ClientSession() as session, asyncio.TaskGroup() as tasks:
            clients = Clients(session, self._url, KEY, "0", self.history)
            for number in range(CLIENTS):
                tasks.create_task(clients.work(f"client{number}", calm, job))
            await asyncio.to_thread(self._calm.wait)
            calm.set()


def job(key: str) -> dict[str, Any]:
    """Return a job that contains its key, to find it in the database."""
    payload = {"prompt": "ping", "model": "tiny", "max_tokens": 4, "key": key}
    return {"job_type": "LLM_INFER", "payload": payload, "user_id": "user"}


@pytest.fixture
def model() -> Iterator[GatedModel]:
    model = GatedModel(5, {**ANSWERS, **QUESTIONS})
    yield model
    model.close()


@pytest.fixture
def cluster(nodes: Nodes, server: PostgresServer, model: GatedModel) -> Cluster:
    return Cluster(nodes, server, model)


def test_work_outlives_two_faults(
    cluster: Cluster, model: GatedModel, pair: tuple[str, str], tmp_path: Path
) -> None:
    third = cluster.third
    readings = [Reading(each, "chat") for each in cluster.nodes]
    with third.pool.client() as client:
        batch = created(client, LINES)
    jobs = DurableJobs(third)
    eventually(
        lambda: all(each.text for each in readings) and jobs.history.done,
        "all kinds of work have begun",
    )
    before = cluster.holder()

    with ExitStack() as others:
        with ExitStack() as database:
            for each in pair:
                stack = database if "database" in each else others
                stack.enter_context(cluster.fault(*each.split()))
            if "kill database" in pair:
                log = third.pool.program
                missed = "standing by without the database"
                eventually(lambda: missed in log.errors, "it is missed")
            if "pause database" in pair:
                log = cluster.first.pool.program
                eventually(lambda: "slow store" in log.errors, "it is missed")
        if {*pair} & TAKEN_OVER:
            eventually(
                lambda: cluster.holder() not in ("", before), "another takes over"
            )
    model.go_on.set()

    check_streams(readings, pair)
    jobs.finish()
    with third.pool.client() as client:
        batch = ended(client, batch)
        assert batch.status == "completed", batch
        found = results(client, batch)
    assert sorted(found) == [f"c{number}" for number in range(LINES)]
    eventually(lambda: not cluster.open_jobs(), "all jobs have ended")
    check_database(cluster, jobs.history, tmp_path)
    for node in cluster.nodes:
        assert "Traceback" not in node.pool.program.errors


def check_streams(readings: Sequence[Reading], pair: tuple[str, str]) -> None:
    """Check that each stream is whole, but where its own node was stopped."""
    first, standby, third = readings
    for reading, node in ((first, "node"), (standby, "standby")):
        if f"kill {node}" in pair:
            reading.thread.join(PATIENCE)  # it was cut
        elif f"pause {node}" in pair:
            with suppress(AssertionError):  # an error event
                assert reading.end() == ANSWERS[STORY]
        else:
            assert reading.end() == ANSWERS[STORY]
    assert third.end() == ANSWERS[STORY]


def check_database(cluster: Cluster, history: History, folder: Path) -> None:
    """Check the promises R1, R2, R7 and R8."""
    url, data = cluster.server.url(), folder / "node1" / "data"
    log = cluster.third.ask("/v1/log")
    file = databases.copied_from_server(url, folder / "found.db")
    with databases.opened(file) as database:
        checker.check_shown(database, history)
        assert not checker.broken(database)
        key = bytes.fromhex(log["public_key"])
        assert list(checker.unsigned(database, key)) == []
        *_, root = log["checkpoint"].split("\n")[:3]
        assert base64.b64decode(root) == checker.root(database)
    programs = Programs(folder / "check")
    checked = programs.run("db", "check", "--store", url, "--data-dir", str(data))
    try:
        assert checked.wait() == 0, checked.errors
    finally:
        programs.close()
