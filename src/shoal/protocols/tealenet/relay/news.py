"""Who came and left, as it is told to all others.

Everybody is told of everybody, so what there is to tell is gathered for a moment: each
link then has one write, and where many are to be told, other messages get their turn.
"""

from collections.abc import Collection, Sequence

from shoal.protocols.crowd import Spread
from shoal.protocols.tealenet.relay.nodes import Node

GATHER = 0.02  # seconds for which news are gathered
GATHER_EACH = 0.0001  # seconds for each node, where that is more
NEWS_MAX = 1024  # news that are gathered before they are told at once
TOLD_AT_ONCE = 500  # links


class News:
    """What is still to be told, and to whom of ``nodes``, by the time ``due``."""

    def __init__(self, nodes: Collection[Node]) -> None:
        self._nodes = nodes
        self._next: list[str] = []
        self._telling: tuple[str, ...] = ()
        self._waiting: list[tuple[int, int]] = []  # links, and what is news to them
        self.due: float | None = None

    def add(self, text: str, now: float) -> None:
        """Have something told to all nodes that are there by now."""
        self._next.append(text)
        if self.due is None:
            self.due = self._due(now)
        if len(self._next) >= NEWS_MAX:
            self.due = now

    def skip(self, node: Node) -> None:
        """Have a node not told what there is by now, for it has come since."""
        node.told = len(self._next)

    def tell(self, now: float) -> Sequence[Spread]:
        """Tell some of those who have yet to hear it."""
        if not self._waiting:
            self._telling, self._next = tuple(self._next), []
            for node in self._nodes:
                if node.told < len(self._telling):
                    self._waiting.append((node.link, node.told))
                node.told = 0
        some = self._waiting[:TOLD_AT_ONCE]
        del self._waiting[:TOLD_AT_ONCE]
        if self._waiting:
            self.due = now
        else:
            self.due = self._due(now) if self._next else None
        return (Spread(self._telling, some),) if some else ()

    def _due(self, now: float) -> float:
        return now + max(GATHER, GATHER_EACH * len(self._nodes))
