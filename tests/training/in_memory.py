"""Ranks in one thread: their collectives take turns, in any order."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shoal.training.collectives import Operation, ReceiveSegment
from shoal.training.mixed_group import MixedOperation

Array = np.ndarray[Any, np.dtype[Any]]


class Stuck(AssertionError):
    """Every rank waits for another one."""


def run(
    operations: Sequence[Operation],
    choose: Callable[[int], int] = lambda count: 0,
) -> dict[tuple[int, int], list[bytes]]:
    """Run one operation a rank to its end; return what each rank sent to each other.

    ``choose`` takes the number of ranks that can go on, and returns which one does.
    """
    sent: dict[tuple[int, int], list[bytes]] = defaultdict(list)
    waiting: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)
    actions = {rank: next(each, None) for rank, each in enumerate(operations)}
    while any(action is not None for action in actions.values()):
        ready = [
            rank
            for rank, action in actions.items()
            if action is not None
            and (not isinstance(action, ReceiveSegment) or waiting[action.source, rank])
        ]
        if not ready:
            raise Stuck(str(actions))
        rank = ready[choose(len(ready))]
        action = actions[rank]
        assert action is not None
        if isinstance(action, ReceiveSegment):
            data = waiting[action.source, rank].popleft()
            assert len(data) == len(action.into)
            action.into[:] = data
        else:
            data = bytes(action.data)
            sent[rank, action.to].append(data)
            waiting[rank, action.to].append(data)
        actions[rank] = next(operations[rank], None)
    assert not any(waiting.values()), "everything sent is received"
    return sent


def run_mixed(
    operations: Sequence[MixedOperation],
) -> tuple[list[Array], dict[int, list[tuple[int, Array]]]]:
    """Run one operation a rank; return the results, and what each rank sent to whom."""
    results: dict[int, Array] = {}
    sent: dict[int, list[tuple[int, Array]]] = defaultdict(list)
    waiting: dict[tuple[int, int], deque[Array]] = defaultdict(deque)
    sources: dict[int, int | None] = {}

    def advance(rank: int, received: Array | None) -> None:
        try:
            action = operations[rank].send(received)  # type: ignore[arg-type]  # begins
        except StopIteration as ended:
            results[rank] = ended.value
            return
        for to, array in action.sends:
            copy = np.array(array)
            sent[rank].append((to, copy))
            waiting[rank, to].append(copy)
        sources[rank] = action.source
        if action.source is None:
            advance(rank, action.sends[0][1])

    for rank in range(len(operations)):
        advance(rank, None)
    while len(results) < len(operations):
        ready = [
            (rank, source)
            for rank, source in sources.items()
            if rank not in results and source is not None and waiting[source, rank]
        ]
        if not ready:
            raise Stuck(str(sources))
        rank, source = ready[0]
        advance(rank, waiting[source, rank].popleft())
    assert not any(waiting.values()), "everything sent is received"
    return [results[rank] for rank in range(len(operations))], sent
