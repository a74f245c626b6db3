"""A coordinator with workers and clients, which are killed one by one."""

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import Request, urlopen

from aiohttp import ClientSession, TCPConnector

from harness.ports import free_port
from harness.speed import scaled
from live import checker
from live.clients import Clients, History
from live.programs import KEY, PRICES, TINY, Pool, Program, Programs, eventually

KILLS = 60
PAUSE = (0.1, 0.9)  # seconds between kills, from and to
COORDINATOR = 0.25  # the share of kills that hit the coordinator
STARTING = 0.25  # the share of its starts that are cut short
START = 1.0  # seconds that a start takes, at most about
AFTER = 0.05  # seconds between its last word and its end, at most
ALIVE = 1.0  # seconds until a worker is worth killing
CLIENTS = 12
USERS = 3
CHATS = 0.3  # the share of jobs that are for a model
END = scaled(60.0)  # seconds for what is open to end, when nobody is killed any more

FLAGS = ("--hedge-after", "0.004", *PRICES)  # some jobs have two workers at a time
SIGNING = [f"signing{number}" for number in range(5)]
"""Workers that are not Shoal's, by their seeds."""
FLAKY = str(Path(__file__).with_name("flaky_tasks.py"))
JOINING = {
    "signs": ("--wire", "shoal"),
    "fails": ("--wire", "shoal", "--tasks", FLAKY),
    "streams": ("--wire", "grandsage"),
}
"""Those that are Shoal's, and their wires."""


@dataclass(slots=True)
class Siege:
    """The processes under siege, and the findings.

    ``checkpoints`` has those that the coordinator had given out before it was killed,
    by size; ``found`` what was wrong with the databases that it left, of which
    ``commits`` were looked at.
    """

    programs: Programs
    chance: Random
    history: History = field(default_factory=History)
    killed: Counter[str] = field(default_factory=Counter)
    checkpoints: dict[int, str] = field(default_factory=dict)
    commits: int = 0
    found: list[str] = field(default_factory=list)
    _pool: Pool | None = None
    _workers: dict[str, Program] = field(default_factory=dict)
    _since: dict[str, float] = field(default_factory=dict)

    @property
    def pool(self) -> Pool:
        """The running coordinator."""
        assert self._pool is not None, "it is started first"
        return self._pool

    async def run(self, kills: int = KILLS) -> None:
        """Kill processes at random moments, then let all jobs end."""
        self._pool = await asyncio.to_thread(self._serve, free_port())
        for name in (*SIGNING, *JOINING):
            self._enlist(name)
        for worker in self._workers.values():
            await asyncio.to_thread(worker.event, "joined")
        calm = asyncio.Event()
        async with (
            ClientSession(connector=TCPConnector(limit=0)) as session,
            asyncio.timeout(None) as limit,
            asyncio.TaskGroup() as tasks,
        ):
            seed = str(self.chance.random())
            clients = Clients(session, self.pool.url, KEY, seed, self.history)
            for number in range(CLIENTS):
                work = clients.work(f"client{number}", calm, self._job)
                tasks.create_task(work)
            while self.killed.total() < kills:
                await asyncio.sleep(self.chance.uniform(*PAUSE))
                if self.chance.random() < COORDINATOR:
                    await self._kill_coordinator(clients)
                else:
                    self._kill_worker()
            calm.set()
            limit.reschedule(asyncio.get_running_loop().time() + END)
        await asyncio.to_thread(self._send_home)

    def _job(self, key: str) -> dict[str, Any]:
        """Return a job that contains its key, to find it in the database."""
        payload: dict[str, Any] = {"task_type": "echo", "input": key, "key": key}
        if chat := self.chance.random() < CHATS:
            payload = {"prompt": "ping", "model": "tiny", "max_tokens": 4, "key": key}
        job_type = "LLM_INFER" if chat else "TASK"
        user = f"u{self.chance.randrange(USERS)}"
        return {"job_type": job_type, "payload": payload, "user_id": user}

    def _enlist(self, name: str) -> None:
        self._since[name] = time.monotonic()
        if name in SIGNING:
            worker = self.pool.signing(name)
        else:
            identity = str(self.programs.folder / f"{name}.key")
            flags = (*JOINING[name], "--identity", identity)
            worker = self.pool.join(name, *flags, "--model", f"tiny={TINY}")
        self._workers[name] = worker

    def _send_home(self) -> None:
        """End the workers: what they would still present must not come while one looks.

        What they said last is in the store when something is that was said after it.
        """
        for worker in self._workers.values():
            worker.kill()
        eventually(lambda: not self.pool.workers(), "the workers are gone")
        budget = Request(
            f"{self.pool.url}/admin/accounts/nobody/budget",
            b'{"budget": null}',
            {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
            method="PUT",
        )
        with urlopen(budget, timeout=END):
            pass

    def _kill_worker(self) -> None:
        grown = time.monotonic() - ALIVE
        worthy = [name for name, since in self._since.items() if since < grown]
        if worthy:
            name = self.chance.choice(worthy)
            self._workers[name].kill()
            self.killed["worker"] += 1
            self._enlist(name)

    async def _kill_coordinator(self, clients: Clients) -> None:
        _, said = await clients.request("GET", "/v1/log")
        log = json.loads(said)
        if log["size"]:
            self.checkpoints[log["size"]] = log["checkpoint"]
        await asyncio.sleep(self.chance.uniform(0, AFTER))
        self.pool.program.kill()
        self.killed["coordinator"] += 1
        await asyncio.to_thread(self._inspect)
        while self.chance.random() < STARTING:
            program = self.programs.start(*FLAGS, port=self.pool.port)
            await asyncio.sleep(self.chance.uniform(0, START))
            program.kill()
            self.killed["coordinator that starts"] += 1
            await asyncio.to_thread(self._inspect)
        self._pool = await asyncio.to_thread(self._serve, self.pool.port)

    def _serve(self, port: int) -> Pool:
        return self.programs.serve(*FLAGS, port=port)

    def _inspect(self) -> None:
        """Check the database of a killed coordinator."""
        commits, found = checker.inspect(self.programs.data, self.checkpoints)
        self.commits += commits
        self.found += found
