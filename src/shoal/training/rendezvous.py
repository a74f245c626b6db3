"""Decides who is in which generation of a run's group, without I/O.

A generation is a group of ranks that stays the same.  It ends for all when one of its
ranks reports its end, or when one is silent while another waits for it; the next one
has the ranks that report then.  So of a generation that has ended no rank begins
another operation, and there is one chain of generations: no two go on.

``generations.messages`` has the messages.  The coordinator keeps a rendezvous in
memory.  After its restart, ranks announce the generation in which they are, and
training has never stopped.  Only time then shows whether a later generation
exists: until all ranks of the announced one are there, or ``REBUILD`` seconds have
passed, none is formed.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from shoal.domain.errors import PeerError
from shoal.training.generations.generation_end import GenerationEnd, RunMember
from shoal.training.generations.messages import (
    NO_GENERATION,
    NO_OPERATION,
    EndCause,
    EndReport,
    Formation,
    RankState,
    RunMessage,
    number,
)

PATIENCE = 1.25  # seconds; a rank that is silent for longer is paused, or unreachable
REBUILD = 15.0  # seconds after a restart, in which ranks connect again
FRUITLESS_MAX = 2  # generations of the same ranks in which no operation was completed
SECRET_SIZE = 32  # random bytes
HISTORY_MAX = 100  # sentences
SHORTAGE_CHECK = 60.0  # seconds in which the loss of a machine is noticed
RUN_ENDED = "the run has ended"
NO_ANSWER = "it did not answer"
NO_DATA = "no data can be exchanged with it"

Outgoing: TypeAlias = list[tuple[str, RunMessage]]
"""Messages, each with the member that gets it."""


class _RankStatus(NamedTuple):
    """A message of a rank, with its generation and state."""

    generation: int
    state: RankState
    message: RunMessage


class Rendezvous:
    """One run's ranks: members are named by their connections' ids.

    The first generation waits for ``size`` members; later ones have ``least`` or more.
    Times are monotonic seconds.  The caller sends what the methods return, and calls
    ``expire`` at the ``deadline``.

    Ranks that are too few wait while a machine is lost and ``awaits`` another one, with
    which their script restarts; None: there are no others.
    """

    def __init__(
        self,
        run_id: str,
        size: int,
        least: int = 1,
        *,
        random_bytes: Callable[[int], bytes],
        patience: float = PATIENCE,
        rebuild: float = REBUILD,
        awaits: Callable[[], bool] | None = None,
    ) -> None:
        self.run_id = run_id
        self.over = ""
        """Why the run ended; empty: it has not."""
        self.history: list[str] = []
        self.abandoned: Sequence[int] = ()
        """The ranks that are left without rank 0, which alone would save the model.

        They wait: their script has to restart.
        """
        self.generation = NO_GENERATION
        self._size = size
        self._least = least
        self._random_bytes = random_bytes
        self._patience = patience
        self._rebuild = rebuild
        self._awaits = awaits
        self._members: dict[str, RunMember] = {}
        self._roster: dict[int, str] = {}  # members of the present generation, by rank
        self.formation: Formation | None = None
        """The present generation; None: there was none yet."""
        self._newest_left = NO_OPERATION
        self._fruitless = 0
        self._rebuilt_until = 0.0
        self._ends_by: float | None = None  # then the next generation is formed
        self._end_cause = EndCause.FAILURE
        self._pings = 0
        self._silent: set[str] = set()  # members that have not answered yet
        self._answers_by: float | None = None
        self._shortage = ""  # why the ranks that are left wait
        self._waits_until: float | None = None

    @property
    def admits(self) -> bool:
        """Whether a rank lets new ones in."""
        return any(self._members[each].state.admits for each in self._present())

    @property
    def deadline(self) -> float | None:
        """When ``expire`` is due."""
        times = (self._ends_by, self._answers_by, self._waits_until)
        return min((each for each in times if each is not None), default=None)

    def receive(self, member: str, message: object, now: float) -> Outgoing:
        """Handle a message.  Raises PeerError if it is invalid."""
        if not isinstance(message, dict):
            raise PeerError("a message to the rendezvous is a JSON object")
        known = self._members.get(member)
        if known is not None:
            known.is_connected = True
        self._on_answer(member)
        if self.over or (known is not None and known.out):
            return [(member, {"out": self.over or (known.out if known else "")})]
        if "announce" in message:
            generation = number(message, "announce", NO_GENERATION)
            status = _RankStatus(generation, RankState.of(message), message)
            return self._on_announce(member, status, now)
        if "ended" in message:
            generation = number(message, "ended", 0)
            status = _RankStatus(generation, RankState.of(message), message)
            return self._on_ended(member, status, EndReport.of(message), now)
        if "late" in message:
            return self._on_late(member, number(message, "late", 0), now)
        if "pong" in message:
            return []
        if "leave" in message:
            return self._on_leave(member, number(message, "leave", NO_OPERATION), now)
        raise PeerError("unknown message to the rendezvous")

    def lost(self, member: str, now: float) -> Outgoing:
        """A member's connection was closed.

        Its generation goes on: ranks that miss it will say so.
        """
        known = self._members.get(member)
        if known is None:
            return []
        known.is_connected, known.lost_at = False, now
        if member not in self._roster.values():
            del self._members[member]
        return [*self._form_if_complete(now), *self._form_anew(now)]

    def expire(self, now: float) -> Outgoing:
        """Go on without those who did not answer in time."""
        sent: Outgoing = []
        if self._answers_by is not None and now >= self._answers_by:
            self._answers_by = None
            for member in self._present():
                if member in self._silent:
                    sent += self._exclude(member, NO_ANSWER)
            sent += self._end("a rank does not answer", now)
            sent += self._form_if_complete(now)
        if self._ends_by is not None and now >= self._ends_by:
            for member in self._present():
                if self._members[member].report is None:
                    sent += self._exclude(member, NO_ANSWER)
            sent += self._form(now)
        if self._waits_until is not None and now >= self._waits_until:
            if self._awaits is None or not self._awaits():
                return [*sent, *self.stop(self._shortage)]
            self._waits_until = now + SHORTAGE_CHECK
        return sent

    def stop(self, reason: str) -> Outgoing:
        """End the run for all."""
        self.over, self.abandoned = reason, ()
        self.history = [*self.history, reason][-HISTORY_MAX:]
        self._ends_by = self._answers_by = self._waits_until = None
        return [
            (member, {"out": reason})
            for member, each in self._members.items()
            if each.is_connected and not each.out
        ]

    def _on_announce(self, member: str, status: _RankStatus, now: float) -> Outgoing:
        generation, state, _ = status
        if state.gang_rank >= self._size:
            raise PeerError(f"rank {state.gang_rank} of a gang of {self._size}")
        if generation == NO_GENERATION:
            return self._on_fresh(member, state, now)
        sent = self._learn(member, status, now)
        if generation == self.generation and self._ends_by is not None:
            cause = self._end_cause.value
            reason = "the generation has ended"
            sent.append((member, {"end": generation, "reason": reason, "cause": cause}))
        return sent

    def _on_fresh(self, member: str, state: RankState, now: float) -> Outgoing:
        """A process that was in no generation yet."""
        known = self._members.setdefault(member, RunMember(state, NO_GENERATION))
        known.state, known.generation = state, NO_GENERATION
        if sent := self._catch_up(member):
            return sent
        for other, each in self._members.items():
            same_place = each.state.gang_rank == state.gang_rank
            if other != member and each.is_fresh and same_place:
                sent += self._exclude(other, "a newer process has replaced it")
        present = self._present()
        if not present and self._newest_left != NO_OPERATION:
            return [*sent, *self._exclude(member, RUN_ENDED)]
        if not present:
            return [*sent, *self._form_anew(now)]
        if not self.admits:
            reason = "the run goes on without this rank: its script admits no new ones"
            return [*sent, *self._exclude(member, reason)]
        count = sum(each.is_fresh for each in self._members.values())
        return [*sent, *((other, {"waiting": count}) for other in present)]

    def _on_ended(
        self, member: str, status: _RankStatus, report: EndReport, now: float
    ) -> Outgoing:
        sent = self._learn(member, status, now)
        if status.generation != self.generation or self._members[member].out:
            return sent
        if report.cause is EndCause.STOP:
            return self.stop(f"rank {status.state.gang_rank}: {report.reason}")
        self._members[member].report = report
        sent += self._end(report.reason, now, report.cause)
        return [*sent, *self._form_if_complete(now)]

    def _on_late(self, member: str, generation: int, now: float) -> Outgoing:
        """Ask all ranks whether they are there."""
        if generation != self.generation or self._answers_by is not None:
            return []
        if self._ends_by is not None:
            return []
        pinged = [each for each in self._roster.values() if each != member]
        if not pinged and not self._misses_ranks():
            return []
        self._pings += 1
        self._silent = {*pinged}
        self._answers_by = self._not_before(now + self._patience)
        return [
            (other, {"ping": self._pings})
            for other in pinged
            if self._members[other].is_connected
        ]

    def _on_answer(self, member: str) -> None:
        """Any message of a rank shows that it is alive."""
        self._silent.discard(member)
        if not self._silent and not self._misses_ranks():
            self._answers_by = None

    def _on_leave(self, member: str, operation: int, now: float) -> Outgoing:
        known = self._members.get(member)
        if known is None:
            return []
        known.out = "it is done"
        self._newest_left = max(self._newest_left, operation)
        sent = [*self._form_if_complete(now)]
        if not self._present():
            for other, each in self._members.items():
                if each.is_fresh:
                    sent += self._exclude(other, RUN_ENDED)
        return sent

    def _learn(self, member: str, status: _RankStatus, now: float) -> Outgoing:
        """Remember a rank's state; after a restart, also its generation.

        Others may have missed its formation.
        """
        sent: Outgoing = []
        generation, state, message = status
        known = self._members.setdefault(member, RunMember(state, generation))
        known.state, known.generation = state, generation
        if generation > self.generation:
            self.formation = Formation.of(message)
            if self.formation.generation != generation:
                raise PeerError(f"a rank of generation {generation} has another one")
            self.generation, self._roster = generation, {}
            self._rebuilt_until = now + self._rebuild
            self._ends_by = self._answers_by = None
            for other in [*self._members]:
                sent += self._catch_up(other)
        return [*sent, *self._catch_up(member)]

    def _catch_up(self, member: str) -> Outgoing:
        """Send a rank the formation that it has missed, or say that it is out."""
        known, formation = self._members[member], self.formation
        ports = [] if formation is None else [each.port_id for each in formation.ranks]
        if known.out or formation is None:
            return []
        if known.state.port_id in ports:
            rank = ports.index(known.state.port_id)
            self._roster[rank] = member
            if known.generation >= self.generation:
                return []
            known.report = None
            return [(member, self._for_rank(formation, rank))]
        if known.is_fresh:
            return []
        since = known.generation
        return self._exclude(
            member, f"the run has gone on without it since generation {since}"
        )

    def _present(self) -> Sequence[str]:
        """Return the members of the present generation that are connected."""
        return [
            each
            for each in self._roster.values()
            if self._members[each].is_connected and not self._members[each].out
        ]

    def _misses_ranks(self) -> bool:
        """Return whether ranks may still connect that were there before a restart."""
        ranks = () if self.formation is None else self.formation.ranks
        return len(self._roster) < len(ranks)

    def _not_before(self, time: float) -> float:
        """Put a deadline off while ranks may still connect after a restart."""
        return max(time, self._rebuilt_until) if self._misses_ranks() else time

    def _end(
        self, reason: str, now: float, cause: EndCause = EndCause.FAILURE
    ) -> Outgoing:
        """End the present generation, if it has not."""
        if self._ends_by is None:
            self._ends_by = self._not_before(now + self._patience)
        elif self._end_cause is not EndCause.ADMISSION or cause is self._end_cause:
            return []
        self._answers_by, self._end_cause = None, cause
        message: RunMessage = {
            "end": self.generation,
            "reason": reason,
            "cause": cause.value,
        }
        return [
            (member, message)
            for member in self._present()
            if self._members[member].report is None
        ]

    def _form_if_complete(self, now: float) -> Outgoing:
        """Form the next generation if all who can have reported."""
        if self._ends_by is None:
            return []
        if self._misses_ranks() and now < self._ends_by:
            return []
        if any(self._members[each].report is None for each in self._present()):
            return []
        return self._form(now)

    def _form(self, now: float) -> Outgoing:
        """Form the next generation of those who have reported."""
        self._ends_by = None
        reported = [each for each in self._present() if self._members[each].report]
        if not reported:
            return self._form_anew(now)
        formed = None if self.formation is None else self.formation.newest
        end = GenerationEnd(self._members, [*self._roster.values()], reported)
        self._fruitless = self._fruitless + 1 if end.is_fruitless(formed) else 0
        sent: Outgoing = []
        if self._fruitless >= FRUITLESS_MAX:
            self._fruitless = 0
            sent += self._exclude(end.drop_most_suspected(), NO_DATA)
        story = [*end.story()]
        self._shortage = end.shortage(self._size, self._least, story)
        waits = self._awaits is not None and self._newest_left == NO_OPERATION
        if self._shortage and waits:
            self._waits_until = now + SHORTAGE_CHECK
            self.history = [*self.history, f"{self._shortage}; they wait"][
                -HISTORY_MAX:
            ]
            return sent
        if reason := self._shortage or end.difference():
            return [*sent, *self.stop(reason)]
        if not end.has_writer:
            states = [self._members[each].state for each in end.reported]
            self.abandoned = [each.gang_rank for each in states]
            self.history = [*self.history, *story][-HISTORY_MAX:]
            return sent
        members = end.reported
        if end.admits:
            fresh = end.fresh()
            members = [*members, *fresh.values()]
            story += [f"rank {rank} has joined" for rank in sorted(fresh)]
        newest = max(end.newest, self._newest_left)
        return [*sent, *self._begin(members, newest, story, end.admits)]

    def _form_anew(self, now: float) -> Outgoing:
        """Begin from nothing, once all ranks are there and none of a generation is."""
        if self._present() or (self._misses_ranks() and now < self._rebuilt_until):
            return []
        fresh = [
            member
            for member, each in self._members.items()
            if each.is_fresh and each.is_connected
        ]
        if len(fresh) < self._size:
            return []
        self._newest_left = NO_OPERATION
        story = ["all ranks restart"] if self.generation >= 0 else []
        return self._begin(fresh, NO_OPERATION, story, False)

    def _begin(
        self, members: Sequence[str], newest: int, story: Sequence[str], admits: bool
    ) -> Outgoing:
        ordered = sorted(members, key=lambda each: self._members[each].state.gang_rank)
        self.generation += 1
        self.history = [*self.history, *story][-HISTORY_MAX:]
        self._roster = dict(enumerate(ordered))
        self._rebuilt_until = 0.0
        self._members = {
            member: each
            for member, each in self._members.items()
            if each.is_connected or member in ordered
        }
        ranks = []
        for member in ordered:
            known = self._members[member]
            known.generation, known.report = self.generation, None
            ranks.append(known.state.formed())
        secret = self._random_bytes(SECRET_SIZE).hex()
        self.formation = Formation(
            self.generation, 0, secret, tuple(ranks), newest, tuple(story), admits
        )
        return [
            (member, self._for_rank(self.formation, rank))
            for rank, member in self._roster.items()
        ]

    @staticmethod
    def _for_rank(formation: Formation, rank: int) -> RunMessage:
        return {**formation.message(), "rank": rank}

    def _exclude(self, member: str, reason: str) -> Outgoing:
        known = self._members[member]
        known.out = reason
        return [(member, {"out": reason})] if known.is_connected else []
