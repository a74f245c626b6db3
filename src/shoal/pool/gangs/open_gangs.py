"""The gangs of a pool: their members, where these run, and which of them wait."""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from shoal.domain.ids import JobId, WorkerId, peer_of
from shoal.domain.job import Gang, Job, Priority
from shoal.pool.lifecycle import JobState


@dataclass(slots=True, eq=False)
class OpenGang:
    """A gang with members that have not ended.

    It is ``formed`` when its members were leased, which happens to all of them at once.
    From then on, those that lose their workers are leased again one by one.
    """

    id: str
    owner: str
    size: int
    least: int
    slots: int
    priority: Priority
    need: Hashable  # the requirement of each member
    number: int  # in the order in which gangs arrive
    formed: bool = False
    members: dict[int, JobId] = field(default_factory=dict)
    """The members that have not ended, by rank."""

    waiting: dict[int, JobId] = field(default_factory=dict)
    """Of these, the members without a worker."""

    returning: dict[int, WorkerId] = field(default_factory=dict)
    """Of these, the members that wait for their workers to reconnect, by rank."""

    workers: dict[int, WorkerId] = field(default_factory=dict)
    """The workers of the others, by rank."""

    machines: dict[str, int] = field(default_factory=dict)
    """The ranks that these machines run."""

    ended: dict[int, JobState] = field(default_factory=dict)
    """How the others ended, by rank."""

    @property
    def is_complete(self) -> bool:
        """Whether all members were submitted, so that it can form."""
        return self.formed or len(self.members) == self.size

    @property
    def failed(self) -> int:
        """The number of members that ended without a result."""
        return sum(each is not JobState.DONE for each in self.ended.values())

    @property
    def searching(self) -> list[int]:
        """The ranks that need a machine."""
        return sorted(self.waiting.keys() - self.returning.keys())

    @property
    def taken(self) -> set[str]:
        """The machines that run members, or may still run them."""
        return {*self.machines, *map(peer_of, self.returning.values())}

    @property
    def kind(self) -> tuple[Hashable, str]:
        """What gangs have in common that may use the same machines."""
        return self.need, self.owner

    def mismatch(self, job: Job, gang: Gang, need: Hashable) -> str | None:
        """Return why a job cannot be a further member, or None if it can."""
        if job.owner != self.owner:
            return "id: another key uses it"
        if gang.rank in self.members:
            return f"rank: {gang.rank} was submitted already"
        for name, value, known in (
            ("size", gang.size, self.size),
            ("least", gang.least, self.least),
            ("slots", gang.slots, self.slots),
        ):
            if value != known:
                return f"{name}: {value}, but {known} of earlier members"
        if need != self.need or job.priority is not self.priority:
            return "all members must call the same function with the same options"
        return None


@dataclass(slots=True)
class Gangs:
    """The gangs that have open members, by id."""

    by_id: dict[str, OpenGang] = field(default_factory=dict)
    waiting: dict[str, OpenGang] = field(default_factory=dict)
    """The complete gangs with members that wait."""

    held: Counter[str] = field(default_factory=Counter)
    """The machines that run members, with their numbers."""

    _arrived: int = 0

    def get(self, gang_id: str) -> OpenGang | None:
        """Return an open gang."""
        return self.by_id.get(gang_id)

    def in_order(self) -> Iterable[OpenGang]:
        """Return the gangs that wait, in the order of service.

        Those that have begun come first, then those of the highest priority; the oldest
        is the first of its kind.
        """
        return sorted(
            self.waiting.values(),
            key=lambda each: (not each.formed, -each.priority.value, each.number),
        )

    # For the pool.

    def rejection(self, job: Job, need: Hashable) -> str | None:
        """Return why a job cannot be a member of its gang, or None if it can."""
        gang = job.terms.gang
        found = None if gang is None else self.by_id.get(gang.id)
        if gang is None or found is None:
            return None
        if found.formed:
            return "the gang has begun"
        return found.mismatch(job, gang, need)

    def add(
        self, job: Job, gang: Gang, need: Hashable, *, begun: bool
    ) -> OpenGang | None:
        """Add a waiting member; None if ``rejection`` says why not.

        ``begun``: it had a worker before a restart, as all members had.
        """
        if not begun and self.rejection(job, need) is not None:
            return None
        found = self.by_id.get(gang.id)
        if found is None:
            self._arrived += 1
            found = self.by_id[gang.id] = OpenGang(
                gang.id,
                job.owner,
                gang.size,
                gang.least,
                gang.slots,
                job.priority,
                need,
                self._arrived,
            )
        found.formed |= begun
        found.members[gang.rank] = job.id
        self.queue(found, gang.rank)
        return found

    def queue(self, gang: OpenGang, rank: int, awaits: WorkerId | None = None) -> None:
        """Count a member as waiting; ``awaits`` is a worker that may reconnect."""
        self._release(gang, rank)
        if awaits is not None:
            gang.returning[rank] = awaits
        gang.waiting[rank] = gang.members[rank]
        if gang.is_complete:
            self.waiting[gang.id] = gang

    def place(self, gang: OpenGang, rank: int, worker_id: WorkerId) -> None:
        """Count a member as leased to a worker."""
        machine = peer_of(worker_id)
        assert machine not in gang.machines, f"{machine} has two members of {gang.id}"
        gang.formed = True
        gang.workers[rank] = worker_id
        gang.machines[machine] = rank
        self.held[machine] += 1
        self._stop_waiting(gang, rank)

    def restore_end(self, member: Gang, state: JobState) -> None:
        """Note how a member ended before a restart, if its gang is open."""
        if (gang := self.by_id.get(member.id)) is not None:
            gang.ended[member.rank] = state

    def end(self, gang: OpenGang, rank: int, state: JobState) -> None:
        """Remove a member that has ended."""
        self._release(gang, rank)
        self._stop_waiting(gang, rank)
        gang.ended[rank] = state
        del gang.members[rank]
        if not gang.is_complete:
            self.waiting.pop(gang.id, None)
        if not gang.members:
            del self.by_id[gang.id]

    def _stop_waiting(self, gang: OpenGang, rank: int) -> None:
        gang.waiting.pop(rank, None)
        gang.returning.pop(rank, None)
        if not gang.waiting:
            self.waiting.pop(gang.id, None)

    def _release(self, gang: OpenGang, rank: int) -> None:
        worker_id = gang.workers.pop(rank, None)
        if worker_id is None:
            return
        machine = peer_of(worker_id)
        del gang.machines[machine]
        self.held[machine] -= 1
        if not self.held[machine]:
            del self.held[machine]
