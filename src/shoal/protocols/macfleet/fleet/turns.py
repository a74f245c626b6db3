"""Whose turn it is to be asked whether it is there.

Real nodes ask three others at random.  Ours ask the three that they have not asked for
longest, and besides every one that has missed a ping: so a node that goes is noticed as
soon in a large fleet as in a small one, once its turn has come.
"""

from collections.abc import Callable, Iterator, Sequence

from shoal.protocols.macfleet.fleet.registry import MISSES_MAX, Node, State

AT_A_TIME = 3  # nodes of a kind that are asked in one round
MISSED_AT_A_TIME = 32  # nodes that have missed a ping
AWAY_EVERY = 30.0  # seconds from one ping of a node that has failed to the next


def chosen(nodes: Sequence[Node], now: float) -> Iterator[Node]:
    """Return who of some nodes is asked in this round."""
    waiting = sorted(nodes, key=lambda node: node.asked)
    for wanted, most in _TURNS:
        yield from [node for node in waiting if wanted(node, now)][:most]


def _is_well(node: Node, now: float) -> bool:
    return node.state is State.ALIVE and not node.misses


def _has_missed(node: Node, now: float) -> bool:
    alive = node.state is State.ALIVE and node.misses > 0
    return alive or node.state is State.SUSPECTED


def _is_new(node: Node, now: float) -> bool:
    return node.state is State.SIGHTED and node.misses < MISSES_MAX


def _may_be_back(node: Node, now: float) -> bool:
    given_up = node.state is State.SIGHTED and node.misses >= MISSES_MAX
    away = given_up or node.state is State.FAILED
    return away and now - node.asked >= AWAY_EVERY


_TURNS: Sequence[tuple[Callable[[Node, float], bool], int]] = (
    (_is_well, AT_A_TIME),
    (_has_missed, MISSED_AT_A_TIME),
    (_is_new, AT_A_TIME),
    (_may_be_back, AT_A_TIME),
)
"""Who is asked in a round, and how many of them."""
