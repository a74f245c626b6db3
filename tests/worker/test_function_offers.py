"""Functions on a wire whose workers cannot change their offer, in virtual time."""

import asyncio
from random import Random

from shoal.domain.work import Work
from shoal.domain.worker import PAUSED
from shoal.transports.clock import LoopClock
from shoal.worker.agent import STOPPED, Agent, WorkerEvent
from shoal.worker.function_offers import SeparateFunctionOffer
from shoal.worker.model_offers import CHANGED
from shoal.worker.owner_throttle import OwnerThrottle
from simulation.virtual import in_virtual_time
from worker.test_agent import Network

SOON = 2.0  # seconds in which an agent joins or leaves


def decline(work: Work) -> None:
    """Decline work for models."""


class Stage:
    """A running offer, with a network for each agent."""

    def __init__(
        self, percent: int = 100, farewell: str | None = None, slots: int = 1
    ) -> None:
        self.throttle = OwnerThrottle(percent)
        self.slots: list[int] = []  # that each agent offered
        self.events: list[WorkerEvent] = []
        self.networks: list[Network] = []
        self._farewell = farewell
        self.offer = SeparateFunctionOffer(self._create_agent, slots, self.throttle)

    def _create_agent(self, slots: int) -> Agent:
        self.slots.append(slots)
        network = Network(farewell=self._farewell)
        self.networks.append(network)
        return Agent(
            network, network.dial, decline, LoopClock(), Random(1), self.events.append
        )

    @property
    def told(self) -> list[tuple[str, str]]:
        """The kinds of events and their reasons; empties the list."""
        told = [(each.kind, each.reason) for each in self.events]
        self.events.clear()
        return told


@in_virtual_time
async def test_worker_leaves_while_its_owner_has_paused_it() -> None:
    stage = Stage()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stage.offer.run())
        await asyncio.sleep(SOON)
        assert stage.told == [("joined", "")]
        stage.throttle.set(50)
        await asyncio.sleep(SOON)
        assert stage.told == []

        stage.throttle.set(0)
        await asyncio.sleep(SOON)
        assert stage.told == [("left", PAUSED)]

        stage.throttle.set(100)
        await asyncio.sleep(SOON)
        assert stage.told == [("joined", "")]

        stage.offer.leave()
    assert stage.told == [("left", STOPPED)]


@in_virtual_time
async def test_worker_joins_anew_with_the_slots_that_its_owner_lends_now() -> None:
    stage = Stage(slots=4)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stage.offer.run())
        await asyncio.sleep(SOON)
        for percent in (90, 50, 0, 25, 100):
            stage.throttle.set(percent)
            await asyncio.sleep(SOON)

        stage.offer.leave()
    left = [reason for kind, reason in stage.told if kind == "left"]
    assert left == [CHANGED, PAUSED, CHANGED, STOPPED]
    assert stage.slots == [4, 2, 1, 4]


@in_virtual_time
async def test_worker_that_begins_paused_joins_when_it_is_resumed() -> None:
    stage = Stage(percent=0)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stage.offer.run())
        await asyncio.sleep(SOON)
        assert stage.networks == []

        stage.throttle.set(1)
        await asyncio.sleep(SOON)
        assert stage.told == [("joined", "")]
        stage.offer.leave()


@in_virtual_time
async def test_paused_worker_can_be_stopped() -> None:
    stage = Stage(percent=0)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stage.offer.run())
        await asyncio.sleep(SOON)
        stage.offer.leave()
    assert stage.networks == []


@in_virtual_time
async def test_final_refusal_ends_the_offer() -> None:
    stage = Stage(farewell="not wanted")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stage.offer.run())
        await asyncio.sleep(SOON)
        stage.networks[-1].links[-1].deliver("go away")
    assert stage.told == [("joined", ""), ("left", "not wanted")]
