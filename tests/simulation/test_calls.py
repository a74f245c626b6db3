"""Calls under made-up faults: each comes to its right end, and no slot stays held."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from shoal.calls.group import CallRoute
from shoal.calls.scheduler import CallScheduler
from shoal.coordinator.answer import EndedJob
from shoal.coordinator.connections import WorkerConnection
from shoal.domain.errors import (
    JobError,
    ShoalError,
    StoreError,
    TimedOut,
    WorkerLost,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, Priority
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import CallResult, StreamedCall
from shoal.domain.work import Call, CallStream, Feature, JobKind
from shoal.domain.worker import Offer, ServedModel
from shoal.pool.functions import call_limits
from shoal.protocols import discover
from shoal.protocols.seam.protocol import AnyWireProtocol
from shoal.worker.blob_cache import BlobCache
from shoal.worker.calls import FunctionBackend
from simulation import virtual
from simulation.faults import (
    FAULTS,
    WITH_FULL_DISKS,
    Fault,
    Fleet,
    break_things,
    end_orders,
    give_orders,
)
from simulation.functions import NAME, RAISED, Made, SimCaller, squared
from simulation.virtual import in_virtual_time
from simulation.world import World

PROTOCOLS = [each for each in discover().values() if each.preferred]
TOKEN = "the token of the fleet"
BUSY = 60.0  # seconds in which everything happens
QUEUE = 3600.0  # seconds that a call may wait
WAY = CallRoute(CallStream(NAME), Priority.NORMAL, QUEUE)
NO_KEYWORDS = msgspec.msgpack.encode({})


@pytest.fixture
def blobs() -> Iterator[BlobCache]:
    """Where large arguments would be."""
    blobs = BlobCache()
    yield blobs
    asyncio.run(blobs.close())


class Clients:
    """Those who make calls, each with a number, and what they were told."""

    def __init__(self, world: World, made: Made) -> None:
        self.world = world
        self.made = made
        self.accepted: dict[JobId, int] = {}
        self.whole = 0
        self.failed = 0
        self.lost = 0
        self._numbers = 0

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def job(self, number: int, key: str = "") -> Job:
        args = msgspec.msgpack.encode([number])
        return Job(
            self.world.new_id(),
            Call(NAME, args, NO_KEYWORDS),
            call_limits(queue=QUEUE),
            idempotency_key=key,
        )

    async def place(self) -> None:
        """Have a call kept, and never ask for it again."""
        await asyncio.sleep(self.world.random.uniform(0.0, BUSY))
        if self.world.up:
            number = self.number()
            job = self.job(number)
            with suppress(StoreError):  # refused while the disk is full
                if self.world.random.random() < 0.3:  # as calls with a price
                    self.world.hub.submit(job, Placed(self, number))
                else:
                    self.world.calls.submit(job, WAY, Placed(self, number))
                    self.world.calls.flush(job.owner)

    async def insist(self) -> None:
        """Ask for a call under one key until it has its end, come what may."""
        number = self.number()
        job = self.job(number, f"call {number}")
        await asyncio.sleep(self.world.random.uniform(0.0, BUSY))
        while True:
            if self.world.up:
                again = structs.replace(job, id=self.world.new_id())
                asking = self.world.start_client(self._ask(again, number))
                await asyncio.wait([asking])
                cut = asking.cancelled()  # for the coordinator was killed
                if not (cut or isinstance(asking.exception(), StoreError)):
                    return asking.result()
            await asyncio.sleep(self.world.random.uniform(0.0, 5.0))

    async def _ask(self, job: Job, number: int) -> None:
        async with self.world.hub.run_job(job) as reader:
            self.accepted[reader.job_id] = number
            try:
                end: Outcome | ShoalError = await reader.outcome()
            except StoreError:
                raise  # the disk is full: it asks again
            except ShoalError as error:
                end = error
            self.check(number, end)

    async def in_lanes(self, calls: int) -> None:
        """Have calls made that are not kept, and take some of them back."""
        random = self.world.random
        await asyncio.sleep(random.uniform(0.0, BUSY))
        while not self.world.up:  # noqa: ASYNC110  # nothing tells when it is
            await asyncio.sleep(1.0)
        asking = self.world.start_client(self._in_lanes(calls))
        await asyncio.wait([asking])
        if not asking.cancelled():
            asking.result()

    async def _in_lanes(self, calls: int) -> None:
        random = self.world.random
        told = InLanes(self)
        board = CallScheduler(self.world.hub, self.world.clock, "al", told)
        try:
            for _ in range(calls):
                number = self.number()
                told.open.add(number)
                args = msgspec.msgpack.encode([number])
                board.submit(WAY, StreamedCall(number, args, NO_KEYWORDS))
                if random.random() < 0.3:
                    board.flush()
                    await asyncio.sleep(random.uniform(0.0, 1.0))
                if random.random() < 0.1 and told.open:
                    unwanted = random.choice(sorted(told.open))
                    assert board.cancel(unwanted)
                    told.open.remove(unwanted)
            board.flush()
            while told.open:
                told.news.clear()
                await told.news.wait()
        finally:
            board.close()

    def check(self, number: int, end: Outcome | ShoalError) -> None:
        """Count how a call ended; it is wrong unless it could not be otherwise."""
        self.made.over.add(number)
        expected = squared(number)
        match end:
            case Outcome(value=value):
                right = msgspec.msgpack.decode(value) == expected
                self.whole += 1
            case WorkerLost() | TimedOut():
                right = True  # where everything fails, too many workers may do
                self.lost += 1
            case JobError():
                right = expected is None and str(end) == RAISED
                self.failed += 1
            case _:
                right = False
        if not right:
            self.made.wrong.append(f"call {number} came to {end!r}")


class Placed:
    """Hears of one call that is kept."""

    def __init__(self, clients: Clients, number: int) -> None:
        self._clients = clients
        self._number = number

    def on_accepted(self, job_id: JobId) -> None:
        self._clients.accepted[job_id] = self._number

    def on_leased(
        self,
        job_id: JobId,
        lease: LeaseNumber,
        worker_id: WorkerId,
        peer: WorkerConnection,
    ) -> None:
        pass

    def on_started(self, job_id: JobId, lease: LeaseNumber) -> None:
        pass

    def on_progress(self, job_id: JobId, share: float | None, remark: str) -> None:
        pass

    def on_results(self, returns: list[CallResult]) -> None:
        self._clients.made.wrong.append(f"call {self._number} is in no lane")

    def on_end(self, job: EndedJob) -> None:
        assert job.end is not None
        if isinstance(job.end, StoreError):
            return  # it was not accepted
        self._clients.check(self._number, job.end)

    def runs(self, number: int) -> bool:
        return False


class InLanes:
    """Hears of one client's calls that are not kept, each once."""

    def __init__(self, clients: Clients) -> None:
        self.open: set[int] = set()
        self.news = asyncio.Event()
        self._clients = clients

    def on_pushed(self, numbers: Sequence[int], worker_id: WorkerId) -> None:
        pass

    def on_requeued(self, numbers: Sequence[int], reason: str, *, lost: bool) -> None:
        pass

    def on_results(self, returns: Iterable[CallResult]) -> None:
        for number, value, error in returns:
            self._ended(number, JobError(error) if error else Outcome("", value=value))

    def on_failure(self, number: int, error: ShoalError) -> None:
        self._ended(number, error)

    def _ended(self, number: int, end: Outcome | ShoalError) -> None:
        if number not in self.open:
            self._clients.made.wrong.append(f"call {number} ended, and was not open")
        self.open.discard(number)
        self._clients.check(number, end)
        self.news.set()


def worker_of(
    world: World,
    callers: dict[int, SimCaller],
    made: Made,
    blobs: BlobCache,
    number: int,
) -> Coroutine[None, None, None]:
    """Return the life of a worker that calls functions."""
    slots = world.random.randint(1, 3)
    caller = callers[number] = SimCaller(slots, world.random, made, refuses=0.02)
    offer = Offer(
        frozenset({JobKind.TASK, JobKind.CALL, JobKind.CALL_STREAM}),
        slots=slots,
        features=frozenset({Feature.VALUES}),
        tasks=caller.names,
        streams=False,
    )
    direct = world.protocol.address
    ports = {"transport": 1}  # of a wire that has its own
    member = replace(
        world.member(f"w{number}", ServedModel("none"), slots),
        offers=(offer,),
        direct_url="" if direct is None else direct("coordinator", ports),
    )
    dialer = world.protocol.dial("http://coordinator:4010", member)
    return world.be(dialer, lambda work: None, (offer,), FunctionBackend(caller, blobs))


async def live_through(
    protocol: AnyWireProtocol,
    seed: int,
    blobs: BlobCache,
    orders: int = 0,
    kinds: Mapping[Fault, int] = FAULTS,
) -> Clients:
    world = World(protocol, seed, token=TOKEN, approve_nodes=orders > 0)
    await world.open()
    made = Made()
    clients = Clients(world, made)
    callers: dict[int, SimCaller] = {}
    fleet = Fleet(
        world.random, 8, lambda number: worker_of(world, callers, made, blobs, number)
    )
    await asyncio.sleep(1.0)

    ended = await asyncio.gather(
        break_things(world, fleet, 15, BUSY, kinds),
        give_orders(world, fleet, orders, BUSY),
        *(clients.place() for _ in range(30)),
        *(clients.insist() for _ in range(30)),
        *(clients.in_lanes(20) for _ in range(5)),
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
    assert len(world.hub.pool.workers) == 8
    assert {n: each.busy for n, each in callers.items() if each.busy} == {}
    world.accepted.update(dict.fromkeys(clients.accepted))
    assert await world.ends() == {1: len(clients.accepted)}
    for job_id, number in clients.accepted.items():
        stored = await world.store.job(job_id)
        assert stored is not None
        if stored.outcome is not None:
            value = msgspec.msgpack.decode(stored.outcome.value)
            assert value == squared(number)
    await fleet.stop()
    await world.close()
    return clients


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
@in_virtual_time
async def test_every_call_comes_to_its_right_end(
    protocol: AnyWireProtocol, seed: int, blobs: BlobCache
) -> None:
    clients = await live_through(protocol, seed, blobs)

    assert clients.made.wrong == []
    assert clients.whole > 60
    assert clients.lost < 10


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
@in_virtual_time
async def test_every_call_ends_right_while_operators_suspend_workers(
    protocol: AnyWireProtocol, seed: int, blobs: BlobCache
) -> None:
    clients = await live_through(protocol, seed, blobs, orders=30)

    assert clients.made.wrong == []
    assert clients.whole > 60
    assert clients.lost < 10


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
@in_virtual_time
async def test_every_call_ends_right_though_the_disk_is_full_at_times(
    protocol: AnyWireProtocol, seed: int, blobs: BlobCache
) -> None:
    clients = await live_through(protocol, seed, blobs, kinds=WITH_FULL_DISKS)

    assert clients.made.wrong == []
    assert clients.world.store.faults.failures > 0
    assert clients.whole > 10
    assert clients.lost < 10


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_a_seed_makes_the_same_calls_twice(
    protocol: AnyWireProtocol, blobs: BlobCache
) -> None:
    async def scenario() -> tuple[list[int], Counter[JobId]]:
        clients = await live_through(protocol, 7, blobs)
        return clients.made.begun, Counter(clients.accepted)

    assert virtual.run(scenario()) == virtual.run(scenario())
