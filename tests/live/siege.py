"""A coordinator with workers and clients, of whom one after the other is killed."""

import asyncio
import json
import socket
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from aiohttp import ClientSession, TCPConnector

from live import databases
from live.clients import Clients, History
from live.programs import KEY, TINY, Pool, Program, Programs

KILLS = 60
PAUSE = (0.1, 0.9)  # seconds between kills, from and to
COORDINATOR = 0.25  # the share of kills that hit the coordinator
STARTING = 0.25  # the share of its starts that are cut short
START = 1.0  # seconds that a start takes, at most about
ALIVE = 1.0  # seconds until a worker is worth killing
CLIENTS = 12
CHATS = 0.1  # the share of jobs that are for a model
END = 120.0  # seconds for what is open to end, when nobody is killed any more

FLAGS = ("--queue-max", "10000")
SIGNING = {f"plain{number}": () for number in range(3)} | {
    f"ours{number}": ("--slots", "4") for number in range(2)
}
"""Workers that are not Shoal's, by their seeds; some speak the extension."""
JOINING = ("dispatch", "grandsage")
"""The wires of those that are Shoal's."""


def free_port() -> int:
    """Return a port that stays free while nobody listens on it.

    Not one that the system gives to clients: whoever dials it while the coordinator is
    dead might be given that very one, and be connected with himself.
    """
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first = int(file.read().split()[0])
    for port in Random().sample(range(1024, first), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("a hundred ports are taken")


@dataclass(slots=True)
class Siege:
    """What is besieged, and what came of it.

    ``checkpoints`` has those that the coordinator had given out before it was killed,
    by size; ``unbalanced`` how far the accounts were from zero, wherever they were.
    """

    programs: Programs
    chance: Random
    port: int = field(default_factory=free_port)
    pool: Pool | None = None
    workers: dict[str, Program] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)
    killed: Counter[str] = field(default_factory=Counter)
    checkpoints: dict[int, str] = field(default_factory=dict)
    commits: int = 0
    unbalanced: list[int] = field(default_factory=list)
    lost_checkpoints: list[int] = field(default_factory=list)
    history: History = field(default_factory=History)

    @property
    def coordinator(self) -> Pool:
        assert self.pool is not None, "it is started first"
        return self.pool

    async def run(self, kills: int = KILLS) -> None:
        """Kill so many, at any moment, and then let all jobs come to their end."""
        self.pool = await asyncio.to_thread(
            self.programs.serve, *FLAGS, port=self.port
        )
        for name in [*SIGNING, *JOINING]:
            self._enlist(name)
        calm = asyncio.Event()
        # Each client has its own connections, as on a machine of its own.
        async with ClientSession(connector=TCPConnector(limit=0)) as session:
            seed = str(self.chance.random())
            clients = Clients(session, self.coordinator.url, KEY, seed)
            self.history = clients.history
            async with asyncio.TaskGroup() as tasks:
                for number in range(CLIENTS):
                    work = clients.work(f"client{number}", calm, self._job)
                    tasks.create_task(work)
                for _ in range(kills):
                    await asyncio.sleep(self.chance.uniform(*PAUSE))
                    await self._kill(clients)
                calm.set()
                async with asyncio.timeout(END):
                    await _all_ended(tasks)

    def _enlist(self, name: str) -> None:
        self.since[name] = time.monotonic()
        if name in SIGNING:
            worker = self.coordinator.signing(name, *SIGNING[name])
        else:
            identity = str(self.programs.folder / f"{name}.key")
            flags = ("--wire", name, "--model", f"tiny={TINY}", "--identity", identity)
            worker = self.coordinator.join(name, *flags)
        self.workers[name] = worker
