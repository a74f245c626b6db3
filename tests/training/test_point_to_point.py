"""Sends and receives over sockets, beside collectives."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from harness.speed import scaled
from shoal.training.group import RankGroup
from shoal.training.rank_port import GroupEnded
from training.test_group import LIMIT, groups, together

LARGE = 3 << 20  # numbers; more than is buffered


@pytest.mark.parametrize("encrypts", [False, True], ids=["local", "tls"])
def test_transfers_are_independent_of_each_other_and_of_collectives(
    encrypts: bool,
) -> None:
    def exchange(group: RankGroup) -> list[list[float]]:
        rank = group.place.rank
        other = 1 - rank
        heard = [np.zeros(size) for size in (1, LARGE, 1)]
        own = np.full(LARGE, 10.0 * rank + 1)
        waits: list[Callable[[], object]] = [
            partial(group.receive, heard[0], other, 0),
            partial(group.receive, heard[1], None, 1),
            partial(group.send, own, other, 1),
            partial(group.receive, heard[2], other, 2),
        ]
        threads = [threading.Thread(target=each) for each in waits]
        for thread in threads:
            thread.start()
        assert group.all_reduce(np.ones(1)) == 2, "none of the receives is in its way"
        for tag in (2, 0):  # the other way round
            group.send(np.array([10.0 * rank + tag]), other, tag)
        for thread in threads:
            thread.join(LIMIT)
        return [np.unique(each).tolist() for each in heard]

    with groups(2, encrypts=encrypts, local=not encrypts) as members:
        found = together(members, exchange)

    assert found == [[[10.0], [11.0], [12.0]], [[0.0], [1.0], [2.0]]]


def test_a_rank_may_close_when_it_has_sent_all() -> None:
    with groups(3) as members:
        members[0].send(np.array([5]), 1)
        members[0].close()

        assert members[1].receive(np.array([0]), 0) == [5]
        sent = threading.Thread(target=members[2].send, args=(np.array([6]), 1))
        sent.start()
        assert members[1].receive(np.array([0])) == [6]
        sent.join()


def lost(group: RankGroup, other: RankGroup) -> str:
    other.abort("killed")
    return "rank 1: "


def late(group: RankGroup, other: RankGroup) -> str:
    return "rank 1 is late: an operation took longer than"


def of_another_size(group: RankGroup, other: RankGroup) -> str:
    other.send(np.zeros(2), 0)
    return "rank 1: a message of 16 bytes, expected 8"


@pytest.mark.parametrize("cause", [lost, late, of_another_size])
def test_a_receive_ends_with_the_cause(cause: Any) -> None:
    with groups(2, timeout=scaled(1.0) if cause is late else LIMIT) as [group, other]:
        problem = cause(group, other)

        with pytest.raises(GroupEnded, match=problem):
            group.receive(np.zeros(1), 1)
        with pytest.raises(GroupEnded, match=problem):
            group.barrier()


def test_a_rank_that_is_lost_ends_what_waits_for_it() -> None:
    with groups(3) as members:
        for pair in [(0, 1), (1, 0)]:  # they are connected
            members[pair[0]].send(np.zeros(1), pair[1])
            members[pair[1]].receive(np.zeros(1), pair[0])

        def train(group: RankGroup) -> str:
            if group is members[1]:
                group.abort("killed")
                return ""
            with pytest.raises(GroupEnded) as ended:
                group.receive(np.zeros(1), 1)
            return str(ended.value)

        assert all("rank 1: " in each for each in together(members, train)[::2])
