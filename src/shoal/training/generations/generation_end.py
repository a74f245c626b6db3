"""Decides what follows from the reports of ranks whose generation has ended.

Ranks that miss another one end their connections, so that all of them fail, and each
blames the one that it waited for.  Reports are compared here, so that the rank that
failed first is named.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal.training.generations import messages


@dataclass(slots=True)
class RunMember:
    """A process that has announced itself."""

    state: messages.RankState
    generation: int
    is_connected: bool = True
    lost_at: float = 0.0
    report: messages.EndReport | None = None  # of the present generation
    out: str = ""  # why it takes no part any more

    @property
    def is_fresh(self) -> bool:
        return self.generation == messages.NO_GENERATION and not self.out


class GenerationEnd:
    """The end of a generation: of its ``roster``, by rank, who has ``reported``."""

    def __init__(
        self,
        members: Mapping[str, RunMember],
        roster: Sequence[str],
        reported: Sequence[str],
    ) -> None:
        self.reported = [*reported]
        self._members = members
        self._roster = roster
        self._reports = {
            members[each].state.gang_rank: report
            for each in reported
            if (report := members[each].report) is not None
        }

    @property
    def admits(self) -> bool:
        """Whether the generation has ended to admit new ranks."""
        return self._causes() == {messages.EndCause.ADMISSION}

    @property
    def newest(self) -> int:
        """The last operation that one of them has completed."""
        return max(each.operation for each in self._states())

    def is_fruitless(self, formed: int | None) -> bool:
        """Return whether all ranks are present and no operation was completed.

        ``formed`` is the newest operation when the generation began; None: unknown.
        """
        complete = len(self.reported) == len(self._roster)
        return (
            complete
            and formed == self.newest
            and messages.EndCause.ADMISSION not in self._causes()
        )

    @property
    def has_writer(self) -> bool:
        """Whether one of them saves the model: rank 0, or the lowest that is left."""
        return any(each.saves or not each.gang_rank for each in self._states())

    def drop_most_suspected(self) -> str:
        """Remove the member that most others suspect, and return it."""
        by_gang_rank = {
            self._members[each].state.gang_rank: each for each in self.reported
        }
        named = Counter(
            by_gang_rank[each.suspect]
            for each in self._reports.values()
            if each.suspect in by_gang_rank
        )
        dropped = named.most_common(1)[0][0] if named else self.reported[-1]
        self.reported.remove(dropped)
        return dropped

    def fresh(self) -> Mapping[int, str]:
        """Return the members that can be admitted, by their gang ranks."""
        taken = {each.gang_rank for each in self._states()}
        return {
            each.state.gang_rank: member
            for member, each in self._members.items()
            if each.is_fresh and each.state.gang_rank not in taken
        }

    def shortage(self, size: int, least: int, story: Sequence[str]) -> str:
        """Return why those who have reported are too few; empty: they are not."""
        if len(self.reported) >= least:
            return ""
        return (
            f"{len(self.reported)} of {size} ranks are left, and the run needs "
            f"{least}: {'; '.join(story)}"
        )

    def difference(self) -> str:
        """Return why those who have reported cannot go on together; empty: they can."""
        apart = self.newest - min(each.operation for each in self._states())
        if apart > 1:
            return f"the ranks are {apart} operations apart: their programs differ"
        return ""

    def story(self) -> Iterator[str]:
        """Say which ranks failed, the first one first, and how others noticed it.

        Reports of connected ranks are included only if no rank is missing.
        """
        missing = [each for each in self._roster if each not in self.reported]
        missing.sort(key=lambda each: self._members[each].lost_at)
        furthest = max(self._states(), key=lambda state: state.operation)
        at = f" at step {furthest.step}" if furthest.step else ""
        for member in missing:
            known = self._members[member]
            rank = known.state.gang_rank
            noticed = [
                f", and rank {by} reports: {report.reason}"
                for by, report in self._reports.items()
                if report.suspect == rank
            ]
            how = f"is out{at}: {known.out}" if known.out else f"was lost{at}"
            yield f"rank {rank} {how}{''.join(noticed[:1])}"
        if not missing:
            for by, report in [*self._reports.items()][:1]:
                if report.cause is messages.EndCause.FAILURE:
                    yield f"rank {by} reports: {report.reason}"

    def _causes(self) -> set[messages.EndCause]:
        return {each.cause for each in self._reports.values()}

    def _states(self) -> Sequence[messages.RankState]:
        return [self._members[each].state for each in self.reported]
