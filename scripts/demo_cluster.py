"""Show a pool without a single point of failure, on this machine: `make demo-cluster`.

Starts PostgreSQL, three coordinators that share it, and four workers.  While answers
stream through every node, it kills the hub that has the pool, then the database, then
the whole node; each answer ends whole, and the books balance.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import openai
import psutil
import psycopg
from demo_parts import Answer, Clock, eventually, free_ports, listed
from local_postgres import LocalPostgres, folder_of_server

from shoal.app.parts import HUB_NAME
from shoal.cli.command_loop import Program, run_program
from shoal.cli.local.demo import DemoError
from shoal.client.coordinator import CoordinatorApi
from shoal.engines.gguf_files import DEMO_MODEL

NODES = ("north", "east", "south")
WORKERS = {"otter": 0, "beaver": 1, "heron": 2, "marten": 1}
"""The workers, and the nodes that they join."""
TOKEN, KEY = "demo-of-a-cluster", "sk-demo-of-a-cluster"
QUESTIONS = (
    "Why is the sea salty?  Explain it to a child.",
    "How do birds find their way?  Explain it to a child.",
    "Why do leaves turn red?  Explain it to a child.",
)
KILL_AFTER = 8  # pieces of each answer
DATABASE_AWAY = 1.5  # seconds
PRICES = ("--price-fast-inference", "0.01")


class Cluster:
    """The programs of the demonstration."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.asked = 0
        self._folder = folder
        self._clock = clock
        self._nodes: dict[str, Program] = {}
        self._workers: list[Program] = []
        self._ports: dict[int, str] = {}
        self._clients: dict[str, openai.OpenAI] = {}

    def start(self, stack: ExitStack) -> None:
        """Start all programs, which end with ``stack``."""
        clock = self._clock
        server = stack.enter_context(folder_of_server())
        *node_ports, port = free_ports(len(NODES) + 1)
        self.database = LocalPostgres(server, port)
        self.database.start()
        stack.callback(self.database.stop)
        clock.say(f"PostgreSQL runs at {self.database.url()}")

        def start_node(number: int) -> None:
            name = NODES[number]
            self._ports[node_ports[number]] = name
            serve = ["serve", "--port", "0", "--data-dir", str(self._folder / name)]
            serve += ["--store", self.database.url(), "--fronts", "1"]
            serve += ["--node", f"127.0.0.1:{node_ports[number]}", "--no-discovery"]
            serve += ["--join-token", TOKEN, "--api-key", KEY, *PRICES]
            node = stack.enter_context(run_program(name, serve, self._folder))
            self._nodes[name] = node
            url = node.report["url"]
            does = "has the pool" if node.report["event"] == "ready" else "stands by"
            clock.say(f"the node {name} serves {url}, and {does}")
            self._clients[name] = stack.enter_context(
                openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
            )

        def start_worker(name: str) -> None:
            node = NODES[WORKERS[name]]
            url = self._nodes[node].report["url"]
            join = ["join", url, "--token", TOKEN, "--engine", "embedded"]
            join += ["--model", DEMO_MODEL, "--slots", "2", "--name", name]
            join += ["--identity", str(self._folder / f"{name}.json")]
            worker = stack.enter_context(run_program(name, join, self._folder))
            self._workers.append(worker)
            self._model = worker.report["model"]
            clock.say(f"the worker {name} joined at {node}, with {self._model}")

        start_node(0)
        with ThreadPoolExecutor() as starting:
            list(starting.map(start_node, range(1, len(NODES))))
            list(starting.map(start_worker, WORKERS))
        stack.callback(self._stop)

    def _stop(self) -> None:
        """Let all programs stop at the same time."""
        for each in (*self._workers, *self._nodes.values()):
            each.process.terminate()

    def ask(self, nodes: Sequence[str]) -> list[Answer]:
        """Have an answer stream through each of the nodes."""
        pairs = zip(nodes, QUESTIONS, strict=False)
        answers = [
            Answer(self._clients[node], self._model, node, question)
            for node, question in pairs
        ]
        self.asked += len(answers)
        eventually(
            lambda: all(each.pieces >= KILL_AFTER for each in answers),
            "all answers have begun",
        )
        self._clock.say(f"answers stream through {listed(nodes)}")
        return answers

    def finish(self, answers: Sequence[Answer]) -> None:
        """Wait until all answers have ended, whole."""
        for each in answers:
            each.wait()
            self._clock.say(
                f"the answer through {each.node} is whole: {each.tokens} tokens, "
                f"the longest pause {each.longest_pause:.1f} s",
                "green",
            )

    def active(self) -> str:
        """Return the node that has the pool."""
        with psycopg.connect(self.database.url()) as connection:
            row = connection.execute("SELECT node FROM lease").fetchone()
        assert row is not None, "the table has one row"
        return self._ports[int(row[0].rpartition(":")[2])]

    def kill_hub(self) -> None:
        """Kill the process that has the pool."""
        name = self.active()
        hub = next(
            each
            for each in psutil.Process(self._nodes[name].process.pid).children()
            if each.name() == HUB_NAME
        )
        hub.kill()
        self._clock.say(f"⟨the hub, a process of {name}, was killed⟩", "red")

    def kill_database(self) -> None:
        """Kill the database, and start it again after a while."""
        self.database.kill()
        self._clock.say("⟨PostgreSQL was killed⟩", "red")
        time.sleep(DATABASE_AWAY)
        self.database.start()
        self._clock.say("PostgreSQL runs again")

    def kill_node(self, name: str) -> None:
        """Kill all processes of a node."""
        first = psutil.Process(self._nodes[name].process.pid)
        first.suspend()  # it starts no other
        for each in (*first.children(recursive=True), first):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self._clock.say(f"⟨the whole node {name} was killed⟩", "red")
        eventually(lambda: self.active() != name, "another node takes over")
        self._clock.say(f"{self.active()} has the pool")

    def check(self, node: str) -> None:
        """Check the jobs and the books.  Raises DemoError if they are wrong."""
        url = self._nodes[node].report["url"]
        api = CoordinatorApi(url, KEY, self._folder)
        jobs = api.request("/v1/jobs?limit=100")["jobs"]
        completed = [each for each in jobs if each["status"] == "completed"]
        if not len(jobs) == len(completed) == self.asked:
            raise DemoError(f"{len(completed)} of {len(jobs)} jobs are completed")
        self._clock.say(f"{self.asked} questions, and as many jobs, each done once")
        accounts = api.request("/admin/accounts")
        if accounts["total"]:
            raise DemoError(f"the accounts sum to {accounts['total']}")
        self._clock.say(f"{len(accounts['data'])} accounts, which sum to zero")
        flags = ["--store", self.database.url(), "--data-dir", str(self._folder / node)]
        done = subprocess.run(
            [sys.executable, "-m", "shoal", "db", "check", *flags],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise DemoError(f"shoal db check: {done.stdout}{done.stderr}")
        self._clock.say(f"shoal db check: {done.stdout.strip()}")


def main() -> int:
    clock = Clock()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-")))
        cluster = Cluster(folder, clock)
        cluster.start(stack)
        for kill in (cluster.kill_hub, cluster.kill_database):
            answers = cluster.ask(NODES)
            kill()
            cluster.finish(answers)
        # An answer through a node ends with it; its client asks another node again.
        lost = cluster.active()
        others = [each for each in NODES if each != lost]
        answers = cluster.ask(others)
        cluster.kill_node(lost)
        cluster.finish(answers)
        cluster.check(others[0])
        clock.say("No answer was lost, and no work was counted twice.", "green")
    return 0


if __name__ == "__main__":
    sys.exit(main())
