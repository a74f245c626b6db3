"""Who is in which generation, whatever happens to ranks and to the coordinator."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from shoal.domain.errors import PeerError
from shoal.training.rendezvous import (
    PATIENCE,
    REBUILD,
    SHORTAGE_CHECK,
    Rendezvous,
)

Sent = dict[str, list[Mapping[str, Any]]]


def random_bytes(count: int) -> bytes:
    return bytes(range(count))


def meeting(
    size: int, least: int = 1, awaits: Callable[[], bool] | None = None
) -> Rendezvous:
    return Rendezvous("run", size, least, random_bytes=random_bytes, awaits=awaits)


def state(rank: int, operation: int = -1, **changes: Any) -> dict[str, Any]:
    return {
        **{"gang_rank": rank, "hosts": ["10.0.0.1"], "port": 1000 + rank},
        **{"port_id": f"port-{rank}", "operation": operation, "step": 0},
        **{"admits": False, **changes},
    }


def known(generation: int, ranks: Sequence[int]) -> dict[str, Any]:
    """Return a formation, as ranks tell it to a coordinator that was restarted."""
    formed = [{**state(rank), "operation": 0} for rank in ranks]
    fields = {"ranks": formed, "secret": "s", "newest": 0, "story": [], "rank": 0}
    return {"formation": generation, **fields}


def announce(
    generation: int, rank: int, ranks: Sequence[int] = (0, 1, 2), **changes: Any
) -> dict[str, Any]:
    told = known(generation, ranks) if generation >= 0 else {}
    return {"announce": generation, **state(rank, **changes), **told}


def ended(
    generation: int, rank: int, ranks: Sequence[int] = (0, 1, 2), **changes: Any
) -> dict[str, Any]:
    report = {"reason": "it broke", "cause": "failure", "suspect": None}
    told = known(generation, ranks)
    return {"ended": generation, **report, **state(rank, **changes), **told}


def sent_to(outgoing: list[tuple[str, Mapping[str, Any]]]) -> Sent:
    sent: Sent = {}
    for member, message in outgoing:
        sent.setdefault(member, []).append(message)
    return sent


def formed(
    size: int,
    least: int = 1,
    awaits: Callable[[], bool] | None = None,
    **changes: Any,
) -> Rendezvous:
    """Return a rendezvous with members ``m0``, ``m1``, ... in generation 0."""
    rendezvous = meeting(size, least, awaits)
    for rank in range(size):
        rendezvous.receive(f"m{rank}", announce(-1, rank, **changes), 0.0)
    assert rendezvous.generation == 0
    return rendezvous


def gang_ranks(message: Mapping[str, Any]) -> list[int]:
    return [each["gang_rank"] for each in message["ranks"]]


def test_the_first_generation_waits_for_all() -> None:
    rendezvous = meeting(3)

    assert rendezvous.receive("m2", announce(-1, 2), 0.0) == []
    assert rendezvous.receive("m0", announce(-1, 0), 50.0) == []
    sent = sent_to(rendezvous.receive("m1", announce(-1, 1), 900.0))

    assert sorted(sent) == ["m0", "m1", "m2"]
    for rank, member in enumerate(sorted(sent)):
        [message] = sent[member]
        assert message["formation"] == 0
        assert message["rank"] == rank
        assert gang_ranks(message) == [0, 1, 2]
        assert message["ranks"][2]["port_id"] == "port-2"
        assert message["secret"] == random_bytes(32).hex()


def test_survivors_go_on_as_soon_as_all_have_reported() -> None:
    rendezvous = formed(3)
    rendezvous.lost("m1", 10.0)

    told = sent_to(
        rendezvous.receive(
            "m0", ended(0, 0, operation=7, step=4, suspect=1, reason="reset"), 10.0
        )
    )
    sent = sent_to(rendezvous.receive("m2", ended(0, 2, operation=6), 10.1))

    assert told == {"m2": [{"end": 0, "reason": "reset", "cause": "failure"}]}
    assert [gang_ranks(sent[each][0]) for each in ("m0", "m2")] == [[0, 2]] * 2
    assert sent["m2"][0]["rank"] == 1
    assert sent["m2"][0]["newest"] == 7
    assert sent["m2"][0]["story"] == [
        "rank 1 was lost at step 4, and rank 0 reports: reset"
    ]
    assert rendezvous.deadline is None


def test_a_rank_that_does_not_answer_is_out_when_another_waits() -> None:
    rendezvous = formed(3)

    asked = sent_to(rendezvous.receive("m0", {"late": 0}, 5.0))
    rendezvous.receive("m1", {"pong": 1}, 5.1)
    assert rendezvous.deadline == 5.0 + PATIENCE
    sent = sent_to(rendezvous.expire(5.0 + PATIENCE))

    assert asked == {"m1": [{"ping": 1}], "m2": [{"ping": 1}]}
    assert "out" in sent["m2"][0]
    assert "end" in sent["m0"][0]
    assert "end" in sent["m1"][0]
    rendezvous.receive("m0", ended(0, 0), 6.3)
    sent = sent_to(rendezvous.receive("m1", ended(0, 1), 6.3))
    assert gang_ranks(sent["m0"][0]) == [0, 1]
    late = sent_to(rendezvous.receive("m2", ended(0, 2), 60.0))
    assert late == {"m2": [{"out": "it did not answer"}]}


def test_a_slow_rank_that_answers_stays() -> None:
    rendezvous = formed(3)

    rendezvous.receive("m0", {"late": 0}, 5.0)
    rendezvous.receive("m1", {"pong": 1}, 5.1)
    rendezvous.receive("m2", {"pong": 1}, 5.1)

    assert rendezvous.deadline is None
    assert rendezvous.generation == 0


def test_a_rank_that_reports_nothing_is_out() -> None:
    rendezvous = formed(3)

    rendezvous.receive("m0", ended(0, 0), 5.0)
    rendezvous.receive("m1", ended(0, 1), 5.0)
    sent = sent_to(rendezvous.expire(5.0 + PATIENCE))

    assert sent["m2"] == [{"out": "it did not answer"}]
    assert gang_ranks(sent["m0"][0]) == [0, 1]


def test_a_run_ends_with_fewer_ranks_than_it_needs() -> None:
    rendezvous = formed(3, least=3)
    rendezvous.lost("m1", 10.0)

    rendezvous.receive("m0", ended(0, 0), 10.0)
    sent = sent_to(rendezvous.receive("m2", ended(0, 2), 10.1))

    assert (
        rendezvous.over == "2 of 3 ranks are left, and the run needs 3: rank 1 was lost"
    )
    assert sent == {each: [{"out": rendezvous.over}] for each in ("m0", "m2")}


def test_ranks_that_are_too_few_wait_while_a_machine_is_lost() -> None:
    lost = [True, False]
    rendezvous = formed(2, least=2, awaits=lambda: lost.pop(0))
    rendezvous.lost("m1", 10.0)

    assert rendezvous.receive("m0", ended(0, 0), 10.0) == []
    assert rendezvous.expire(10.0 + SHORTAGE_CHECK) == []
    assert not rendezvous.over
    sent = sent_to(rendezvous.expire(10.0 + 2 * SHORTAGE_CHECK))

    assert "1 of 2 ranks are left, and the run needs 2" in rendezvous.over
    assert sent == {"m0": [{"out": rendezvous.over}]}
    assert rendezvous.deadline is None


def test_ranks_that_differ_end_the_run_for_all() -> None:
    rendezvous = formed(2)
    report = ended(0, 0, reason="rank 1 has another hash")

    sent = sent_to(rendezvous.receive("m0", {**report, "cause": "stop"}, 1.0))

    assert sent["m1"] == [{"out": "rank 0: rank 1 has another hash"}]


def test_a_restarted_coordinator_learns_the_generation_from_its_ranks() -> None:
    rendezvous = meeting(4)

    for rank in range(3):
        assert rendezvous.receive(f"m{rank}", announce(6, rank), 0.0) == []
    rendezvous.lost("m1", 20.0)
    rendezvous.receive("m0", ended(6, 0), 20.0)
    sent = sent_to(rendezvous.receive("m2", ended(6, 2), 20.0))

    assert sent["m0"][0]["formation"] == 7
    assert gang_ranks(sent["m0"][0]) == [0, 2]


def test_after_a_restart_an_older_generation_is_not_continued() -> None:
    rendezvous = meeting(4)

    rendezvous.receive("m3", ended(5, 3, (0, 1, 2, 3)), 0.0)
    assert rendezvous.deadline == REBUILD
    sent = sent_to(rendezvous.receive("m0", announce(6, 0, (0,)), 2.0))

    assert [*sent] == ["m3"]
    assert "since generation 5" in sent["m3"][0]["out"]
    assert rendezvous.generation == 6
    assert rendezvous.deadline is None


def test_after_a_restart_ranks_that_stay_away_are_given_up() -> None:
    rendezvous = meeting(3)

    rendezvous.receive("m0", ended(4, 0), 1.0)
    rendezvous.receive("m1", ended(4, 1), 1.0)
    assert rendezvous.generation == 4
    sent = sent_to(rendezvous.expire(1.0 + REBUILD))

    assert gang_ranks(sent["m0"][0]) == [0, 1]


def test_a_formation_that_was_missed_is_sent_again() -> None:
    rendezvous = formed(2)
    rendezvous.receive("m0", ended(0, 0), 1.0)
    first = sent_to(rendezvous.receive("m1", ended(0, 1), 1.0))
    rendezvous.lost("m0", 1.1)

    again = sent_to(rendezvous.receive("m0", ended(0, 0), 1.5))

    assert again == {"m0": first["m0"]}


def test_after_a_restart_ranks_get_the_formation_that_they_missed() -> None:
    rendezvous = meeting(3)

    rendezvous.receive("m2", ended(0, 2), 1.0)
    rendezvous.receive("late", ended(0, 0), 1.0)
    sent = sent_to(rendezvous.receive("m1", announce(1, 1, (1, 2)), 1.1))

    assert sent["m2"][0]["formation"] == 1
    assert sent["m2"][0]["rank"] == 1
    assert "out" in sent["late"][0]
    assert "m1" not in sent


def test_a_new_process_is_told_that_nobody_admits_it() -> None:
    rendezvous = formed(2)
    rendezvous.lost("m1", 1.0)

    sent = sent_to(rendezvous.receive("new", announce(-1, 1, port_id="new"), 2.0))

    assert "admits no new ones" in sent["new"][0]["out"]


def test_new_processes_join_when_all_ranks_admit_them() -> None:
    rendezvous = formed(2, admits=True)
    rendezvous.lost("m1", 1.0)
    sent = sent_to(rendezvous.receive("m0", ended(0, 0, admits=True, operation=3), 1.0))
    assert gang_ranks(sent["m0"][0]) == [0]

    waiting = sent_to(rendezvous.receive("new", announce(-1, 1, port_id="new"), 2.0))
    admission = ended(1, 0, admits=True, operation=8)
    sent = sent_to(rendezvous.receive("m0", {**admission, "cause": "admission"}, 3.0))

    assert waiting == {"m0": [{"waiting": 1}]}
    assert gang_ranks(sent["new"][0]) == [0, 1]
    assert sent["new"][0]["admitted"]
    assert sent["new"][0]["newest"] == 8
    assert sent["new"][0]["story"] == ["rank 1 has joined"]


def test_the_next_generation_knows_what_a_rank_that_has_left_completed() -> None:
    rendezvous = formed(3)

    rendezvous.receive("m1", {"leave": 8}, 1.0)
    rendezvous.receive("m0", ended(0, 0, operation=7), 1.0)
    sent = sent_to(rendezvous.receive("m2", ended(0, 2, operation=7), 1.0))

    assert [sent[each][0]["newest"] for each in ("m0", "m2")] == [8, 8]


def test_of_two_new_processes_in_one_place_the_later_joins() -> None:
    rendezvous = formed(2, admits=True)
    rendezvous.lost("m1", 1.0)
    rendezvous.receive("m0", ended(0, 0, admits=True), 1.0)
    rendezvous.receive("old", announce(-1, 1, port_id="old"), 2.0)

    told = sent_to(rendezvous.receive("new", announce(-1, 1, port_id="new"), 3.0))
    admission = {**ended(1, 0, admits=True), "cause": "admission"}
    sent = sent_to(rendezvous.receive("m0", admission, 4.0))

    assert told["old"] == [{"out": "a newer process has replaced it"}]
    assert told["m0"] == [{"waiting": 1}]
    assert sorted(sent) == ["m0", "new"]
    assert [each["port_id"] for each in sent["new"][0]["ranks"]] == ["port-0", "new"]


def test_a_run_whose_ranks_are_all_lost_begins_anew_with_all() -> None:
    rendezvous = formed(2)
    rendezvous.lost("m0", 1.0)
    rendezvous.lost("m1", 1.0)

    assert rendezvous.receive("new0", announce(-1, 0, port_id="new0"), 5.0) == []
    sent = sent_to(rendezvous.receive("new1", announce(-1, 1, port_id="new1"), 9.0))

    assert sent["new0"][0]["formation"] == 1
    assert sent["new0"][0]["newest"] == -1
    old = sent_to(rendezvous.receive("m0", announce(0, 0), 10.0))
    assert "out" in old["m0"][0]


def test_ranks_that_cannot_exchange_data_lose_the_one_that_is_suspected_most() -> None:
    rendezvous = formed(3)

    for generation in range(2):
        for rank in range(3):
            report = ended(generation, rank, suspect=1 if rank != 1 else 0)
            sent = sent_to(rendezvous.receive(f"m{rank}", report, generation))

    assert "no data" in sent["m1"][0]["out"]
    assert gang_ranks(sent["m0"][0]) == [0, 2]


def test_ranks_whose_operations_are_too_far_apart_stop() -> None:
    rendezvous = formed(2)

    rendezvous.receive("m0", ended(0, 0, operation=9), 1.0)
    rendezvous.receive("m1", ended(0, 1, operation=3), 1.0)

    assert "6 operations apart" in rendezvous.over


def test_who_waits_or_comes_when_the_last_rank_has_left_is_told() -> None:
    rendezvous = formed(1, admits=True)
    rendezvous.receive("new", announce(-1, 0, port_id="new"), 1.0)

    sent = sent_to(rendezvous.receive("m0", {"leave": 3}, 2.0))

    assert sent == {"new": [{"out": "the run has ended"}]}
    later = sent_to(rendezvous.receive("next", announce(-1, 0, port_id="next"), 3.0))
    assert later == {"next": [{"out": "the run has ended"}]}


@pytest.mark.parametrize(
    "message",
    [
        "announce",
        {},
        {"announce": "0"},
        {"announce": -2, **state(0)},
        {"announce": -1, **state(3)},
        {"announce": -1, **state(0), "port": 0},
        {"announce": -1, **state(0), "hosts": None},
        {"announce": 4, **state(0)},
        {**announce(3, 0), "announce": 4},
        {"ended": 0, **state(0), "reason": "it broke", "cause": "whim"},
        {"late": True},
    ],
    ids=str,
)
def test_an_invalid_message_is_an_error_of_its_sender(message: Any) -> None:
    with pytest.raises(PeerError):
        meeting(3).receive("m0", message, 0.0)


@pytest.mark.parametrize("saves", [True, False])
def test_ranks_whose_script_leaves_it_to_rank_0_to_save_are_abandoned(
    saves: bool,
) -> None:
    rendezvous = formed(3, saves=saves)
    rendezvous.lost("m0", 1.0)
    rendezvous.receive("m1", ended(0, 1, saves=saves), 2.0)

    sent = sent_to(rendezvous.receive("m2", ended(0, 2, saves=saves), 2.0))

    assert [*rendezvous.abandoned] == ([] if saves else [1, 2])
    assert ("m1" in sent) is saves
    assert rendezvous.history == ["rank 0 was lost"]
