"""A scripted worker of Shoal's own wire; only what it does with jobs is not real."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from gateway.serving import TOKEN, Pool, eventually
from shoal.domain.ids import JobId
from shoal.domain.outcome import Delta, Fault, Usage
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Completed,
    Event,
    Failed,
    RunJob,
)
from shoal.domain.work import Feature, JobKind
from shoal.domain.worker import Offer
from shoal.ledger.keys import Signer
from shoal.protocols.seam.peer_session import ALL_PEERS, PeerMessage, ToPeer
from shoal.protocols.shoal import MESSAGE_MAX, WORKER_PATH
from shoal.protocols.shoal.session import LocalEnd, ShoalSession
from shoal.transports.clock import LoopClock
from shoal.transports.driver import Driver
from shoal.transports.websocket import NOISE, connect_websocket

EVERYTHING = Offer(
    kinds=frozenset({JobKind.CHAT, JobKind.COMPLETION, JobKind.EMBEDDING}),
    models=frozenset({"m1"}),
    slots=8,
    features=frozenset(Feature),
    context=4096,
)
ONE_TASK = Offer(kinds=frozenset({JobKind.CHAT, JobKind.TASK}), models=frozenset({"m"}))
"""What offers one private job or task at a time a worker that is paired."""


def offer(kind: JobKind, *features: Feature) -> Offer:
    """Return an offer of one kind of work, with some features."""
    return Offer(frozenset({kind}), frozenset({"m1"}), features=frozenset(features))


@dataclass
class ShoalWorker:
    """A connected worker: the jobs that it got, and its answers to them."""

    jobs: list[RunJob] = field(default_factory=list)
    cancelled: list[JobId] = field(default_factory=list)
    _driver: Driver[PeerMessage, ToPeer] | None = None

    def receive(self, message: PeerMessage) -> None:
        """Note a message of the coordinator."""
        match message.message:
            case RunJob() as job:
                self.jobs.append(job)
            case CancelJob(job_id):
                self.cancelled.append(job_id)
            case _:
                pass

    async def job(self, number: int = 0) -> RunJob:
        """Wait for a job, by default the first."""
        await eventually(lambda: len(self.jobs) > number)
        return self.jobs[number]

    def work(self, number: int = 0) -> Any:
        """Return the work of a job that came, by default the first."""
        return self.jobs[number].work

    def send(self, event: Event) -> None:
        """Report an event."""
        assert self._driver is not None
        self._driver.send(ToPeer(ALL_PEERS, event))

    def write(self, job: RunJob, *texts: str) -> None:
        """Send text, each of them on its own."""
        for text in texts:
            self.send(AnswerChunk(job.job_id, job.lease, [text]))

    def delta(
        self,
        job: RunJob,
        *,
        choice: int = 0,
        fields: Mapping[str, Any] | None = None,
        logprobs: Any = None,
        finish_reason: str | None = None,
    ) -> None:
        """Send a piece of an answer that is more than text."""
        piece = Delta(choice, fields or {}, logprobs, finish_reason)
        self.send(AnswerChunk(job.job_id, job.lease, [piece]))

    def end(
        self, job: RunJob, finish_reason: str = "stop", usage: Usage | None = None
    ) -> None:
        """Complete an answer."""
        self.send(Completed(job.job_id, job.lease, finish_reason, usage))

    def fail(self, job: RunJob, error: str, fault: Fault = Fault.WORKER) -> None:
        """Report the failure of a job."""
        self.send(Failed(job.job_id, job.lease, error, fault))

    async def answer(self, *texts: str, number: int = 0) -> None:
        """Wait for a job and answer it."""
        job = await self.job(number)
        self.write(job, *texts)
        self.end(job)


@asynccontextmanager
async def shoal_worker(
    pool: Pool,
    offer: Offer = EVERYTHING,
    *,
    name: str = "n1",
    signer: Signer | None = None,
    token: str = TOKEN,
    others: Sequence[Offer] = (),
) -> AsyncIterator[ShoalWorker]:
    """Join as a worker within the block; it proves the key of a ``signer``.

    ``others`` are further offers of its machine.
    """
    worker = ShoalWorker()
    local = LocalEnd(name, signer, token=token, offers=(offer, *others))
    url = f"{NOISE}ws{pool.url.removeprefix('http')}{WORKER_PATH}"
    async with connect_websocket(url, {}, MESSAGE_MAX) as (link, _):
        session = ShoalSession(local, dialled=True)
        driver = Driver(session, link, LoopClock(), worker.receive)
        worker._driver = driver
        running = asyncio.create_task(driver.run())
        try:
            joined = f"shoal:{name}/"
            await eventually(
                lambda: any(each.startswith(joined) for each in pool.hub.pool.workers)
            )
            yield worker
        finally:
            driver.disconnect("the test is over")
            await running
