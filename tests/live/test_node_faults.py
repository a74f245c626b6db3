"""Two faults at a time in a pool of three nodes, with work of all kinds under way.

Each of the hub, its whole node, another node, the database and a worker is killed and
paused.  Then the promises of ``docs/promises.md`` hold: R1, R2, R7 and R8.
"""

import asyncio
import base64
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    suppress,
)
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import psycopg
import pytest
from aiohttp import ClientSession

from harness.postgres import PostgresServer
from live import checker, databases
from live.clients import Clients, History
from live.programs import (
    KEY,
    PATIENCE,
    PRICES,
    GatedModel,
    Programs,
    eventually,
    family,
    suspended,
)
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
STREAMS, STREAMS_EVERY = 15, 64  # over all nodes; the latter with ``--every``
SLOTS = ("--slots", "48")
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
SUMMING = """
import os, socket, struct, sys, time
mark, go = sys.argv[1] + os.environ["RANK"], sys.argv[1] + "go"
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
rank = int(os.environ["RANK"])
if rank == 0:
    with socket.create_server(place) as server:
        other = server.accept()[0]
else:
    while True:
        try:
            other = socket.create_connection(place)
            break
        except ConnectionRefusedError:
            pass
step = total = 0
while True:
    last = os.path.exists(go)
    other.sendall(struct.pack(">??", bool(rank), last))
    theirs, ends = struct.unpack(">??", other.recv(2, socket.MSG_WAITALL))
    step, total = step + 1, total + rank + theirs
    time.sleep(0.02)
    if step == 1:
        open(mark, "w").write(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if last or ends:
        break
with open(os.environ["SHOAL_OUTPUT"] + "/model", "w") as model:
    model.write(f"{total} in {step}")
"""
"""Two ranks that add up their numbers, in steps, until a file is there.

They take no core from what is tested.
"""
NODES = ("node", "standby", "third")  # as faults name them
TAKEN_OVER = {"kill hub", "pause hub", "kill node", "pause node"}
"""The faults after which another process has the pool."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pair" in metafunc.fixturenames:
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
        trainers = [
            self.third.pool.join(name, "--trust-code", "--slots", "1")
            for name in ("three", "four")
        ]
        other = self.third.pool.join("one", *model.flags, *SLOTS)
        self.worker = self.standby.pool.join("two", *model.flags, *SLOTS)
        for each in (other, self.worker, *trainers):
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
        with suspended(self.processes(what)) as processes:
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


class Run:
    """A training run with two ranks."""

    def __init__(self, node: Fronts, folder: Path) -> None:
        self._mark, self._out = folder / "rank", folder / "out"
        script = folder / "summing.py"
        script.write_text(SUMMING)
        words = ("train", "--nodes", "2", "--json", "--output", str(self._out))
        self._watching = subprocess.Popen(
            [sys.executable, "-m", "shoal", *words, str(script), str(self._mark)],
            env={**os.environ, "SHOAL_URL": node.pool.url, "SHOAL_API_KEY": KEY},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def has_begun(self) -> bool:
        marks = [Path(f"{self._mark}{rank}") for rank in range(2)]
        return all(each.exists() and each.read_text() for each in marks)

    def finish(self) -> None:
        """Let it end, and check that its ranks were never started again."""
        Path(f"{self._mark}go").touch()
        said, _ = self._watching.communicate(timeout=PATIENCE)
        assert self._watching.returncode == 0, said
        total, _, steps = (self._out / "model").read_text().split()
        assert total == steps != "0"
        for rank in range(2):
            assert Path(f"{self._mark}{rank}").read_text() == "0"

    def close(self) -> None:
        self._watching.kill()
        self._watching.communicate()


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


class Work:
    """Work of all kinds, which is under way at all nodes."""

    def __init__(self, cluster: Cluster, folder: Path, streams: int) -> None:
        self._cluster, self._folder = cluster, folder
        self._run = Run(cluster.third, folder)
        places = [cluster.nodes[number % 3] for number in range(streams)]
        self._readings = [Reading(each, "chat") for each in places]
        with cluster.third.pool.client() as client:
            self._batch = created(client, LINES)
        self._jobs = DurableJobs(cluster.third)
        eventually(
            lambda: (
                all(each.text for each in self._readings)
                and self._jobs.history.done
                and self._run.has_begun
            ),
            "all kinds of work have begun",
        )

    def check(self, faults: Collection[str]) -> None:
        """Let all of it end, and check it."""
        cluster, third = self._cluster, self._cluster.third
        for number in range(3):
            check_streams(self._readings[number::3], NODES[number], faults)
        self._run.finish()
        self._jobs.finish()
        with third.pool.client() as client:
            batch = ended(client, self._batch)
            assert batch.status == "completed", batch
            found = results(client, batch)
        assert sorted(found) == [f"c{number}" for number in range(LINES)]
        eventually(lambda: not cluster.open_jobs(), "all jobs have ended")
        check_database(cluster, self._jobs.history, self._folder)
        for node in cluster.nodes:
            assert "Traceback" not in node.pool.program.errors

    def close(self) -> None:
        self._run.close()


@pytest.fixture
def work(
    cluster: Cluster, tmp_path: Path, pytestconfig: pytest.Config
) -> Iterator[Work]:
    streams = STREAMS_EVERY if pytestconfig.getoption("--every") else STREAMS
    with closing(Work(cluster, tmp_path, streams)) as work:
        yield work


def test_work_outlives_two_faults(
    cluster: Cluster, model: GatedModel, work: Work, pair: tuple[str, str]
) -> None:
    third = cluster.third
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

    work.check(pair)


Held: TypeAlias = Callable[[str], AbstractContextManager[Callable[[], bool]]]


def test_work_outlives_a_pause_inside_a_commit(
    cluster: Cluster, model: GatedModel, work: Work, held: Held
) -> None:
    """Of the node that has the pool, until another has it."""
    before = cluster.holder()
    with ExitStack() as paused:
        with held(cluster.server.url()) as is_held:
            eventually(is_held, "a commit is under way")
            paused.enter_context(cluster.fault("pause", "node"))
        eventually(lambda: cluster.holder() not in ("", before), "another takes over")
    model.go_on.set()

    work.check(("pause node",))


@contextmanager
def writing(url: str) -> Iterator[Callable[[], bool]]:
    """Hold a commit up before it has written anything, for the length of the block."""
    with psycopg.connect(url) as connection:
        connection.execute("SELECT FROM writers WHERE name = 'hub' FOR UPDATE")
        yield lambda: waits(url, "wait_event_type = 'Lock'")


@contextmanager
def answering(url: str) -> Iterator[Callable[[], bool]]:
    """Let commits be made, and nobody learn it, for the length of the block."""
    with psycopg.connect(url, autocommit=True) as connection:
        try:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
            connection.execute("SELECT pg_reload_conf()")
            yield lambda: waits(url, "wait_event = 'SyncRep'")
        finally:
            connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
            connection.execute("SELECT pg_reload_conf()")


@pytest.fixture(params=[writing, answering], ids=["while it writes", "once it is made"])
def held(request: pytest.FixtureRequest) -> Held:
    found: Held = request.param
    return found


def waits(url: str, for_what: str) -> bool:
    """Return whether the session that writes waits for something."""
    query = f"SELECT FROM pg_stat_activity JOIN lease USING (pid) WHERE {for_what}"
    with psycopg.connect(url) as connection:
        return connection.execute(query).fetchone() is not None


def check_streams(
    readings: Sequence[Reading], node: str, faults: Collection[str]
) -> None:
    """Check that each stream of a node is whole, but where that was stopped."""
    for reading in readings:
        if f"kill {node}" in faults:
            reading.thread.join(PATIENCE)  # it was cut
        elif f"pause {node}" in faults:
            with suppress(AssertionError):  # an error event
                assert reading.end() == ANSWERS[STORY]
        else:
            assert reading.end() == ANSWERS[STORY]


def check_database(cluster: Cluster, history: History, folder: Path) -> None:
    """Check the promises R1, R2, R7 and R8."""
    url, data = cluster.server.url(), folder / "node1" / "data"
    log = cluster.third.ask("/v1/log")
    file = databases.copied_from_server(url, folder / "found.db")
    with databases.opened(file) as database:
        checker.check_shown(database, history)
        # The ranks are calls, which cost nothing.
        calls = "SELECT id FROM jobs WHERE kind = 'call'"
        database.execute(f"DELETE FROM facts WHERE job_id IN ({calls})")
        database.execute("DELETE FROM jobs WHERE kind = 'call'")
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
