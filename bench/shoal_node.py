"""Workers of Shoal's own protocol: the real worker, many times in one process.

As a program: ``shoal_node.py PORTS COUNT [SECONDS [MODEL PACE]]`` has that many join
a pool at these ports, with commas between, prints a line when all have, and keeps them
connected.  Each does one chat at a time,
for so many seconds, with a word after each PACE seconds, or one at the end; and prints
a line with the time when it gets one, or one again that it still runs.
"""

import asyncio
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Sequence
from random import Random

from shoal.domain.outcome import Usage
from shoal.domain.vocabulary import Command, RunJob
from shoal.domain.work import JobKind, Work
from shoal.domain.worker import Offer, ServedModel
from shoal.engines.engine import Finished, Item
from shoal.ledger.keys import Signer
from shoal.protocols import discover
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.seam.session import Admitted
from shoal.transports import dialer
from shoal.transports.clock import LoopClock
from shoal.worker.agent import Agent, WorkerEvent
from shoal.worker.jobs import EngineSlots, only_model

JOINING_AT_ONCE = 50


class _Engine:
    """Answers with one word after the other, or with a single one after a while."""

    def __init__(self, seconds: float, pace: float) -> None:
        self._pace = pace or seconds
        self._words = round(seconds / pace) if pace else 1

    async def run(
        self, work: Work, continues: str = "", thoughts: str = ""
    ) -> AsyncIterator[Item]:
        for _ in range(self._words):
            await asyncio.sleep(self._pace)
            yield "word "
        yield Finished("stop", Usage(1, self._words))


class _Worker(Agent):
    """Prints when it gets a job."""

    def _receive(self, command: Command | Admitted) -> None:
        if isinstance(command, RunJob):
            print(json.dumps({"began": time.monotonic()}), flush=True)
        super()._receive(command)


async def _run(
    ports: Sequence[str],
    name: str,
    model: str,
    engine: _Engine,
    clock: LoopClock,
    joined: asyncio.Event,
) -> None:
    """Join and stay; set ``joined`` when that is done."""
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    signer = Signer.from_seed(secrets.token_bytes(32))
    kinds, models = frozenset({JobKind.CHAT}), frozenset({model})
    offers = (Offer(kinds, models, slots=1, public_key=signer.public_key.hex()),)
    profile = WorkerProfile(
        name,
        ServedModel(model),
        slots=1,
        token="t",
        addresses=tuple(urls[1:]),
        identity=signer,
        epoch=clock.wall() - clock.now(),
        offers=offers,
        random_bytes=secrets.token_bytes,
    )

    def report(event: WorkerEvent) -> None:
        # Others try again: what joining costs is limited.
        if event.kind == "joined":
            joined.set()

    agent = _Worker(
        discover()["shoal"].dial(urls[0], profile),
        dialer.dial,
        only_model(engine, EngineSlots(1)),
        clock,
        Random(),
        report,
        offers=offers,
    )
    await agent.run()


async def _stay(
    ports: Sequence[str],
    count: int,
    seconds: float = 0.0,
    model: str = "m",
    pace: float = 0.0,
) -> None:
    at_once = asyncio.Semaphore(JOINING_AT_ONCE)
    clock = LoopClock()

    async def join(number: int) -> None:
        joined = asyncio.Event()
        async with at_once:
            name = f"{os.getpid()}-{number}"
            engine = _Engine(seconds, pace)
            running.create_task(_run(ports, name, model, engine, clock, joined))
            await joined.wait()

    async with asyncio.TaskGroup() as running:
        await asyncio.gather(*map(join, range(count)))
        print(json.dumps({"joined": count}), flush=True)


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        ports, count, *more = sys.argv[1:]
        kinds = zip((float, str, float), more, strict=False)
        runner.run(
            _stay(ports.split(","), int(count), *(kind(it) for kind, it in kinds))
        )
