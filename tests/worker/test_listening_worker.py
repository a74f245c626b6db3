"""A worker that several coordinators have dialled, in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import pytest
from msgspec.structs import replace

from shoal.domain.ids import JobId
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Completed,
    Draining,
    Failed,
    LoadChanged,
    OffersChanged,
    Rejected,
    RunJob,
)
from shoal.domain.worker import CHAT_ONLY, Offer, WorkerLoad
from shoal.peers.relay import ServeSession
from shoal.protocols.seam.context import Dialer, unenforceable
from shoal.protocols.seam.peer_session import (
    ALL_PEERS,
    PeerJoined,
    PeerMessage,
    ToPeer,
)
from shoal.protocols.seam.session import Batch, Close, Output
from shoal.transports.clock import LoopClock
from shoal.transports.driver import ConnectionEnd
from shoal.transports.link import OpenLink
from shoal.worker.agent import LEAVING, Agent, WorkerEvent
from shoal.worker.jobs import EngineSlots, only_model
from shoal.worker.listening_worker import (
    INTERNAL_ERROR,
    CreateAgent,
    ListeningWorker,
)
from simulation import virtual
from simulation.virtual import scripted
from transports.memory_links import MemoryLink
from worker.test_agent import Echo, run_job

OFFER = Offer(CHAT_ONLY, frozenset({"m"}), slots=2)
ACCEPTS: frozenset[type] = frozenset(
    {AnswerChunk, Completed, Failed, Rejected, OffersChanged, LoadChanged, Draining}
)


class CoordinatorSession:
    """A connection whose other end is a coordinator; its messages need no encoding."""

    deadline = None

    def __init__(
        self,
        name: str,
        accepts: frozenset[type] = ACCEPTS,
        *,
        respects_offers: bool = False,
    ) -> None:
        self.accepts = accepts
        self.sent: list[object] = []
        self.inbox: dict[str, RunJob | CancelJob] = {}
        self._joined = PeerJoined(
            name, submits_jobs=True, respects_offers=respects_offers
        )

    def tick(self, now: float) -> Sequence[PeerMessage | Output]:
        if not self.accepts:
            return [Close("answered")]
        return [PeerMessage(ALL_PEERS, self._joined)]

    def receive(self, batch: Batch, now: float) -> Sequence[PeerMessage | Output]:
        return [PeerMessage(ALL_PEERS, self.inbox[str(each)]) for each in batch]

    def send(self, message: ToPeer, now: float) -> Sequence[Output]:
        self.sent.append(message.message)
        return []


class BrokenSession(CoordinatorSession):
    """A session with a bug."""

    def receive(self, batch: Batch, now: float) -> Sequence[PeerMessage | Output]:
        raise ZeroDivisionError


@dataclass
class Connection:
    """A coordinator's connection to the worker."""

    session: CoordinatorSession
    link: MemoryLink
    serving: asyncio.Task[ConnectionEnd]

    def give(self, command: RunJob | CancelJob) -> None:
        key = f"message {len(self.session.inbox)}"
        self.session.inbox[key] = command
        self.link.deliver(key)

    @property
    def completed(self) -> list[JobId]:
        return [e.job_id for e in self.session.sent if isinstance(e, Completed)]


@dataclass
class Stage:
    """A listening worker with two slots, and its coordinators."""

    create_agent: CreateAgent
    restriction: str
    reports: list[tuple[Mapping[str, object], WorkerEvent]] = field(
        default_factory=list
    )
    serve: ServeSession | None = None
    closed: bool = False

    def __post_init__(self) -> None:
        self.worker = ListeningWorker(
            self.open_ports,
            self.create_agent,
            LoopClock(),
            lambda details, event: self.reports.append((details, event)),
            self.restriction,
        )

    @asynccontextmanager
    async def open_ports(self, serve: ServeSession) -> AsyncIterator[Mapping[str, int]]:
        self.serve = serve
        yield {"transport": 7}
        self.closed = True

    def dial(self, name: str, session: CoordinatorSession | None = None) -> Connection:
        assert self.serve is not None, "the ports are open"
        link, session = MemoryLink(), session or CoordinatorSession(name)
        serving = asyncio.create_task(self.serve("wire", session, link))
        return Connection(session, link, serving)

    @property
    def events(self) -> list[str]:
        return [
            " ".join(filter(None, (event.kind, event.reason)))
            for _, event in self.reports
        ]


def play(
    script: Callable[[Stage, asyncio.Task[None]], Awaitable[None]],
    restriction: str = "",
) -> None:
    async def scenario() -> None:
        find = only_model(Echo(), EngineSlots(2))

        def create_agent(
            dialer: Dialer, open_link: OpenLink, report: Callable[[WorkerEvent], None]
        ) -> Agent:
            return Agent(
                *(dialer, open_link, find, LoopClock(), Random(1), report),
                offers=(OFFER,),
                redials=False,
            )

        stage = Stage(create_agent, restriction)
        running = asyncio.create_task(stage.worker.run())
        await asyncio.sleep(1.0)
        try:
            await script(stage, running)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    virtual.run(scenario())


@scripted(play)
async def test_every_coordinator_that_dials_is_served(
    its: Stage, running: asyncio.Task[None]
) -> None:
    one, other = its.dial("one"), its.dial("other")
    await asyncio.sleep(1.0)
    # Both chose the same id for their jobs.
    one.give(run_job("j", "a b"))
    other.give(run_job("j", "c"))
    await asyncio.sleep(5.0)

    assert its.events[0] == "listening transport 7"
    assert sorted(its.events[1:]) == ["joined one", "joined other"]
    assert its.reports[0][0] == {"ports": {"transport": 7}}
    assert {"coordinator": "one"} in [details for details, _ in its.reports]
    for each in (one, other):
        assert OffersChanged((OFFER,)) in each.session.sent
        assert each.completed == ["j"]
    one.link.cut()
    other.link.cut()


def test_all_coordinators_learn_of_changed_offers_also_later_ones() -> None:
    changed = replace(OFFER, slots=1)

    async def script(its: Stage, running: asyncio.Task[None]) -> None:
        early = its.dial("early")
        await asyncio.sleep(1.0)
        its.worker.update_offers((changed,))
        late = its.dial("late")
        await asyncio.sleep(1.0)

        offered = [e for e in early.session.sent if isinstance(e, OffersChanged)]
        assert offered[-1] == OffersChanged((changed,))
        assert OffersChanged((changed,)) in late.session.sent
        assert OffersChanged((OFFER,)) not in late.session.sent
        early.link.cut()
        late.link.cut()

    play(script)


@scripted(play)
async def test_lost_coordinator_does_not_end_the_jobs_of_another(
    its: Stage, running: asyncio.Task[None]
) -> None:
    one, other = its.dial("one"), its.dial("other")
    await asyncio.sleep(1.0)
    one.give(run_job("j", "a b c d"))
    other.give(run_job("k", "a b c d"))
    await asyncio.sleep(1.0)
    one.link.cut()
    await asyncio.sleep(10.0)

    assert its.events[-1] == "lost one: connection reset"
    assert (await one.serving).reason == "connection reset"
    assert other.completed == ["k"]
    again = its.dial("one")
    await asyncio.sleep(1.0)
    assert its.events[-1] == "joined one"
    again.link.cut()
    other.link.cut()


@scripted(play)
async def test_leaving_worker_finishes_its_jobs_and_refuses_coordinators(
    its: Stage, running: asyncio.Task[None]
) -> None:
    busy, idle = its.dial("busy"), its.dial("idle")
    await asyncio.sleep(1.0)
    busy.give(run_job("j", "a b c d"))
    await asyncio.sleep(1.0)
    its.worker.leave()
    await asyncio.sleep(1.0)

    assert Draining(LEAVING) in idle.session.sent
    assert idle.serving.done()
    assert not its.closed
    late = its.dial("late")
    assert (await late.serving).reason == LEAVING
    await running
    assert busy.completed == ["j"]
    assert its.closed
    assert its.events[3:] == [
        "leaving busy: 1 job to finish first",
        "left stopped here",
    ]


def test_coordinator_that_cannot_respect_a_restriction_is_disconnected() -> None:
    async def script(its: Stage, running: asyncio.Task[None]) -> None:
        foreign = its.dial("foreign")
        shoal = its.dial("shoal", CoordinatorSession("shoal", respects_offers=True))
        await asyncio.sleep(1.0)

        assert (await foreign.serving).reason == unenforceable("--only-for")
        assert its.events[1:] == ["joined shoal"]
        shoal.link.cut()

    play(script, "--only-for")


@scripted(play)
async def test_lent_slots_are_reported_to_every_coordinator(
    its: Stage, running: asyncio.Task[None]
) -> None:
    one, other = its.dial("one"), its.dial("other")
    await asyncio.sleep(1.0)
    its.worker.update_lent_slots(1)
    await asyncio.sleep(1.0)

    for each in (one, other):
        assert LoadChanged(WorkerLoad(lent=1)) in each.session.sent
        each.link.cut()


@scripted(play)
async def test_exchange_without_a_peer_is_no_coordinator(
    its: Stage, running: asyncio.Task[None]
) -> None:
    ping = its.dial("", CoordinatorSession("", frozenset()))

    assert (await ping.serving).reason == "answered"
    assert its.events == ["listening transport 7"]


def test_bug_in_one_session_ends_that_connection_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def script(its: Stage, running: asyncio.Task[None]) -> None:
        broken, sound = its.dial("broken", BrokenSession("broken")), its.dial("sound")
        await asyncio.sleep(1.0)
        broken.link.deliver("anything")
        sound.give(run_job("j", "a"))
        await asyncio.sleep(5.0)

        assert (await broken.serving).reason == INTERNAL_ERROR
        assert sound.completed == ["j"]
        sound.link.cut()

    play(script)
    assert "ZeroDivisionError" in caplog.text
