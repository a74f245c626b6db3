"""The order of owners in a lane, and the counts of their jobs."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from pool.builders import job
from shoal.pool.fair_shares import CHANGES_MAX, FairShares, Lane, OwnerCounts
from shoal.pool.open_job import OpenJob

OWNERS = st.sampled_from("abcde")


def waiting(owner: str, name: str = "j") -> OpenJob:
    return OpenJob(job(name, owner=owner), 0.0, 0.0, 0.0)


def order(lane: Lane) -> list[str]:
    return [owner for _, _, owner in lane.ranks()]


@given(st.lists(st.tuples(OWNERS, st.sampled_from(["run", "end", "turn", "read"]))))
def test_owners_are_sorted_by_their_shares_and_turns(
    changes: Sequence[tuple[str, str]],
) -> None:
    shares = FairShares()
    lane = Lane(shares)
    turns = {owner: turn for turn, owner in enumerate("abcd")}
    for owner, turn in turns.items():
        lane.add(waiting(owner), turn)
    for number, (owner, change) in enumerate(changes, len(turns)):
        match change:
            case "run":
                shares.add(owner, 1)
            case "end" if owner in shares.running:
                shares.add(owner, -1)
            case "turn" if owner in turns:
                turns[owner] = number
                lane.set_turn(owner, number)
            case _:
                order(lane)

    ranks = sorted((shares.running.get(o, 0), turn, o) for o, turn in turns.items())

    assert list(lane.ranks()) == ranks
    assert lane.ranks_of("ebd") == [rank for rank in ranks if rank[2] in "bd"]


def test_lane_that_was_not_read_for_long_is_sorted() -> None:
    shares = FairShares()
    lane = Lane(shares)
    for turn in range(2 * CHANGES_MAX):
        lane.add(waiting(f"{turn}"), turn)
    order(lane)
    for _ in range(CHANGES_MAX + 1):
        shares.add("0", 1)

    assert order(lane)[-1] == "0"


def test_owner_without_jobs_leaves_a_lane() -> None:
    lane = Lane(FairShares())
    jobs = [waiting("a", "1"), waiting("b", "2"), waiting("a", "3")]
    for turn, each in enumerate(jobs):
        lane.add(each, turn)

    lane.remove(jobs[0])
    assert order(lane) == ["a", "b"]
    lane.remove(jobs[2])
    assert order(lane) == ["b"]


@settings(max_examples=examples(0.4))
@given(st.lists(st.tuples(OWNERS, st.booleans())), st.integers(0, 12))
def test_jobs_are_counted_up_to_some_of_each_owner(
    changes: Sequence[tuple[str, bool]], most: int
) -> None:
    counts, jobs = OwnerCounts(), Counter[str]()
    for owner, more in changes:
        if more:
            jobs[owner] += 1
            counts.add(jobs[owner], 1)
        elif jobs[owner]:
            counts.add(jobs[owner], -1)
            jobs[owner] -= 1

    assert counts.jobs_up_to(most) == sum(min(most, each) for each in jobs.values())
