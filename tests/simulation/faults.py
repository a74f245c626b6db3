"""What goes wrong in a simulation: with connections, workers and the coordinator."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from random import Random

from shoal.domain.errors import StoreError
from shoal.domain.ids import peer_of
from shoal.domain.worker import Suspension
from shoal.pool.inputs import WorkerApproval, WorkerResumption, WorkerSuspension
from simulation.world import World

ORDERS = (Suspension.PAUSED, Suspension.DRAINING, Suspension.REMOVED)


class Fleet:
    """Workers that are killed now and then and come back; ``work`` is being one."""

    def __init__(
        self,
        random: Random,
        count: int,
        work: Callable[[int], Coroutine[None, None, None]],
    ) -> None:
        self._random = random
        self._work = work
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._coming: set[int] = set()  # that are launched again in a while
        for number in range(count):
            self.launch(number)

    def launch(self, number: int) -> None:
        self._coming.discard(number)
        self._tasks[number] = asyncio.create_task(self._work(number))

    async def kill_one(self) -> None:
        number = self._random.choice(list(self._tasks))
        task = self._tasks[number]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        loop = asyncio.get_running_loop()
        self._coming.add(number)
        loop.call_later(self._random.uniform(0.1, 20), self.launch, number)

    def launch_dismissed(self) -> None:
        """Launch the workers that were told to go."""
        for number, task in list(self._tasks.items()):
            if task.done() and number not in self._coming:
                self.launch(number)

    async def double_one(self) -> None:
        """Start a second process under a name that is taken."""
        number = self._random.choice(list(self._tasks))
        older = self._tasks[number]
        self.launch(number)
        await asyncio.sleep(5.0)
        older.cancel()
        await asyncio.gather(older, return_exceptions=True)
        if self._tasks[number].done():
            # The older one came back last, so the newer one was told to go.
            self.launch(number)

    async def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


async def cut_a_wire(world: World, fleet: Fleet) -> None:
    if (wire := world.any_wire()) is not None:
        wire.cut()


async def stall_a_wire(world: World, fleet: Fleet) -> None:
    if (wire := world.any_wire()) is not None:
        wire.stall()
        asyncio.get_running_loop().call_later(60.0, wire.cut)


async def kill_a_worker(world: World, fleet: Fleet) -> None:
    await fleet.kill_one()


async def double_a_worker(world: World, fleet: Fleet) -> None:
    await fleet.double_one()


async def crash_the_coordinator(world: World, fleet: Fleet) -> None:
    await world.crash()
    while not world.up:
        await asyncio.sleep(world.random.uniform(0.1, 3.0))
        with suppress(StoreError):  # it does not start on a full disk
            await world.start()


LEASE = 3.0  # seconds without a sign of a coordinator after which another takes over


async def take_over(world: World) -> None:
    """Start a coordinator beside the active one, as soon as the store lets it."""
    while True:
        with suppress(StoreError):
            return await world.start()
        await asyncio.sleep(world.random.uniform(0.1, 1.0))


async def pause_the_coordinator(world: World, fleet: Fleet) -> None:
    """Stop the coordinator for a while, as SIGSTOP does or a machine without memory."""
    node, seconds = world.node, world.random.uniform(0.0, 12.0)
    node.process.pause()
    await asyncio.sleep(min(seconds, LEASE))
    if seconds > LEASE:
        asyncio.get_running_loop().call_later(seconds - LEASE, node.process.resume)
        await take_over(world)
        if world.random.random() < 0.5:
            node.cut()  # else its workers notice at last that it is silent
    else:
        node.process.resume()


async def cut_the_coordinator_from_the_store(world: World, fleet: Fleet) -> None:
    """Cut the coordinator from the database; its workers and clients stay."""
    node, seconds = world.node, world.random.uniform(0.0, 12.0)
    node.store.cut_until = asyncio.get_running_loop().time() + seconds
    await asyncio.sleep(min(seconds, LEASE))
    if seconds > LEASE:
        await take_over(world)


async def double_the_coordinator(world: World, fleet: Fleet) -> None:
    """Let another coordinator take over from one that lives."""
    await take_over(world)


async def lose_answers(world: World, fleet: Fleet) -> None:
    """Let the database commit for a moment, and its answers get lost."""
    now = asyncio.get_running_loop().time()
    world.store.faults.silent_until = now + world.random.uniform(0.0, 5.0)


async def hang_commits(world: World, fleet: Fleet) -> None:
    """Let commits of a moment be made only after a while."""
    now = asyncio.get_running_loop().time()
    world.store.faults.hangs_until = now + world.random.uniform(0.0, 2.0)


async def fill_the_disk(world: World, fleet: Fleet) -> None:
    """Leave no space for a moment, or for longer than clients wait."""
    now = asyncio.get_running_loop().time()
    seconds = world.random.choice([1.0, 5.0, 20.0, 90.0])
    world.store.faults.full_until = now + world.random.uniform(0.0, seconds)


async def kill_the_node(world: World, fleet: Fleet) -> None:
    await world.crash()


async def pause_the_node(world: World, fleet: Fleet) -> None:
    """Stop the coordinator for a while; others take over if that is long."""
    world.node.process.pause()
    seconds = world.random.uniform(0.0, 12.0)
    asyncio.get_running_loop().call_later(seconds, world.node.process.resume)


async def cut_the_node_from_the_store(world: World, fleet: Fleet) -> None:
    now = asyncio.get_running_loop().time()
    world.node.store.cut_until = now + world.random.uniform(0.0, 12.0)


async def lose_the_database(world: World, fleet: Fleet) -> None:
    """Let nobody reach the database for a while; all sessions end."""
    now = asyncio.get_running_loop().time()
    world.store.faults.away_until = now + world.random.uniform(0.0, 12.0)


Fault = Callable[[World, Fleet], Awaitable[None]]
FAULTS: dict[Fault, int] = {
    cut_a_wire: 10,
    stall_a_wire: 4,
    kill_a_worker: 6,
    double_a_worker: 3,
    crash_the_coordinator: 1,
}
WITH_FULL_DISKS = FAULTS | {fill_the_disk: 24}
WITH_TAKEOVERS = FAULTS | {
    pause_the_coordinator: 6,
    cut_the_coordinator_from_the_store: 4,
    double_the_coordinator: 4,
    lose_answers: 8,
    hang_commits: 8,
}

OF_NODES = {
    **FAULTS,
    crash_the_coordinator: 0,
    kill_the_node: 40,
    pause_the_node: 20,
    cut_the_node_from_the_store: 10,
    lose_the_database: 5,
    lose_answers: 5,
    hang_commits: 5,
}
"""Those of several nodes, of which another takes over by the rule of the lease."""


async def give_orders(world: World, fleet: Fleet, orders: int, seconds: float) -> None:
    """Pause, drain, remove and resume so many workers in so many seconds, about.

    Operators approve new workers, and those that they have removed, now and then.
    """
    random, loop = world.random, asyncio.get_running_loop()

    def resume(name: str) -> None:
        world.hub.post(WorkerResumption(name, "operator"))
        fleet.launch_dismissed()

    for _ in range(orders):
        await asyncio.sleep(random.expovariate(orders / seconds))
        if not (world.up and world.hub.pool.workers):
            continue
        approve_pending(world)
        worker_id = random.choice(list(world.hub.pool.workers))
        name = random.choice([worker_id, peer_of(worker_id)])
        within = random.choice([None, 0.0, random.uniform(0.0, 10.0)])
        how = random.choice(ORDERS)
        world.hub.post(WorkerSuspension(name, how, "operator", within))
        loop.call_later(random.uniform(0.0, 20.0), resume, name)


def approve_pending(world: World) -> None:
    """Approve most of the workers that wait for it, some with their machines."""
    for worker in list(world.hub.pool.workers.values()):
        world.approved.add(peer_of(worker.id))
        if worker.suspension is Suspension.PENDING and world.random.random() < 0.8:
            name = world.random.choice([worker.id, peer_of(worker.id)])
            world.hub.post(WorkerApproval(name, "operator"))


async def end_orders(world: World, fleet: Fleet) -> None:
    """Approve and resume all workers, and launch those that were told to go."""
    await asyncio.sleep(25.0)  # for the last of ``give_orders``
    for name in sorted(world.approved):
        await world.hub.process(WorkerApproval(name, "operator"))
    for order in list(world.hub.pool.suspensions):
        await world.hub.process(WorkerResumption(order.name, "operator"))
    fleet.launch_dismissed()


async def break_things(
    world: World,
    fleet: Fleet,
    faults: int,
    seconds: float,
    kinds: Mapping[Fault, int] = FAULTS,
) -> None:
    """Let so many faults happen in so many seconds, about."""
    for _ in range(faults):
        await asyncio.sleep(world.random.expovariate(faults / seconds))
        (fault,) = world.random.choices(list(kinds), list(kinds.values()))
        await fault(world, fleet)
