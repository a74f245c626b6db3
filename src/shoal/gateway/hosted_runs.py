"""The runs that a coordinator hosts: who is connected, and what they are told."""

import asyncio
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from aiohttp import web

from shoal.coordinator.hub import Hub
from shoal.domain.errors import InvalidRequest, NotFound, PeerError
from shoal.domain.facts import Fact, JobEnd, JobLeased, JobSubmitted
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.job import Gang, Job
from shoal.gateway.rank_relay import BytePace, RankRelay
from shoal.pool.lifecycle import END_STATES, JobState
from shoal.training.rendezvous import Rendezvous
from shoal.training.run_events import RANKS_MAX, Message, RunEvent, RunEvents
from shoal.training.run_link import REPLACED, RUN_ENDED
from shoal.training.run_token import run_id_of
from shoal.transports.clock import Clock, DeadlineTimer

CONNECTIONS_MAX = 1024  # of one run; of each member there are two
UNREAD_MAX = 4096  # messages that one connection leaves unread; then it is closed
ENDED_MAX = 64  # ended runs whose story is kept
POLICY_VIOLATION = 1008  # WebSocket close code (RFC 6455, section 7.4.1)
NOT_OPEN = (
    "the header `Authorization: Bearer TOKEN` has no token of an open run: the run "
    "has ended, or its members were never submitted"
)

Deliveries = Iterable[tuple[str, Message]]

RUNNING = "running"
WORST_FIRST = (JobState.FAILED, JobState.EXPIRED, JobState.CANCELLED)


@dataclass(eq=False, slots=True)
class RunConnection:
    """A WebSocket of a run, and what is to be sent over it."""

    socket: web.WebSocketResponse
    unread: asyncio.Queue[Message | None] = field(
        default_factory=lambda: asyncio.Queue(UNREAD_MAX)
    )
    close_code: int = 0

    def put(self, message: Message) -> None:
        try:
            self.unread.put_nowait(message)
        except asyncio.QueueFull:
            self.hang_up(POLICY_VIOLATION)

    def hang_up(self, code: int) -> None:
        """Close it, without what it has not read."""
        self.close_code = self.close_code or code
        while not self.unread.empty():
            self.unread.get_nowait()
        self.unread.put_nowait(None)


class HostedRun:
    """One run: its events, its rendezvous, its relay, and the connections to them."""

    def __init__(self, gang: Gang, owner: str, clock: Clock, relay: RankRelay) -> None:
        self.id = gang.id
        self.owner = owner
        self.members: dict[JobId, int] = {}  # ranks of those that have not ended
        self.workers: dict[int, WorkerId] = {}  # the last one of each member
        self.ends: set[JobState] = set()  # of members
        self.ranks_per_member = 1
        self.started_at: float | None = None  # Unix seconds
        self.ended_at: float | None = None
        self.events = RunEvents()
        self.relay = relay
        self._gang = gang
        self._clock = clock
        self._rendezvous: Rendezvous | None = None  # until its first rank
        self._story: list[str] = []  # of the rendezvous, as far as it is told
        self._timer = DeadlineTimer(clock, self._deadline, self._expire)
        self._at_ranks: dict[str, RunConnection] = {}
        self._at_events: dict[str, RunConnection] = {}
        self._names = count(1)

    @property
    def size(self) -> int:
        """The number of its ranks."""
        return self._gang.size * self.ranks_per_member

    @property
    def state(self) -> str:
        """Queued, running, or how it ended: the worst end of its members."""
        if self.ended_at is None:
            return JobState.QUEUED.value if self.started_at is None else RUNNING
        worst = (each for each in WORST_FIRST if each in self.ends)
        return next(worst, JobState.DONE).value

    @property
    def is_full(self) -> bool:
        """Whether no connection is accepted any more."""
        connections = len(self._at_ranks) + len(self._at_events) + self.relay.count
        return connections >= CONNECTIONS_MAX

    # Of the members' ranks.

    def rank_count(self, text: str) -> int:
        """Return the number of ranks that a connection names: empty: the machines.

        Raises InvalidRequest.
        """
        machines = self._gang.size
        size = int(text) if text.isdecimal() and len(text) < 6 else 0
        if not text:
            return machines
        if not 0 < size <= RANKS_MAX or size % machines:
            raise InvalidRequest(
                f"size: expected a multiple of {machines}, {RANKS_MAX} at most", "size"
            )
        return size

    def open_rank(self, member: str, connection: RunConnection, size: int) -> None:
        """Add the connection of one of ``size`` ranks, in place of an older one.

        Each machine has as many ranks as the others.
        """
        if self._rendezvous is None:
            self.ranks_per_member = max(1, size // self._gang.size)
            least = self._gang.least * (size // self._gang.size)
            self._rendezvous = Rendezvous(self.id, size, least, random_bytes=os.urandom)
        if (older := self._at_ranks.get(member)) is not None:
            older.hang_up(REPLACED)
        self._at_ranks[member] = connection

    def on_rank_message(
        self, member: str, connection: RunConnection, message: object
    ) -> None:
        """Handle a message.  Raises PeerError if it is invalid."""
        if self._at_ranks.get(member) is not connection:
            return  # replaced
        if not isinstance(message, dict):
            raise PeerError("a message of a run is a JSON object")
        assert self._rendezvous is not None, "it began with the connection"
        self._decided(self._rendezvous.receive(member, message, self._clock.now()))

    def close_rank(self, member: str, connection: RunConnection) -> None:
        """Remove a connection; its member is lost, unless it has a newer one."""
        if self._at_ranks.get(member) is connection:
            del self._at_ranks[member]
            assert self._rendezvous is not None, "it began with the connection"
            self._decided(self._rendezvous.lost(member, self._clock.now()))

    def _deadline(self) -> float | None:
        return None if self._rendezvous is None else self._rendezvous.deadline

    def _expire(self) -> None:
        assert self._rendezvous is not None, "it has set the deadline"
        self._decided(self._rendezvous.expire(self._clock.now()))

    def _decided(self, deliveries: Deliveries) -> None:
        """Send what the rendezvous has decided, and tell its story."""
        assert self._rendezvous is not None, "it has decided"
        self._deliver(self._at_ranks, deliveries)
        self._timer.update()
        story = self._rendezvous.story
        for each in new_sentences(self._story, story):
            remarks = self.events.remark(each, self._clock.wall())
            self._deliver(self._at_events, remarks)
        self._story = story

    # Of events.

    def open_events(self, connection: RunConnection) -> str:
        """Add a connection; return its name."""
        name = str(next(self._names))
        self._at_events[name] = connection
        self._deliver(self._at_events, self.events.open(name))
        return name

    def on_event(self, name: str, message: object) -> None:
        """Handle a message.  Raises PeerError if it is invalid."""
        deliveries = self.events.receive(name, message, self._clock.wall())
        self._deliver(self._at_events, deliveries)

    def close_events(self, name: str) -> None:
        """Remove a connection."""
        del self._at_events[name]
        self._deliver(self._at_events, self.events.close(name))

    def lease(self, job_id: JobId, worker_id: WorkerId) -> None:
        """Note the worker of a member."""
        self.workers[self.members[job_id]] = worker_id
        if self.started_at is None:
            self.started_at = self._clock.wall()

    def end(self) -> None:
        """Close all connections: no member is open any more."""
        self.ended_at = self._clock.wall()
        self.events.progress.shrink()
        for each in [*self._at_ranks.values(), *self._at_events.values()]:
            each.hang_up(RUN_ENDED)
        self.relay.end()

    def _deliver(
        self, connections: dict[str, RunConnection], deliveries: Deliveries
    ) -> None:
        for name, message in deliveries:
            if (connection := connections.get(name)) is not None:
                connection.put(message)


class HostedRuns:
    """The runs that have open members, and the stories of those that ended last."""

    def __init__(self, hub: Hub, clock: Clock) -> None:
        self._clock = clock
        self._runs: dict[str, HostedRun] = {}
        self._of_jobs: dict[JobId, str] = {}
        self._ended: OrderedDict[str, HostedRun] = OrderedDict()
        self._pace = BytePace()
        # Those of before a restart wait for their workers, whose leases are facts.
        for each in hub.pool.jobs.values():
            self._add(each.job)
        hub.subscribe(self._on_fact)

    def admit(self, run_id: str, token: str) -> HostedRun:
        """Return an open run, if the token is its own; raises NotFound."""
        run = self._runs.get(run_id)
        if run is None or run_id_of(token) != run_id:
            raise NotFound(NOT_OPEN)
        return run

    def find(self, run_id: str) -> HostedRun | None:
        """Return a run that is open or has ended a while ago, if it is known."""
        return self._runs.get(run_id) or self._ended.get(run_id)

    def newest_first(self) -> Iterator[HostedRun]:
        """Yield the open runs, and then those that have ended."""
        yield from reversed(self._runs.values())
        yield from reversed(self._ended.values())

    def _add(self, job: Job) -> None:
        if (gang := job.terms.gang) is None:
            return
        if (run := self._runs.get(gang.id)) is None:
            relay = RankRelay(self._pace, self._clock)
            run = self._runs[gang.id] = HostedRun(gang, job.owner, self._clock, relay)
        run.members[job.id] = gang.rank
        self._of_jobs[job.id] = gang.id

    def _on_fact(self, fact: Fact) -> None:
        if isinstance(fact, JobSubmitted):
            self._add(fact.job)
        elif isinstance(fact, JobLeased):
            if (run_id := self._of_jobs.get(fact.job_id)) is not None:
                self._runs[run_id].lease(fact.job_id, fact.worker_id)
        elif isinstance(fact, JobEnd):
            self._on_end(fact)

    def _on_end(self, fact: JobEnd) -> None:
        run_id = self._of_jobs.pop(fact.job_id, None)
        if run_id is None:
            return
        run = self._runs[run_id]
        run.ends.add(END_STATES[type(fact)])
        del run.members[fact.job_id]
        if run.members:
            return
        del self._runs[run_id]
        run.end()
        self._ended[run_id] = run
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)


def new_sentences(told: list[str], story: list[str]) -> list[str]:
    """Return what a story has beyond what was told; its beginning may be gone."""
    for gone in range(len(told) + 1):
        if story[: len(told) - gone] == told[gone:]:
            return story[len(told) - gone :]
    raise AssertionError("nothing of it is a beginning of all stories")


def story_lines(events: Sequence[RunEvent]) -> list[tuple[float, str]]:
    """Return the course of a run in plain lines, each with its time."""
    lines = []
    for each in events:
        rank, text = each.fields.get("rank"), each.fields["text"]
        who = "" if rank is None else f"rank {rank} {each.kind}: "
        lines.append((each.at, f"{who}{text}"))
    return lines
