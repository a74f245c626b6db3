"""One model's membership of one coordinator, in virtual time."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain, count, pairwise
from random import Random

import pytest
from msgspec.structs import replace

from harness.speed import scaled
from shoal.domain.errors import (
    ContextExceeded,
    InvalidRequest,
    JobError,
    TooLarge,
    Unavailable,
    Unprocessable,
)
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.model_messages import (
    ModelAnswer,
    ModelDone,
    ModelMessage,
    ModelQuery,
    ModelRequest,
    SendModelMessage,
    WaitUntilWritable,
)
from shoal.domain.outcome import Fault, Usage
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Command,
    Completed,
    Draining,
    Event,
    Failed,
    HealthReported,
    LoadChanged,
    OffersChanged,
    Rejected,
    RunJob,
)
from shoal.domain.work import Chat, Work
from shoal.domain.worker import (
    CHAT_ONLY,
    PAUSED,
    MachineHealth,
    Offer,
    ServedModel,
    ThermalLevel,
    WorkerLoad,
    machine_load,
)
from shoal.engines.engine import Finished, Item
from shoal.protocols.seam.session import (
    Admitted,
    Batch,
    Bulk,
    Close,
    CloseCode,
    Output,
    WorkerEnd,
)
from shoal.transports.clock import LoopClock
from shoal.transports.link import LinkClosed
from shoal.transports.outbox import OUTBOX_FULL
from shoal.worker.agent import (
    ADMISSION_TIMEOUT,
    AWAY_MAX,
    GIVEN_UP,
    REPORT_INTERVAL,
    RETRY_FIRST,
    RETRY_MAX,
    RETRY_WITH_JOBS,
    STABLE_AFTER,
    Agent,
    MachineProbe,
    OnModelMessage,
    WorkerEvent,
    decline_sharing,
)
from shoal.worker.jobs import BACKLOG_MAX, EngineSlots, only_model
from shoal.worker.owner_throttle import OwnerThrottle
from simulation import virtual
from simulation.virtual import scripted
from transports.memory_links import MemoryLink

ONE = LeaseNumber(1)
HOT = WorkerLoad(unfit="the processor is at 101 °C")
OFFER = Offer(CHAT_ONLY, frozenset({"m"}))
ALL: frozenset[type] = frozenset({AnswerChunk, Completed, Rejected, Failed, Draining})
MUTE = ALL - {Rejected}  # a wire on which a job cannot be given back


def run_job(name: str = "j", prompt: str = "one two", continues: str = "") -> RunJob:
    chat = Chat("m", ({"role": "user", "content": prompt},))
    return RunJob(JobId(name), ONE, chat, continues)


class Echo:
    """Answers with the words of the prompt, one per second."""

    slots = 2
    models = (ServedModel("m"),)

    def __init__(self) -> None:
        self.running = 0
        self.most = 0

    async def start(self) -> None:
        pass

    async def refresh(self) -> None:
        pass

    async def run(
        self, work: Work, continues: str = "", thoughts: str = ""
    ) -> AsyncGenerator[Item, None]:
        prompt = work.text
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if prompt == "busy":
                raise Unavailable("the model is being loaded")
            if prompt == "bad":
                raise JobError("the prompt is too long")
            if prompt == "odd":
                raise InvalidRequest("top_p is no number")
            if prompt == "long":
                raise ContextExceeded("99 tokens are too many")
            if prompt == "large":
                raise TooLarge("17 MiB are too many")
            if prompt == "unusable":
                raise Unprocessable("n is no number")
            if prompt == "bug":
                raise ZeroDivisionError
            for word in prompt.split():
                await asyncio.sleep(1.0)
                yield word
            if prompt != "silent end":
                yield Finished("stop", Usage(1, 2))
        finally:
            self.running -= 1

    async def close(self) -> None:
        pass


class PlainSession:
    """A wire that carries messages as they are."""

    deadline = None

    def __init__(
        self,
        sent: list[Event],
        inbox: dict[str, Command | Admitted],
        accepts: frozenset[type],
        *,
        welcomes: bool,
    ) -> None:
        self.accepts = accepts
        self._welcomes = welcomes
        self._sent = sent
        self._inbox = inbox

    def receive(self, batch: Batch, now: float) -> list[Command | Admitted | Output]:
        if "go away" in batch:
            return [Close("told to go", 4000, "Bye")]
        return [self._inbox[str(data)] for data in batch]

    def send(self, message: Event, now: float) -> list[Output]:
        self._sent.append(message)
        if isinstance(message, Completed) and message.job_id == "stalled":
            size = OUTBOX_FULL + 1  # more than others may be sent without waiting
            return [Bulk((bytes(size),), size, lambda: False)]
        return []

    def tick(self, now: float) -> list[Command | Admitted | Output]:
        return [Admitted()] if self._welcomes else []


@dataclass
class Network:
    """Stands in for the coordinator and the network."""

    sent: list[Event] = field(default_factory=list)
    dialled: list[float] = field(default_factory=list)  # when
    links: list[MemoryLink] = field(default_factory=list)
    down: bool = False
    pause: float = 0.0  # seconds that a connection takes to come about
    farewell: str | None = None  # after which there is no point in trying again
    url: str = "wire://coordinator"
    headers: Mapping[str, str] = field(default_factory=dict)
    message_max: int = 1000
    inbox: dict[str, Command | Admitted] = field(default_factory=dict)
    accepts: frozenset[type] = ALL
    welcomes: bool = False

    def start_session(self, headers: Mapping[str, str]) -> WorkerEnd:
        return PlainSession(self.sent, self.inbox, self.accepts, welcomes=self.welcomes)

    def final_reason(self, code: int, text: str) -> str | None:
        return self.farewell if code == 4000 else None

    @asynccontextmanager
    async def dial(
        self, url: str, headers: Mapping[str, str], message_max: int
    ) -> AsyncIterator[tuple[MemoryLink, Mapping[str, str]]]:
        self.dialled.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.pause)
        if self.down:
            raise LinkClosed("connection refused")
        self.links.append(MemoryLink())
        yield self.links[-1], {}

    def receive(self, *commands: Command | Admitted) -> None:
        for command in commands:
            key = f"message {len(self.inbox)}"
            self.inbox[key] = command
            self.links[-1].deliver(key)


@dataclass
class Membership:
    """A running agent and its environment."""

    agent: Agent
    network: Network
    engine: Echo
    reports: list[WorkerEvent]
    task: asyncio.Task[str]
    slots: EngineSlots
    troubles: list[float]  # when the engine did not take a job

    @property
    def events(self) -> list[str]:
        return [each.kind for each in self.reports]


Script = Callable[[Membership], Awaitable[None]]


def play(
    script: Script,
    network: Network | None = None,
    size: int = 2,
    measure: Callable[[], MachineHealth] | None = None,
    machine: MachineProbe | None = None,
    share: OnModelMessage = decline_sharing,
    offers: tuple[Offer, ...] | None = None,
    throttle: OwnerThrottle | None = None,
) -> None:
    if measure is not None:
        machine = MachineProbe(measure)

    async def scenario() -> None:
        place, engine, slots = network or Network(), Echo(), EngineSlots(size)
        troubles: list[float] = []
        reports: list[WorkerEvent] = []
        agent = Agent(
            place,
            place.dial,
            only_model(
                engine,
                slots,
                lambda: troubles.append(asyncio.get_running_loop().time()),
            ),
            LoopClock(),
            Random(1),
            reports.append,
            machine=machine,
            share=share,
            offers=offers,
            throttle=throttle,
        )
        task = asyncio.create_task(agent.run())
        await asyncio.sleep(1.0)
        try:
            await script(
                Membership(agent, place, engine, reports, task, slots, troubles)
            )
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert engine.running == 0, "a chat outlives its agent"
        assert slots.jobs == 0

    virtual.run(scenario())


@scripted(play)
async def test_answer_is_streamed_in_pieces(its: Membership) -> None:
    its.network.receive(run_job())
    await asyncio.sleep(5.0)

    assert its.events == ["joined"]
    assert its.network.sent == [
        AnswerChunk(JobId("j"), ONE, ["one"]),
        AnswerChunk(JobId("j"), ONE, ["two"]),
        Completed(JobId("j"), ONE, "stop", Usage(1, 2)),
    ]


@scripted(play)
async def test_answers_are_not_held_up_by_a_large_result_of_another_job(
    its: Membership,
) -> None:
    its.network.receive(run_job("stalled"))
    await asyncio.sleep(5.0)
    its.network.receive(run_job("j"))
    await asyncio.sleep(5.0)

    assert Completed(JobId("j"), ONE, "stop", Usage(1, 2)) in its.network.sent


@pytest.mark.parametrize(
    ("prompt", "event"),
    [
        ("busy", Rejected(JobId("j"), ONE, "the model is being loaded")),
        ("bad", Failed(JobId("j"), ONE, "the prompt is too long")),
        (
            "odd",
            Failed(JobId("j"), ONE, "top_p is no number", Fault.REQUEST),
        ),
        (
            "long",
            Failed(JobId("j"), ONE, "99 tokens are too many", Fault.CONTEXT),
        ),
        ("large", Failed(JobId("j"), ONE, "17 MiB are too many", Fault.SIZE)),
        ("unusable", Failed(JobId("j"), ONE, "n is no number", Fault.VALUES)),
        ("bug", Failed(JobId("j"), ONE, "the engine failed: ZeroDivisionError")),
        ("silent end", Failed(JobId("j"), ONE, "the engine stopped without an answer")),
    ],
)
def test_engine_error_fails_only_its_job(prompt: str, event: Event) -> None:
    async def script(its: Membership) -> None:
        its.network.receive(run_job("j", prompt), run_job("k", "fine"))
        await asyncio.sleep(5.0)

        assert event in its.network.sent
        assert Completed(JobId("k"), ONE, "stop", Usage(1, 2)) in its.network.sent

    play(script)


@scripted(play)
async def test_concurrent_jobs_are_limited_to_the_slots(its: Membership) -> None:
    its.network.receive(*(run_job(f"j{number}", "a b c") for number in range(7)))
    await asyncio.sleep(30.0)

    ended = [each for each in its.network.sent if isinstance(each, Completed)]
    assert len(ended) == 7
    assert its.engine.most == 2


@scripted(play)
async def test_jobs_beyond_the_backlog_are_rejected(its: Membership) -> None:
    jobs = [run_job(f"j{number}") for number in range(BACKLOG_MAX + 5)]
    its.network.receive(*jobs)
    await asyncio.sleep(0.5)

    refused = [each for each in its.network.sent if isinstance(each, Rejected)]
    assert [each.job_id for each in refused] == [
        f"j{number}" for number in range(BACKLOG_MAX + 2, BACKLOG_MAX + 5)
    ]


@scripted(play)
async def test_cancelled_job_reports_nothing_more(its: Membership) -> None:
    its.network.receive(run_job("j", "a b c d"))
    await asyncio.sleep(1.5)

    its.network.receive(CancelJob(JobId("j"), ONE), CancelJob(JobId("none"), ONE))
    await asyncio.sleep(10.0)

    assert its.network.sent == [AnswerChunk(JobId("j"), ONE, ["a"])]
    assert its.engine.running == 0


@scripted(play)
async def test_cancelled_and_reassigned_job_runs_again(its: Membership) -> None:
    its.network.receive(run_job("j", "a b c d"))
    await asyncio.sleep(1.5)
    its.network.sent.clear()

    its.network.receive(CancelJob(JobId("j"), ONE), run_job("j", "x"))
    await asyncio.sleep(0.5)
    assert its.engine.running == 1
    its.network.receive(CancelJob(JobId("j"), ONE))
    await asyncio.sleep(5.0)

    assert its.network.sent == []
    assert its.engine.running == 0


@scripted(play)
async def test_lost_connection_is_redialled_and_explained_once(its: Membership) -> None:
    its.network.down = True
    its.network.links[-1].cut()
    await asyncio.sleep(300.0)
    its.network.down = False
    await asyncio.sleep(RETRY_MAX + 1.0)

    assert its.events == ["joined", "lost", "waiting", "joined"]
    assert "connection reset" in its.reports[1].reason
    assert its.reports[2].reason == "connection refused"


def test_retry_delay_grows_up_to_a_limit() -> None:
    async def script(its: Membership) -> None:
        await asyncio.sleep(600.0)

        times = its.network.dialled
        pauses = [after - before for before, after in pairwise(times)]
        assert RETRY_FIRST * 0.5 <= pauses[0] <= RETRY_FIRST + 0.1
        assert all(RETRY_MAX * 0.5 <= pause <= RETRY_MAX + 0.1 for pause in pauses[-5:])
        assert its.events == ["waiting"]

    play(script, Network(down=True))


@dataclass
class TwoWays(Network):
    """A coordinator at a second address, if the first fails."""

    def final_reason(self, code: int, text: str) -> str | None:
        self.url = "wire://relay?secret"
        return None


def test_report_names_the_next_url() -> None:
    async def script(its: Membership) -> None:
        assert its.reports == [
            WorkerEvent("waiting", "connection refused; trying wire://relay")
        ]

    play(script, TwoWays(down=True))


class Signpost(PlainSession):
    """A redirection that is followed at once."""

    def tick(self, now: float) -> list[Command | Admitted | Output]:
        return [Close("it is at wire://found", CloseCode.MOVED)]


@dataclass
class Signposted(Network):
    """A coordinator whose address must be looked up first."""

    def start_session(self, headers: Mapping[str, str]) -> WorkerEnd:
        if len(self.links) > 1:
            return super().start_session(headers)
        return Signpost(self.sent, self.inbox, self.accepts, welcomes=False)


def test_moved_connection_is_followed_at_once_without_a_report() -> None:
    async def script(its: Membership) -> None:
        assert its.events == ["joined"]
        assert its.network.dialled[0] == its.network.dialled[1]

    play(script, Signposted())


def test_stable_connection_resets_the_retry_delay() -> None:
    async def script(its: Membership) -> None:
        await asyncio.sleep(300.0)
        its.network.down = False
        await asyncio.sleep(RETRY_MAX + STABLE_AFTER + 2.0)
        its.network.links[-1].cut()
        cut = asyncio.get_running_loop().time()
        await asyncio.sleep(1.0)

        assert its.network.dialled[-1] - cut < RETRY_FIRST + 0.1

    play(script, Network(down=True))


@scripted(play)
async def test_a_worker_with_jobs_comes_back_soon_for_a_minute(its: Membership) -> None:
    its.network.receive(run_job("j", "one two three"))
    await asyncio.sleep(1.5)
    its.network.down = True
    its.network.links[-1].cut()
    cut_at = asyncio.get_running_loop().time()
    await asyncio.sleep(AWAY_MAX + 10 * RETRY_MAX)

    # It waits with the next piece, and is given up at last.
    assert its.engine.running == 0
    times = [cut_at, *(each for each in its.network.dialled if each > cut_at)]
    soon = [each for each in times if each < cut_at + AWAY_MAX]
    assert all(b - a <= RETRY_WITH_JOBS + 0.1 for a, b in pairwise(soon))
    assert times[-1] - times[-2] > RETRY_WITH_JOBS


@scripted(play)
async def test_a_job_that_was_given_up_is_not_resumed(its: Membership) -> None:
    its.network.receive(run_job("j", "one two three"))
    await asyncio.sleep(0.5)
    its.network.receive(replace(run_job("j"), resumes=ONE, lease=LeaseNumber(2)))
    its.network.receive(replace(run_job("k"), resumes=ONE, lease=LeaseNumber(2)))
    await asyncio.sleep(0.1)

    assert its.network.sent == [Rejected(JobId("k"), LeaseNumber(2), GIVEN_UP)]
    assert its.engine.running == 1


@scripted(play)
async def test_chat_pauses_without_a_connection_and_resumes(its: Membership) -> None:
    its.network.receive(run_job("j", "a b c d"))
    await asyncio.sleep(1.5)
    its.network.down = True
    its.network.links[-1].cut()
    await asyncio.sleep(20.0)
    assert len(its.network.sent) == 1

    its.network.down = False
    await asyncio.sleep(RETRY_MAX + 10.0)

    texts = [
        *chain.from_iterable(
            e.pieces for e in its.network.sent if isinstance(e, AnswerChunk)
        )
    ]
    assert texts == ["a", "b", "c", "d"]
    assert isinstance(its.network.sent[-1], Completed)


def test_final_refusal_ends_the_membership() -> None:
    async def script(its: Membership) -> None:
        its.network.receive(run_job("j", "a b c d"))
        its.network.links[-1].deliver("go away")

        assert await its.task == "choose another --name"

        assert its.reports[-1] == WorkerEvent("left", "choose another --name")
        assert its.engine.running == 0

    play(script, Network(farewell="choose another --name"))


@scripted(play)
async def test_leave_finishes_running_jobs_and_reports_them(its: Membership) -> None:
    its.network.receive(run_job("j", "a b c d"))
    await asyncio.sleep(1.5)

    its.agent.leave()

    assert its.reports[-1] == WorkerEvent("leaving", "1 job to finish first")
    assert await its.task == "stopped here"
    assert Draining("the worker is leaving") in its.network.sent
    assert isinstance(its.network.sent[-1], Completed)
    assert its.network.links[-1].closed == [(1000, "leaving")]


@scripted(play)
async def test_idle_worker_leaves_at_once(its: Membership) -> None:
    its.agent.leave()

    async with asyncio.timeout(0.5):
        assert await its.task == "stopped here"


def test_worker_leaves_while_the_coordinator_is_unreachable() -> None:
    async def script(its: Membership) -> None:
        await asyncio.sleep(100.0)

        its.agent.leave()

        async with asyncio.timeout(0.5):
            assert await its.task == "stopped here"

    play(script, Network(down=True))


def test_worker_that_leaves_while_dialling_does_not_join() -> None:
    async def script(its: Membership) -> None:
        its.agent.leave()

        async with asyncio.timeout(scaled(10.0)):
            assert await its.task == "stopped here"
        assert its.events == []

    play(script, Network(pause=5.0))


@scripted(play)
async def test_worker_disconnected_while_leaving_does_not_reconnect(
    its: Membership,
) -> None:
    its.network.receive(run_job("j", "a b c d"))
    await asyncio.sleep(1.5)
    its.agent.leave()
    its.network.links[-1].cut()

    async with asyncio.timeout(0.5):
        assert await its.task == "stopped here"
    assert len(its.network.dialled) == 1


@scripted(play)
async def test_unavailable_engine_rejects_the_job(its: Membership) -> None:
    its.network.receive(run_job("j", "bad"), run_job("k", "fine"))
    await asyncio.sleep(3.0)
    assert its.troubles == []

    its.network.receive(run_job("l", "busy"))
    await asyncio.sleep(1.0)
    assert len(its.troubles) == 1


@scripted(play)
async def test_job_is_rejected_while_other_models_hold_all_slots(
    its: Membership,
) -> None:
    its.slots.jobs += 2
    its.network.receive(run_job())
    await asyncio.sleep(1.0)
    assert its.network.sent == [
        Rejected(JobId("j"), ONE, "all 2 slots of the engine are busy")
    ]

    its.slots.jobs -= 2
    its.network.receive(run_job("k", "fine"))
    await asyncio.sleep(2.0)
    assert isinstance(its.network.sent[-1], Completed)


def test_job_waits_on_wires_without_rejection() -> None:
    async def script(its: Membership) -> None:
        its.slots.jobs += 1
        async with its.slots:
            its.network.receive(run_job("j", "fine"))
            await asyncio.sleep(30.0)
            assert its.network.sent == []
        its.slots.jobs -= 1
        await asyncio.sleep(3.0)

        assert isinstance(its.network.sent[-1], Completed)

    play(script, Network(accepts=MUTE), size=1)


def test_job_fails_on_wires_without_rejection() -> None:
    async def script(its: Membership) -> None:
        its.network.receive(run_job("j", "busy"))
        await asyncio.sleep(1.0)

        reason = "not started: the model is being loaded"
        assert its.network.sent == [Failed(JobId("j"), ONE, reason)]

    play(script, Network(accepts=MUTE))


@scripted(play)
async def test_leave_reason_is_reported(its: Membership) -> None:
    its.agent.leave("the model is gone")
    its.agent.leave()

    assert await its.task == "the model is gone"
    assert its.network.sent == [Draining("the model is gone")]


def meter() -> Callable[[], MachineHealth]:
    """Return a measure of a machine that gets busier."""
    loads = count(1)
    return lambda: MachineHealth(float(next(loads)), 50.0)


def reported(its: Membership) -> list[MachineHealth]:
    return [
        each.health for each in its.network.sent if isinstance(each, HealthReported)
    ]


def test_health_is_reported_at_once_and_periodically() -> None:
    async def script(its: Membership) -> None:
        assert reported(its) == [MachineHealth(1.0, 50.0, 0)]

        its.network.receive(run_job(prompt="a " * 15))
        await asyncio.sleep(REPORT_INTERVAL)
        assert reported(its)[1:] == [MachineHealth(2.0, 50.0, 1)]

        await asyncio.sleep(REPORT_INTERVAL)
        assert reported(its)[2:] == [MachineHealth(3.0, 50.0, 0)]

    play(script, Network(accepts=ALL | {HealthReported}), measure=meter())


def test_health_is_not_sent_on_wires_without_it() -> None:
    async def script(its: Membership) -> None:
        await asyncio.sleep(5 * REPORT_INTERVAL)

        assert its.network.sent == []

    play(script, Network(accepts=ALL), measure=meter())


def test_health_is_not_sent_without_a_probe() -> None:
    async def script(its: Membership) -> None:
        await asyncio.sleep(5 * REPORT_INTERVAL)

        assert its.network.sent == []

    play(script, Network(accepts=ALL | {HealthReported}))


def test_each_connection_has_its_own_report_timer() -> None:
    async def script(its: Membership) -> None:
        its.network.links[-1].cut()
        await asyncio.sleep(REPORT_INTERVAL - 1.0)

        assert len(its.network.links) == 2
        assert reported(its) == [
            MachineHealth(1.0, 50.0, 0),
            MachineHealth(2.0, 50.0, 0),
        ]

    play(script, Network(accepts=ALL | {HealthReported}), measure=meter())


def test_health_is_not_measured_without_a_connection() -> None:
    async def script(its: Membership) -> None:
        its.network.down = True
        its.network.links[-1].cut()
        await asyncio.sleep(5 * REPORT_INTERVAL)

        assert reported(its) == [MachineHealth(1.0, 50.0, 0)]

    play(script, Network(accepts=ALL | {HealthReported}), measure=meter())


def test_lent_slots_are_part_of_the_load() -> None:
    async def script(its: Membership) -> None:
        def sent_loads() -> list[WorkerLoad]:
            return [e.load for e in its.network.sent if isinstance(e, LoadChanged)]

        await asyncio.sleep(2 * REPORT_INTERVAL)
        its.agent.update_lent_slots(2)
        its.agent.update_lent_slots(2)
        its.agent.update_lent_slots(0)

        assert [each.lent for each in sent_loads()] == [2, 0]

    machine = MachineProbe(MachineHealth, WorkerLoad)
    play(script, Network(accepts=ALL | {LoadChanged}), machine=machine)


def test_load_changes_are_sent_once_per_connection() -> None:
    heat = [WorkerLoad()]

    async def script(its: Membership) -> None:
        def sent_loads() -> list[WorkerLoad]:
            return [e.load for e in its.network.sent if isinstance(e, LoadChanged)]

        await asyncio.sleep(2 * REPORT_INTERVAL)
        assert sent_loads() == []

        heat[0] = HOT
        await asyncio.sleep(2 * REPORT_INTERVAL)
        assert sent_loads() == [HOT]

        its.network.links[-1].cut()
        await asyncio.sleep(REPORT_INTERVAL)
        assert sent_loads() == [HOT, HOT]

        heat[0] = WorkerLoad()
        await asyncio.sleep(2 * REPORT_INTERVAL)
        assert sent_loads() == [HOT, HOT, WorkerLoad()]

    accepts = ALL | {LoadChanged}
    machine = MachineProbe(MachineHealth, lambda: heat[0])
    play(script, Network(accepts=accepts), machine=machine)


def test_a_paused_worker_finishes_its_jobs_and_starts_no_others() -> None:
    throttle = OwnerThrottle()

    async def script(its: Membership) -> None:
        its.network.receive(run_job("j", "fine"))
        await asyncio.sleep(0.1)
        its.network.sent.clear()

        throttle.set(0)
        its.network.receive(run_job("k", "fine"))
        await asyncio.sleep(0.1)
        assert its.network.sent == [
            OffersChanged((replace(OFFER, slots=4),)),
            LoadChanged(machine_load(ThermalLevel.NOMINAL, 0)),
            Rejected(JobId("k"), ONE, PAUSED),
        ]
        await asyncio.sleep(5.0)
        assert [e.job_id for e in its.network.sent if isinstance(e, Completed)] == ["j"]
        assert len(its.network.links) == 1
        its.network.sent.clear()

        throttle.set(50)
        assert its.network.sent == [
            OffersChanged((replace(OFFER, slots=2),)),
            LoadChanged(machine_load(ThermalLevel.NOMINAL, 50)),
        ]
        its.network.receive(run_job("l", "fine"))
        await asyncio.sleep(5.0)
        assert [e.job_id for e in its.network.sent if isinstance(e, Completed)] == ["l"]

    accepts = ALL | {OffersChanged, LoadChanged, Rejected}
    play(
        script,
        Network(accepts=accepts, welcomes=True),
        machine=MachineProbe(
            MachineHealth, lambda: machine_load(ThermalLevel.NOMINAL, throttle.percent)
        ),
        offers=(replace(OFFER, slots=4),),
        throttle=throttle,
    )


@pytest.mark.parametrize("connected", [True, False])
def test_running_jobs_are_handed_over_for_the_owners_rules(*, connected: bool) -> None:
    throttle = OwnerThrottle()

    async def script(its: Membership) -> None:
        mine = replace(run_job("mine", "a b c d"), returnable=False)
        its.network.receive(run_job("j", "a b c d"), mine)
        await asyncio.sleep(1.5)
        if not connected:
            its.network.down = True
            its.network.links[-1].cut()
            await asyncio.sleep(0.1)
        its.network.sent.clear()

        throttle.pause("its user is active")
        await asyncio.sleep(0.1)

        assert its.engine.running == 1, "nobody else can do the other job"
        if connected:
            its.network.receive(run_job("k", "fine"))
            await asyncio.sleep(0.1)
            assert its.network.sent == [
                Rejected(JobId("j"), ONE, "handed over: its user is active"),
                Rejected(JobId("k"), ONE, "paused: its user is active"),
            ]
            await asyncio.sleep(5.0)
            assert isinstance(its.network.sent[-1], Completed)
            assert its.network.sent[-1].job_id == "mine"
        else:
            assert its.network.sent == []  # the coordinator has requeued it

    play(script, throttle=throttle)


def test_jobs_that_no_message_gives_back_are_finished() -> None:
    throttle = OwnerThrottle()

    async def script(its: Membership) -> None:
        its.network.receive(run_job("j", "a b"))
        await asyncio.sleep(1.5)
        throttle.pause("on battery")
        await asyncio.sleep(5.0)

        assert isinstance(its.network.sent[-1], Completed)

    play(script, Network(accepts=MUTE), throttle=throttle)


def test_a_job_that_was_handed_over_may_come_back() -> None:
    throttle = OwnerThrottle()

    async def script(its: Membership) -> None:
        its.network.receive(run_job("j", "a b c d"))
        await asyncio.sleep(1.5)
        throttle.pause("on battery")
        throttle.pause("")
        its.network.sent.clear()

        its.network.receive(run_job("j", "fine"))
        await asyncio.sleep(2.0)

        assert isinstance(its.network.sent[-1], Completed)

    play(script, throttle=throttle)


def test_a_throttle_that_changes_between_connections_is_sent_on_the_next() -> None:
    throttle = OwnerThrottle()

    async def script(its: Membership) -> None:
        its.network.down = True
        its.network.links[-1].cut()
        throttle.set(50)
        its.network.down = False
        its.network.sent.clear()
        await asyncio.sleep(60.0)

        assert its.network.sent == [OffersChanged((replace(OFFER, slots=2),))]

    network = Network(accepts=ALL | {OffersChanged}, welcomes=True)
    play(script, network, offers=(replace(OFFER, slots=4),), throttle=throttle)


def test_offers_are_sent_at_once_and_on_change() -> None:
    async def script(its: Membership) -> None:
        assert its.network.sent == [OffersChanged(())]

        its.agent.update_offers((OFFER,))
        assert its.network.sent[1:] == [OffersChanged((OFFER,))]

        its.network.links[-1].cut()
        await asyncio.sleep(5.0)
        assert its.network.sent[2:] == [OffersChanged((OFFER,))]

    network = Network(accepts=ALL | {OffersChanged}, welcomes=True)
    play(script, network, offers=())


def test_worker_has_joined_once_admission_is_confirmed() -> None:
    async def script(its: Membership) -> None:
        await asyncio.sleep(ADMISSION_TIMEOUT)
        assert its.events == ["waiting"]
        assert "not admitted yet" in its.reports[0].reason
        assert reported(its) == []

        its.network.receive(Admitted(), Admitted())
        await asyncio.sleep(1.0)
        assert its.events == ["waiting", "joined"]
        assert len(reported(its)) == 1

    network = Network(accepts=ALL | {OffersChanged, HealthReported})
    play(script, network, measure=meter(), offers=())


def test_immediately_admitted_worker_joins_soon() -> None:
    async def script(its: Membership) -> None:
        its.network.links[-1].cut()
        await asyncio.sleep(ADMISSION_TIMEOUT)

        assert its.events == ["joined", "lost", "joined"]

    network = Network(accepts=ALL | {OffersChanged}, welcomes=True)
    play(script, network, offers=())


@scripted(play)
async def test_offers_are_not_sent_on_wires_without_them(its: Membership) -> None:
    its.agent.update_offers((OFFER,))

    assert its.network.sent == []


@scripted(play)
async def test_model_query_is_declined_by_default(its: Membership) -> None:
    its.network.receive(ModelQuery("m"), ModelRequest("t", "n"), ModelDone("t", "n"))
    await asyncio.sleep(1.0)

    assert its.network.sent == [
        ModelAnswer("m", available=False),
        ModelAnswer("n", available=False),
    ]


def test_shared_models_are_answered_while_connected() -> None:
    received: list[tuple[ModelMessage, SendModelMessage, WaitUntilWritable]] = []

    async def script(its: Membership) -> None:
        its.network.receive(ModelQuery("m"))
        await asyncio.sleep(1.0)
        ((word, send, room),) = received
        answer = ModelAnswer("m", available=True, size=9)
        assert send(answer)
        await room()
        assert (word, its.network.sent) == (ModelQuery("m"), [answer])

        its.network.links[-1].cut()
        await asyncio.sleep(5.0)
        assert not send(answer)
        assert its.network.sent == [answer]

    play(script, share=lambda *arguments: received.append(arguments))
