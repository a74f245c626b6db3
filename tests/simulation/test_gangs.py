"""Gangs of calls under made-up faults, beside small calls."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec
import pytest

from pool.gang_laws import check_gangs
from shoal.coordinator.answer import EndedJob
from shoal.coordinator.connections import WorkerConnection
from shoal.domain.errors import (
    Cancelled,
    JobError,
    NoWorker,
    ShoalError,
    StoreError,
    WorkerLost,
)
from shoal.domain.facts import Fact, JobLeased
from shoal.domain.ids import JobId, LeaseNumber, WorkerId, peer_of
from shoal.domain.job import Gang, Job, JobTerms
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import CallResult
from shoal.domain.work import Call
from shoal.pool.functions import call_limits
from shoal.protocols.seam.protocol import AnyWireProtocol
from shoal.worker.blob_cache import BlobCache
from simulation.faults import Fleet, break_things, end_orders, give_orders
from simulation.functions import LONG_FROM, NAME, RAISED, Made, SimCaller, squared
from simulation.test_calls import (
    BUSY,
    NO_KEYWORDS,
    PROTOCOLS,
    QUEUE,
    TOKEN,
    Clients,
    worker_of,
)
from simulation.virtual import in_virtual_time
from simulation.world import World

GANGS = 8
WORKERS = 8


@pytest.fixture
def blobs() -> Iterator[BlobCache]:
    blobs = BlobCache()
    yield blobs
    asyncio.run(blobs.close())


class GangWorld(World):
    """A world whose coordinators are watched at each fact."""

    async def start(self) -> None:
        await super().start()
        pool = self.hub.pool

        def check(_: Sequence[Fact]) -> None:
            check_gangs(pool)

        self.hub.subscribe(check)


class Runs:
    """Clients that submit gangs, and what became of these."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.accepted: dict[JobId, Gang] = {}
        self.numbers: dict[JobId, int] = {}
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._numbers = LONG_FROM

    async def train(self, run: int) -> None:
        """Submit a gang, and cancel one of its members now and then."""
        random = self.world.random
        await asyncio.sleep(random.uniform(0.0, BUSY))
        size = random.randint(1, 4)
        least, slots = random.randint(1, size), random.randint(0, 2)
        hub = self.world.hub
        if not self.world.up:
            return
        jobs = []
        for rank in range(size):
            gang = Gang(f"{run:032x}", rank, size, least, slots)
            self._numbers += 1
            job = self._job(self._numbers, gang)
            with suppress(StoreError):
                hub.submit(job, Member(self, job.id, gang))
                jobs.append(job.id)
        await asyncio.sleep(random.uniform(0.0, 60.0))
        if random.random() < 0.3 and hub is self.world.hub:
            hub.cancel(random.choice(jobs), "enough")

    def _job(self, number: int, gang: Gang) -> Job:
        args = msgspec.msgpack.encode([number])
        job = Job(
            self.world.new_id(),
            Call(NAME, args, NO_KEYWORDS),
            call_limits(queue=QUEUE),
            terms=JobTerms(gang=gang),
        )
        self.numbers[job.id] = number
        return job

    def check(self, job_id: JobId, gang: Gang, end: Outcome | ShoalError) -> None:
        expected = squared(self.numbers[job_id])
        self.ends[type(end).__name__] += 1
        match end:
            case Outcome(value=value):
                right = msgspec.msgpack.decode(value) == expected
            case Cancelled():
                right = str(end) == "enough" or str(end).startswith("rank ")
            case NoWorker():  # slots are random: the fleet may be too small
                right = self._machines_for(gang) < gang.size
            case WorkerLost():
                right = True
            case JobError():
                right = expected is None and str(end) == RAISED
            case _:
                right = False
        if not right:
            self.wrong.append(f"{job_id} came to {end!r}")

    def _machines_for(self, gang: Gang) -> int:
        workers = self.world.hub.pool.workers.values()
        fit = [each.id for each in workers if each.offer.slots >= gang.slots]
        return len({*map(peer_of, fit)})

    async def check_first_leases(self) -> None:
        """Check that each gang began as a whole, each rank on another machine."""
        first: dict[str, list[tuple[float, str]]] = {}
        sizes: dict[str, int] = {}
        for job_id, gang in self.accepted.items():
            for each in await self.world.store.history(job_id):
                if isinstance(each.fact, JobLeased) and each.fact.lease == 1:
                    place = each.at, peer_of(each.fact.worker_id)
                    first.setdefault(gang.id, []).append(place)
            sizes[gang.id] = gang.size
        assert len(first) > GANGS // 3
        for gang_id, places in first.items():
            assert len(places) == sizes[gang_id], "begun by a part"
            assert len({at for at, _ in places}) == 1, "not in one decision"
            assert len({machine for _, machine in places}) == len(places)


class Member:
    """Hears of one member of a gang."""

    def __init__(self, runs: Runs, job_id: JobId, gang: Gang) -> None:
        self._runs = runs
        self._job_id = job_id
        self._gang = gang

    def on_accepted(self, job_id: JobId) -> None:
        self._runs.accepted[job_id] = self._gang

    def on_leased(
        self,
        job_id: JobId,
        lease: LeaseNumber,
        worker_id: WorkerId,
        peer: WorkerConnection,
    ) -> None:
        pass

    def on_progress(self, job_id: JobId, share: float | None, remark: str) -> None:
        pass

    def on_results(self, returns: list[CallResult]) -> None:
        self._runs.wrong.append(f"{self._job_id} is in no call stream")

    def on_end(self, job: EndedJob) -> None:
        assert job.end is not None
        if not isinstance(job.end, StoreError):
            self._runs.check(self._job_id, self._gang, job.end)

    def runs(self, number: int) -> bool:
        return False


async def live_through(
    protocol: AnyWireProtocol, seed: int, blobs: BlobCache, orders: int
) -> Runs:
    world = GangWorld(protocol, seed, token=TOKEN, approve_nodes=orders > 0)
    await world.open()
    made = Made()
    clients, runs = Clients(world, made), Runs(world)
    callers: dict[int, SimCaller] = {}
    fleet = Fleet(
        world.random,
        WORKERS,
        lambda number: worker_of(world, callers, made, blobs, number),
    )
    await asyncio.sleep(1.0)

    ended = await asyncio.gather(
        break_things(world, fleet, 15, BUSY),
        give_orders(world, fleet, orders, BUSY),
        *(clients.place() for _ in range(20)),
        *(clients.in_lanes(20) for _ in range(3)),
        *(runs.train(run) for run in range(GANGS)),
        return_exceptions=True,
    )
    for each in ended:
        if isinstance(each, BaseException):
            raise each
    if orders:
        await end_orders(world, fleet)
    await asyncio.sleep(200.0)  # for the last lost worker to be noticed and replaced
    await world.settle()

    assert await world.store.open_jobs() == []
    for worker in world.hub.pool.workers.values():
        assert worker.leases == {}, f"{worker.id} holds a slot for nothing"
        assert worker.members == {}
    assert len(world.hub.pool.workers) == WORKERS
    assert {n: each.busy for n, each in callers.items() if each.busy} == {}
    assert not world.hub.pool.gangs.by_id
    world.accepted.update(dict.fromkeys([*clients.accepted, *runs.accepted]))
    assert await world.ends() == {1: len(clients.accepted) + len(runs.accepted)}
    await runs.check_first_leases()
    assert runs.wrong == []
    await fleet.stop()
    await world.close()
    return runs


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
@in_virtual_time
async def test_every_gang_begins_as_a_whole_and_ends(
    protocol: AnyWireProtocol, seed: int, blobs: BlobCache
) -> None:
    runs = await live_through(protocol, seed, blobs, orders=20 * (seed % 2))

    assert runs.ends["Outcome"] > 0
