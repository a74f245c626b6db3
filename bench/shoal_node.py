"""Workers of Shoal's own protocol that have nothing to do: the real worker, many times.

As a program: ``shoal_node.py PORT COUNT`` has that many join, prints a line when all
have, and keeps them connected.
"""

import asyncio
import json
import os
import secrets
import sys
from random import Random

from shoal.domain.work import JobKind
from shoal.domain.worker import Offer, ServedModel
from shoal.ledger.keys import Signer
from shoal.protocols import discover
from shoal.protocols.seam.context import WorkerProfile
from shoal.transports import dialer
from shoal.transports.clock import LoopClock
from shoal.worker.agent import Agent, WorkerEvent

JOINING_AT_ONCE = 50


async def _run(port: int, name: str, clock: LoopClock, joined: asyncio.Event) -> None:
    """Join and stay; set ``joined`` when that is done."""
    offers = (Offer(frozenset({JobKind.CHAT}), frozenset({"m"}), slots=1),)
    profile = WorkerProfile(
        name,
        ServedModel("m"),
        slots=1,
        token="t",
        identity=Signer.from_seed(secrets.token_bytes(32)),
        epoch=clock.wall() - clock.now(),
        offers=offers,
        random_bytes=secrets.token_bytes,
    )

    def report(event: WorkerEvent) -> None:
        # Others try again: what joining costs is limited.
        if event.kind == "joined":
            joined.set()

    agent = Agent(
        discover()["shoal"].dial(f"http://127.0.0.1:{port}", profile),
        dialer.dial,
        lambda run: None,
        clock,
        Random(),
        report,
        offers=offers,
    )
    await agent.run()


async def _stay(port: int, count: int) -> None:
    at_once = asyncio.Semaphore(JOINING_AT_ONCE)
    clock = LoopClock()

    async def join(number: int) -> None:
        joined = asyncio.Event()
        async with at_once:
            running.create_task(_run(port, f"{os.getpid()}-{number}", clock, joined))
            await joined.wait()

    async with asyncio.TaskGroup() as running:
        await asyncio.gather(*map(join, range(count)))
        print(json.dumps({"joined": count}), flush=True)


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_stay(int(sys.argv[1]), int(sys.argv[2])))
