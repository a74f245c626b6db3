"""Decides on which machines the script of a run begins together, without I/O.

A *round* is a start of the script: its machines are ranked from 0 in the order of their
nodes.  Until the ranks have formed their group, a machine that fails or is lost, or
whose part starts elsewhere, means another round: the others would wait for it.  After
that ranks go on without the lost ones, unless the lost one is rank 0, and the script
leaves it to rank 0 to save the model (``Rendezvous.abandoned``).

Members know their round, and say it with each connection, so that it outlives the
coordinator.
"""

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, TypeAlias

from shoal.domain.errors import PeerError
from shoal.training.run_events import Message

MEMBER, ROUND = "member", "round"
"""The first key of what a member says of itself, and of the coordinator's answer."""

NO_ROUND = -1
ABSENCE_MAX = 15.0  # seconds until the others begin without a machine that is lost
REBUILD = 15.0  # seconds after a restart of the coordinator in which members return
RETURN_MAX = 120.0  # seconds after a restart in which workers return
TOO_LATE = "the run goes on without this machine: its script admits no new ranks"


class Round(NamedTuple):
    """A start of the script on the machines of some nodes."""

    number: int
    nodes: tuple[int, ...]
    reason: str = ""

    def message(self) -> Message:
        """Return it as a message; a member that is not among the nodes ends."""
        return {ROUND: self.number, "nodes": [*self.nodes], "reason": self.reason}

    @classmethod
    def of(cls, message: Message, size: int) -> "Round":
        """Return the round in a message of a run of ``size`` nodes.

        Raises PeerError.
        """
        number, nodes = message.get(ROUND), message.get("nodes")
        if type(number) is not int or not isinstance(nodes, list | tuple):
            raise PeerError(f"{ROUND}: expected a number, and a list of nodes")
        found = tuple(each for each in nodes if type(each) is int and 0 <= each < size)
        if len(found) != len(nodes) or [*found] != sorted({*found}):
            raise PeerError(f"nodes: expected numbers below {size} in their order")
        return cls(number, found, str(message.get("reason", "")))


def machines(count: int) -> str:
    """Return a number of machines in words."""
    return f"{count} {'machine' if count == 1 else 'machines'}"


Answers: TypeAlias = list[tuple[int | None, Message]]
"""Messages, each with the node that gets it; None: all members."""


class RunRounds:
    """The rounds of one run of ``size`` nodes, which needs ``least`` of them.

    ``begun`` says whether the ranks of the present round have formed their group, and
    ``joins`` whether a new process can still join it.  ``connected`` returns the nodes
    whose members are connected.  Times are monotonic seconds.  The caller sends what
    the methods return, and calls ``expire`` at the ``deadline``.

    ``restarted_at``: the coordinator has been restarted then, and knows of no member.
    """

    def __init__(
        self,
        size: int,
        least: int,
        begun: Callable[[], bool],
        joins: Callable[[], bool],
        connected: Callable[[], Collection[int]],
        restarted_at: float | None = None,
    ) -> None:
        self.round = Round(0, (*range(size),))
        self._size, self._least = size, least
        self._begun, self._joins, self._connected = begun, joins, connected
        self._arrived: set[int] = set()  # nodes that have this round
        self._ended: set[int] = set()
        self._done = False  # whether a member has ended well
        self._waiting: set[int] = set()  # new members, while others may return
        self._settles_at: float | None = None
        self._away: set[int] = set()  # nodes whose machine is lost
        self._absent: dict[int, float] = {}  # when the round begins without a node
        if restarted_at is not None:
            self._settles_at = restarted_at + REBUILD
            self._away = {*range(size)}
            self._absent = dict.fromkeys(range(size), restarted_at + RETURN_MAX)

    @property
    def deadline(self) -> float | None:
        """When ``expire`` is due."""
        settles = [] if self._settles_at is None else [self._settles_at]
        return min([*self._absent.values(), *settles], default=None)

    @property
    def awaits_machine(self) -> bool:
        """Whether another machine may come in the place of one that is lost."""
        return bool(self._away) and not self._done

    def arrive(self, node: int, known: Round, now: float) -> Answers:
        """A member has connected; ``known`` is its round, ``NO_ROUND`` of a new one."""
        self._absent.pop(node, None)
        self._away.discard(node)
        if known.number > self.round.number:
            self.round, self._arrived = known, {*()}
        if known.number != NO_ROUND:
            self._arrived.add(node)
            news = known.number < self.round.number
            return [(node, self.round.message())] if news else self._settle(now)
        self._waiting.add(node)
        return self._settle(now)

    def lease(self, node: int) -> None:
        """A member's job has a worker."""
        self._absent.pop(node, None)
        self._away -= {node} & {*self._connected()}  # the same one as before

    def lose(self, node: int, now: float) -> None:
        """A member's job has lost its worker."""
        self._absent[node] = now + ABSENCE_MAX
        self._away.add(node)

    def end(self, node: int, *, done: bool) -> None:
        """A member's job has ended; ``done``: with a result."""
        self._absent.pop(node, None)
        self._away.discard(node)
        self._ended.add(node)
        self._done |= done

    def recover(self, node: int, *, done: bool) -> None:
        """A member's job had ended before the restart.

        Whether the others have gone on without it is known once they have connected.
        """
        self.end(node, done=done)
        if not done and self._settles_at is not None:
            self._absent[node] = self._settles_at

    def fail(self, node: int, now: float) -> Answers:
        """A member's job has failed."""
        self.end(node, done=False)
        if self._has_begun or node not in self.round.nodes:
            return []
        return self._begin_without([node], "failed before all ranks had begun", now)

    def abandon(self, nodes: Iterable[int], now: float) -> Answers:
        """Restart on these nodes: the others are lost, and the writer is one."""
        left = {*nodes}
        lost = [each for each in self.round.nodes if each not in left]
        return self._begin_without(lost, "had rank 0, which saves the model", now)

    def expire(self, now: float) -> Answers:
        """Go on without members that have not returned in time."""
        late = [each for each, at in self._absent.items() if at <= now]
        for each in late:
            del self._absent[each]
        answers = self._settle(now)
        lost = [each for each in self.round.nodes if each in late]
        lost = [each for each in lost if each not in self._connected()]
        if lost and not self._has_begun:
            why = "was lost before all ranks had begun"
            answers += self._begin_without(lost, why, now)
        return answers

    @property
    def _has_begun(self) -> bool:
        return self._done or self._begun()

    def _settle(self, now: float) -> Answers:
        """Answer new members, unless others may still return after a restart."""
        missing = {*self.round.nodes} - self._arrived - self._waiting - self._ended
        if self._settles_at is not None and now < self._settles_at and missing:
            return []
        again = self._arrived if self._settles_at is None else {*self.round.nodes}
        self._settles_at = None
        answers: Answers = []
        for node in sorted(self._waiting):
            answers += self._answer(node, now, again=node in again)
        self._waiting.clear()
        return answers

    def _answer(self, node: int, now: float, *, again: bool) -> Answers:
        """Answer a new process; ``again``: its node may have had one before."""
        present = {*self._connected()} & {*self.round.nodes} - self._waiting
        begun = self._begun()
        too_few = len(present) < (self._least if begun else 1)  # to go on without it
        late = self._done or (begun and not too_few and not self._joins())
        if node not in self.round.nodes or (again and late):
            return [(node, Round(self.round.number, (), TOO_LATE).message())]
        if again and (too_few or (not begun and node in self._arrived)):
            return self._begin(self.round.nodes, f"machine {node} restarts", now)
        self._arrived.add(node)
        return [(node, self.round.message())]

    def _begin_without(self, nodes: Collection[int], why: str, now: float) -> Answers:
        left = [each for each in self.round.nodes if each not in nodes]
        names = " and ".join(f"machine {each}" for each in nodes)
        return self._begin(left, f"{names} {why}", now)

    def _begin(self, nodes: Collection[int], reason: str, now: float) -> Answers:
        left = tuple(each for each in nodes if each not in self._ended)
        if not left or len(left) < self._least:
            return []
        self.round = Round(self.round.number + 1, left, reason)
        self._arrived = {*self._connected()} & {*left}
        self._absent = dict.fromkeys({*left} - self._arrived, now + ABSENCE_MAX)
        self._done = False
        return [(None, self.round.message())]
