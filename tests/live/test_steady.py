"""What ``docs/promises.md`` says of a coordinator that runs for long: it grows no more.

200 workers of all wires and 60 clients come and go, without and with a farewell, and a
flood of requests comes that cannot be answered.  Afterwards the coordinator holds what
it held after the first few seconds of that.  ``--minutes 30`` goes on for so long, and
prints how much memory it had meanwhile.
"""

import asyncio
import json
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from live.comers import Comers
from live.counted_coordinator import HELD, anonymous_memory
from live.programs import KEY, TOKEN, Pool, Programs, eventually
from shoal.calls.group import IDLE_MAX
from shoal.peers.peer_directory import PROFILES_MAX

WORKERS = 200
CLIENTS = 60
WARM_UP = 3.0  # seconds, after which everything has happened once
SHORT = 3.0  # seconds of coming and going by default
FLOOD = 500  # requests at once
FLAGS = (
    *("--macfleet-heartbeat-port", "0", "--macfleet-transport-port", "0"),
    *("--tealenet-open", "--relay-open"),  # TealeNet has no tokens
    *("--queue-wait", "2", "--log-level", "error"),
)
SAMPLE = 10.0  # seconds between looks at the memory
LOOKS = 5  # at what is held, that find the same
PAUSE = IDLE_MAX / (LOOKS - 1)  # seconds between them: idle streams of calls end

# Thousands come and go.  A metric that gets a new label, as for a kind of error, is 80
# objects.
OBJECTS_MORE = 400  # of one type
ENTRIES_MORE = 2000  # in all containers
THREADS_MORE = 2  # of the loop's pool: it starts one where two things coincide
# Bytes: of garbage that is not collected yet, and of pages that hold a single object.
MEMORY_MORE = 32 << 20
# What peers say about themselves is kept, of so many.
KEPT = {
    "shoal.protocols.seam.session.PeerProfile": PROFILES_MAX,
    "shoal.domain.worker.Hardware": PROFILES_MAX,
}
LIMITS = {
    "descriptors": 0,
    "threads": THREADS_MORE,
    "entries": ENTRIES_MORE + PROFILES_MAX,
    "memory": MEMORY_MORE,
}


@dataclass(frozen=True, slots=True)
class Held:
    """What a coordinator holds, as it tells."""

    descriptors: int
    threads: int
    memory: int  # bytes that belong to no file
    entries: int
    objects: Counter[str]

    def more_than(self, before: "Held") -> dict[str, int]:
        """Return how much more there is of what is clearly more than before."""
        more = self.objects - before.objects
        limits = {name: OBJECTS_MORE + KEPT.get(name, 0) for name in more}
        for name, limit in LIMITS.items():
            more[name] = getattr(self, name) - getattr(before, name)
            limits[name] = limit
        return {name: count for name, count in more.items() if count > limits[name]}


@pytest.fixture
def seconds(request: pytest.FixtureRequest) -> float:
    """How long workers and clients come and go."""
    minutes: float | None = request.config.getoption("--minutes")
    return SHORT if minutes is None else minutes * 60.0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux counts")
def test_coordinator_holds_no_more_after_many_have_come_and_gone(
    programs: Programs, seconds: float
) -> None:
    data = ("--data-dir", str(programs.data), "--api-key", KEY, "--join-token", TOKEN)
    program = programs.run(
        *("serve", "--json", "--port", "0", *data, *FLAGS),
        module="live.counted_coordinator",
    )
    pool = Pool(programs, program, program.event("ready"))
    lan = f"tcp://127.0.0.1:{pool.ready['ports']['tealenet']}"
    comers = Comers(pool.url, lan, KEY, TOKEN, Random(1))

    asyncio.run(_come_and_go(comers, pool, WARM_UP))
    before = _settled(pool)
    memory = asyncio.run(_come_and_go(comers, pool, seconds))
    looks: list[Held] = []

    def has_let_go() -> bool:
        looks.append(_held(pool))
        return not looks[-1].more_than(before)

    try:
        # The last connections close, and idle streams of calls end.
        eventually(has_let_go, "it holds what it held before")
    finally:
        print(_report(seconds, before, looks[-1], comers, memory))


async def _come_and_go(comers: Comers, pool: Pool, seconds: float) -> list[int]:
    """Have workers and clients come and go, then a flood; return samples of memory."""
    samples: list[int] = []

    async def sample() -> None:
        while True:
            await asyncio.sleep(SAMPLE)
            samples.append(anonymous_memory(str(pool.program.process.pid)))

    sampling = asyncio.create_task(sample())
    await comers.run(WORKERS, CLIENTS, seconds)
    await comers.flood(FLOOD)
    sampling.cancel()
    return samples


def _held(pool: Pool) -> Held:
    """Return what the coordinator holds once all have gone."""

    def calm() -> bool:
        status = pool.admin("status")
        return not (status["workers"] or any(status["jobs"].values()))

    eventually(calm, "all have gone")
    os.kill(pool.program.process.pid, HELD)
    told: dict[str, Any] = pool.program.event("counts")
    del told["event"]
    return Held(**(told | {"objects": Counter(told["objects"])}))


def _settled(pool: Pool) -> Held:
    """Return what the coordinator holds once its descriptors stay the same."""
    held, same = _held(pool), 0
    while same < LOOKS:
        time.sleep(PAUSE)
        now = _held(pool)
        same = same + 1 if now.descriptors == held.descriptors else 0
        held = now
    return held


def _report(
    seconds: float, before: Held, after: Held, comers: Comers, memory: list[int]
) -> str:
    """Return the figures of a run as one line of JSON; memory in MB."""
    quarters = [
        memory[i * len(memory) // 4 : (i + 1) * len(memory) // 4] for i in range(4)
    ]
    return json.dumps(
        {
            "seconds": seconds,
            "joined": comers.joined,
            "requests": comers.seen,
            "descriptors": [before.descriptors, after.descriptors],
            "threads": [before.threads, after.threads],
            "entries": [before.entries, after.entries],
            "objects": [before.objects.total(), after.objects.total()],
            "more": after.more_than(before),
            "objects_more": (after.objects - before.objects).most_common(8),
            "memory_mb": [round(each.memory / 1e6, 1) for each in (before, after)],
            "memory_mb_under_load_by_quarter": [
                round(sum(each) / len(each) / 1e6, 1) for each in quarters if each
            ],
        }
    )
