"""The runs that a coordinator hosts: their connections, and the messages to them."""

import asyncio
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from aiohttp import web

from shoal.coordinator.hub import Hub
from shoal.domain import errors, facts
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.job import Gang, Job
from shoal.gateway.http.relay import BytePace, SocketRelay
from shoal.pool.lifecycle import END_STATES, JobState
from shoal.store.blobs import SIZE_MAX
from shoal.training.rendezvous import Rendezvous
from shoal.training.run_events import RANKS_MAX, Message, RunEvent, RunEvents, run_id_of
from shoal.training.run_rounds import MEMBER, Answers, Round, RunRounds, machines
from shoal.transports.clock import Clock, DeadlineTimer
from shoal.transports.relayed_sockets import ENDED, REPLACED

CONNECTIONS_MAX = 1024  # of one run; of each member there are two
UNREAD_MAX = 4096  # messages that one connection leaves unread; then it is closed
PIECES_MAX = SIZE_MAX // 2  # bytes of files of one run, beyond those in results
ENDED_MAX = 64  # ended runs whose history is kept
POLICY_VIOLATION = 1008  # WebSocket close code (RFC 6455, section 7.4.1)
SERVICE_RESTART = 1012  # WebSocket close code (IANA's registry of them)
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

    def __init__(
        self,
        gang: Gang,
        owner: str,
        clock: Clock,
        relay: SocketRelay,
        restarted_at: float | None = None,
    ) -> None:
        self.id = gang.id
        self.owner = owner
        self.members: dict[JobId, int] = {}  # ranks of those that have not ended
        self.workers: dict[int, WorkerId] = {}  # the last one of each member
        self.ends: set[JobState] = set()  # of members
        self.ranks_per_member = 1
        self._stored = 0  # bytes of pieces of its files
        self.started_at: float | None = None  # Unix seconds
        self.ended_at: float | None = None
        self.events = RunEvents()
        self.relay = relay
        self._gang = gang
        self._clock = clock
        self._rendezvous: Rendezvous | None = None  # until its first rank
        self._history: list[str] = []  # of the rendezvous, as far as it was sent
        self._rounds = RunRounds(
            gang.size,
            gang.least,
            lambda: self._formed is not None,
            lambda: self._formed is None or self._formed.admits,
            lambda: {*self._nodes.values()},
            restarted_at,
        )
        self._timer = DeadlineTimer(clock, self._deadline, self._expire)
        self._rounds_timer = DeadlineTimer(
            clock, lambda: self._rounds.deadline, self._expire_rounds
        )
        self._rounds_timer.update()
        self._at_ranks: dict[str, RunConnection] = {}
        self._at_events: dict[str, RunConnection] = {}
        self._nodes: dict[str, int] = {}  # of the members among them
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

    def worker_of(self, rank: int) -> WorkerId | None:
        """Return the last worker of a rank of the present round."""
        place, nodes = rank // self.ranks_per_member, self._rounds.round.nodes
        return self.workers.get(nodes[place]) if place < len(nodes) else None

    def count_piece(self, size: int) -> None:
        """Count a part of a file that is to be stored.  Raises TooLarge."""
        self._stored += size
        if self._stored > PIECES_MAX:
            raise errors.TooLarge(
                f"a run may return {PIECES_MAX >> 30} GiB: store the rest"
            )

    # Of the members' ranks.

    def rank_count(self, text: str, number: str) -> int:
        """Return the number of ranks that a connection names: empty: the machines.

        Raises InvalidRequest, and Unavailable if it is of another round.
        """
        if number != str(self._rounds.round.number):
            raise errors.Unavailable("its members have another round of the script")
        machines = len(self._rounds.round.nodes)
        size = int(text) if text.isdecimal() and len(text) < 6 else 0
        if not text:
            return machines
        if not 0 < size <= RANKS_MAX or size % machines:
            raise errors.InvalidRequest(
                f"size: expected a multiple of {machines}, {RANKS_MAX} at most", "size"
            )
        return size

    def open_rank(self, member: str, connection: RunConnection, size: int) -> None:
        """Add the connection of one of ``size`` ranks, in place of an older one.

        Each machine has as many ranks as the others.
        """
        if self._rendezvous is None:
            self.ranks_per_member = size // len(self._rounds.round.nodes)
            least = self._gang.least * self.ranks_per_member
            self._rendezvous = Rendezvous(
                *(self.id, size, least),
                random_bytes=os.urandom,
                awaits=lambda: self._rounds.awaits_machine,
            )
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
            raise errors.PeerError("a message of a run is a JSON object")
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
        """Send what the rendezvous has decided, and the new entries of its history."""
        assert self._rendezvous is not None, "it has decided"
        self._deliver(self._at_ranks, deliveries)
        self._timer.update()
        history = self._rendezvous.history
        for each in new_entries(self._history, history):
            remarks = self.events.remark(each, self._clock.wall())
            self._deliver(self._at_events, remarks)
        self._history = history
        if left := self._rendezvous.abandoned:
            nodes = self._rounds.round.nodes
            places = {each // self.ranks_per_member for each in left}
            kept = [nodes[each] for each in places]
            if not self._answer(self._rounds.abandon(kept, self._clock.now())):
                self._decided(self._rendezvous.stop("rank 0 is lost"))

    # Of events, and of the rounds in which members start their scripts.

    def open_events(self, connection: RunConnection) -> str:
        """Add a connection; return its name."""
        name = str(next(self._names))
        self._at_events[name] = connection
        self._deliver(self._at_events, self.events.open(name))
        return name

    def on_event(self, name: str, message: object) -> None:
        """Handle a message.  Raises PeerError if it is invalid."""
        if isinstance(message, dict) and MEMBER in message:
            node, known = message[MEMBER], Round.of(message, self._gang.size)
            if type(node) is not int or not 0 <= node < self._gang.size:
                raise errors.PeerError(f"{MEMBER}: expected the number of a node")
            self._nodes[name] = node
            self._answer(self._rounds.arrive(node, known, self._clock.now()))
            return
        deliveries = self.events.receive(name, message, self._clock.wall())
        self._deliver(self._at_events, deliveries)

    def close_events(self, name: str) -> None:
        """Remove a connection."""
        del self._at_events[name]
        self._nodes.pop(name, None)
        self._deliver(self._at_events, self.events.close(name))

    def lease(self, job_id: JobId, worker_id: WorkerId) -> None:
        """Note the worker of a member."""
        self.workers[self.members[job_id]] = worker_id
        self._rounds.lease(self.members[job_id])
        if self.started_at is None:
            self.started_at = self._clock.wall()

    def lose(self, job_id: JobId) -> None:
        """Note that a member has lost its worker."""
        self._rounds.lose(self.members[job_id], self._clock.now())
        self._rounds_timer.update()

    def end_member(self, fact: facts.JobEnd) -> None:
        """Note that a member has ended."""
        node = self.members.pop(fact.job_id)
        self.ends.add(END_STATES[type(fact)])
        if isinstance(fact, facts.JobFailed | facts.JobExpired) and self.members:
            self._answer(self._rounds.fail(node, self._clock.now()))
        else:
            self._rounds.end(node, done=isinstance(fact, facts.JobCompleted))

    def recover(self, ended: Mapping[int, JobState]) -> None:
        """Count the members that had ended before a restart."""
        for node, state in ended.items():
            self.ends.add(state)
            self._rounds.recover(node, done=state is JobState.DONE)
        self._rounds_timer.update()

    def end(self) -> None:
        """Close all connections: no member is open any more."""
        self.ended_at = self._clock.wall()
        self.events.progress.shrink()
        for each in [*self._at_ranks.values(), *self._at_events.values()]:
            each.hang_up(ENDED)
        self.relay.end()
        self._rounds_timer.cancel()

    @property
    def _formed(self) -> Rendezvous | None:
        """The rendezvous, if the ranks of this round have formed their group."""
        found = self._rendezvous
        return None if found is None or found.formation is None else found

    def _expire_rounds(self) -> None:
        self._answer(self._rounds.expire(self._clock.now()))

    def _answer(self, answers: Answers) -> bool:
        """Send members their rounds; return whether another one has begun."""
        self._rounds_timer.update()
        begins = any(node is None for node, _ in answers)
        if begins:
            # Ranks of the previous round cannot connect until their members end them.
            for each in self._at_ranks.values():
                each.hang_up(SERVICE_RESTART)
            self._at_ranks.clear()
            self._rendezvous, self._history = None, []
            self._timer.cancel()
            current = self._rounds.round
            count = machines(len(current.nodes))
            text = f"{current.reason}: the script restarts on {count}"
            self._deliver(self._at_events, self.events.remark(text, self._clock.wall()))
        for node, message in answers:
            found = [name for name, its in self._nodes.items() if node in (None, its)]
            self._deliver(self._at_events, [(name, message) for name in found])
        return begins

    def _deliver(
        self, connections: dict[str, RunConnection], deliveries: Deliveries
    ) -> None:
        for name, message in deliveries:
            if (connection := connections.get(name)) is not None:
                connection.put(message)


class HostedRuns:
    """The runs that have open members, and the histories of those that ended last."""

    def __init__(self, hub: Hub, clock: Clock, pace: BytePace) -> None:
        self._clock = clock
        self._runs: dict[str, HostedRun] = {}
        self._of_jobs: dict[JobId, str] = {}
        self._ended: OrderedDict[str, HostedRun] = OrderedDict()
        self._pace = pace
        # Runs from before a restart wait for their workers, whose leases are facts.
        for each in hub.pool.jobs.values():
            self._add(each.job, restarted_at=clock.now())
        for run_id, run in self._runs.items():
            if (gang := hub.pool.gangs.get(run_id)) is not None:
                run.recover(gang.ended)
        hub.subscribe(self._on_facts)

    def admit(self, run_id: str, token: str) -> HostedRun:
        """Return an open run, if the token is its own; raises NotFound."""
        run = self._runs.get(run_id)
        if run is None or run_id_of(token) != run_id:
            raise errors.NotFound(NOT_OPEN)
        return run

    def find(self, run_id: str) -> HostedRun | None:
        """Return a run that is open or ended recently, if it is known."""
        return self._runs.get(run_id) or self._ended.get(run_id)

    def newest_first(self) -> Iterator[HostedRun]:
        """Yield the open runs, and then those that have ended."""
        yield from reversed(self._runs.values())
        yield from reversed(self._ended.values())

    def _add(self, job: Job, restarted_at: float | None = None) -> None:
        if (gang := job.terms.gang) is None:
            return
        if (run := self._runs.get(gang.id)) is None:
            relay = SocketRelay(self._pace, self._clock)
            run = self._runs[gang.id] = HostedRun(
                gang, job.owner, self._clock, relay, restarted_at
            )
        run.members[job.id] = gang.rank
        self._of_jobs[job.id] = gang.id

    def _on_facts(self, batch: Sequence[facts.Fact]) -> None:
        for fact in batch:
            if isinstance(fact, facts.JobSubmitted):
                if fact.job.terms.gang is not None:
                    self._add(fact.job)
            elif not self._of_jobs:
                continue
            elif isinstance(fact, facts.JobLeased):
                if (run_id := self._of_jobs.get(fact.job_id)) is not None:
                    self._runs[run_id].lease(fact.job_id, fact.worker_id)
            elif isinstance(fact, facts.JobRequeued):
                if (run_id := self._of_jobs.get(fact.job_id)) is not None:
                    self._runs[run_id].lose(fact.job_id)
            elif isinstance(fact, facts.JobEnd):
                self._on_end(fact)

    def _on_end(self, fact: facts.JobEnd) -> None:
        run_id = self._of_jobs.pop(fact.job_id, None)
        if run_id is None:
            return
        run = self._runs[run_id]
        run.end_member(fact)
        if run.members:
            return
        del self._runs[run_id]
        run.end()
        self._ended[run_id] = run
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)


def new_entries(sent: list[str], history: list[str]) -> list[str]:
    """Return the entries that were not sent yet; the oldest may have been dropped."""
    for dropped in range(len(sent) + 1):
        if history[: len(sent) - dropped] == sent[dropped:]:
            return history[len(sent) - dropped :]
    raise AssertionError("an empty list is a prefix of every history")


RUNS = web.AppKey("runs", HostedRuns)


def history_lines(events: Sequence[RunEvent]) -> list[tuple[float, str]]:
    """Return the history of a run in plain lines, each with its time."""
    lines = []
    for each in events:
        rank, text = each.fields.get("rank"), each.fields["text"]
        who = "" if rank is None else f"rank {rank} {each.kind}: "
        lines.append((each.at, f"{who}{text}"))
    return lines
