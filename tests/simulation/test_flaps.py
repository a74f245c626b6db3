"""Peers that come, go, get hot and change their models all the time: none sticks."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from coordinator.hubs import Coordinator, running_coordinator
from peers.scripted_peers import (
    PeerCoordinator,
    ScriptedPeerSession,
    accept_peers,
    chat,
    offer,
    requested_chat,
)
from shoal.domain.errors import ShoalError
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import Job, TimeLimits
from shoal.domain.outcome import Usage
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Completed,
    Dismiss,
    LoadChanged,
    OffersChanged,
    Rejected,
    RunJob,
)
from shoal.domain.work import Feature
from shoal.domain.worker import WorkerLoad
from shoal.protocols.seam.peer_session import PeerJoined, PeerLeft, PeerMessage, ToPeer
from shoal.protocols.seam.session import Output
from simulation.virtual import in_virtual_time
from transports.memory_links import MemoryLink

PEERS = 20
DRAWS = 3
FLAPS = 10_000 // DRAWS  # of all peers
JOBS = 1000 // DRAWS
MODELS = ("m", "n", "o")
CONTINUES = frozenset({Feature.CONTINUE})
WHOLE = "one two three four"


@dataclass
class Crowd(ScriptedPeerSession):
    """Peers that do what they are asked, in a while, unless they are gone by then."""

    link: MemoryLink = field(default_factory=MemoryLink)
    random: Random = field(default_factory=Random)
    refuses: float = 0.02  # which share of its jobs
    at_work: dict[tuple[str, JobId, LeaseNumber], asyncio.Task[None]] = field(
        default_factory=dict
    )

    def say(self, peer: str, word: Any) -> None:
        self.messages.append(PeerMessage(peer, word))
        self.link.deliver(str(len(self.messages) - 1))

    def send(self, message: ToPeer, now: float) -> Sequence[Output]:
        peer, word = message.peer, message.message
        if isinstance(word, RunJob):
            number = (peer, word.job_id, word.lease)
            assert number not in self.at_work, "asked twice"
            self.at_work[number] = asyncio.create_task(self.work(peer, word))
        elif isinstance(word, CancelJob):
            self.stop((peer, word.job_id, word.lease))
        elif isinstance(word, Dismiss):
            self.leave(peer)
        return super().send(message, now)

    def stop(self, number: tuple[str, JobId, LeaseNumber]) -> None:
        if (task := self.at_work.pop(number, None)) is not None:
            task.cancel()

    def leave(self, peer: str) -> None:
        for number in [each for each in self.at_work if each[0] == peer]:
            self.stop(number)

    async def work(self, peer: str, run: RunJob) -> None:
        if self.random.random() < self.refuses:
            self.say(peer, Rejected(run.job_id, run.lease, "busy"))
        else:
            for word in WHOLE.removeprefix(run.continues).split(" "):
                await asyncio.sleep(self.random.uniform(0.0, 0.2))
                if word:
                    text = word if word == "one" else f" {word}"
                    self.say(peer, AnswerChunk(run.job_id, run.lease, [text]))
            self.say(peer, Completed(run.job_id, run.lease, "stop", Usage(1, 4)))
        self.at_work.pop((peer, run.job_id, run.lease), None)


class Flapper:
    """One peer, and what has become of it."""

    def __init__(self, crowd: Crowd, number: int, random: Random) -> None:
        self.key = str(number)
        self._crowd = crowd
        self._random = random
        self._met = PeerJoined(
            f"peer {number}", cancels=number % 2 == 0, submits_jobs=True
        )
        self._turns = (
            *(self._condition,) * 6,
            *(self._offer,) * 3,
            *(self._ask,) * 3,
            self._leave,
        )
        self.come()

    async def flap(self, times: int) -> None:
        for _ in range(times):
            await asyncio.sleep(self._random.expovariate(1 / 0.15))
            self._random.choice(self._turns)()
        self.come()

    def come(self) -> None:
        """Be here, be fit, and have all models."""
        self._crowd.leave(self.key)  # for it is met anew
        self._crowd.say(self.key, self._met)
        offers = tuple(offer(model, features=CONTINUES) for model in MODELS)
        self._crowd.say(self.key, OffersChanged(offers))

    def _condition(self) -> None:
        unfit = self._random.choice(["", "", "is too hot", "is paused"])
        queued, speed = self._random.randint(0, 3), self._random.choice([0.5, 1.0])
        self._crowd.say(self.key, LoadChanged(WorkerLoad(unfit, queued, speed)))

    def _offer(self) -> None:
        some = self._random.sample(MODELS, self._random.randint(1, 3))
        slots = self._random.randint(1, 2)
        offers = tuple(offer(each, slots=slots, features=CONTINUES) for each in some)
        self._crowd.say(self.key, OffersChanged(offers))

    def _ask(self) -> None:
        number = f"{self._random.getrandbits(64):x}"
        self._crowd.say(self.key, requested_chat(number, self._random.choice(MODELS)))

    def _leave(self) -> None:
        self._crowd.leave(self.key)
        if self._random.random() < 0.5:
            self._crowd.say(self.key, PeerLeft("silent for 30 s"))
        self.come()


async def ask(its: Coordinator, model: str, said: Counter[str]) -> None:
    job = Job(its.hub.new_id(), chat(model), TimeLimits(queue=600.0))
    text = ""
    with suppress(ShoalError):
        async with its.hub.run_job(job) as reader:
            while pieces := await reader.read():
                text += "".join(map(str, pieces))
            await reader.outcome()
            said[text] += 1
            return
    said["ended badly"] += 1


async def served(here: PeerCoordinator, crowd: Crowd) -> "asyncio.Task[object]":
    return asyncio.create_task(here.connections.serve("wire", crowd, crowd.link))


@pytest.mark.long
@pytest.mark.parametrize("draw", range(DRAWS))
@in_virtual_time
async def test_flaps_leave_nobody_stuck(draw: int) -> None:
    async with running_coordinator() as its:
        random = Random(draw)
        here = await accept_peers(its)
        crowd = Crowd([], random=random)
        serving = await served(here, crowd)
        peers = [Flapper(crowd, number, random) for number in range(PEERS)]
        said: Counter[str] = Counter()
        async with asyncio.TaskGroup() as tasks:
            for peer in peers:
                tasks.create_task(peer.flap(FLAPS // PEERS))
            for _ in range(JOBS):
                await asyncio.sleep(random.expovariate(1 / 0.07))
                tasks.create_task(ask(its, random.choice(MODELS), said))
        await asyncio.sleep(60.0)

        # Every job has ended, and what was answered was answered right.
        assert sum(said.values()) == JOBS
        assert set(said) <= {WHOLE, "ended badly"}
        assert said[WHOLE] > 0.9 * JOBS
        assert not here.coordinator.hub.pool.jobs
        assert not crowd.at_work
        # Everybody is here, is fit, and works.
        workers = its.hub.pool.workers.values()
        assert len(workers) == PEERS * len(MODELS)
        assert {worker.load for worker in workers} == {WorkerLoad()}
        assert not any(each.draining or each.leases for each in workers)
        crowd.refuses = 0.0
        for model in MODELS:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(PEERS):
                    tasks.create_task(ask(its, model, said))
                await asyncio.sleep(0.01)
                free = [w for w in workers if model in w.queues and not w.leases]
                assert free == []
        assert not serving.done()
