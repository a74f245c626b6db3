"""On which machines a script begins together, whatever fails before or after."""

from typing import Any

import pytest

from shoal.domain.errors import PeerError
from shoal.training.run_rounds import (
    ABSENCE_MAX,
    NO_ROUND,
    REBUILD,
    TOO_LATE,
    Answers,
    Round,
    RunRounds,
)

NEW = Round(NO_ROUND, ())


class Run:
    """The rounds of a run, and what they ask of its rendezvous."""

    def __init__(self, size: int, least: int = 1, **options: Any) -> None:
        self.begun = self.joins = False
        self.connected: set[int] = set()
        self.rounds = RunRounds(
            size,
            least,
            lambda: self.begun,
            lambda: self.joins,
            lambda: self.connected,
            **options,
        )

    def arrive(self, node: int, known: Round = NEW, now: float = 0.0) -> Answers:
        self.connected.add(node)
        return self.rounds.arrive(node, known, now)


def started(size: int, least: int = 1) -> Run:
    run = Run(size, least)
    for node in range(size):
        assert run.arrive(node) == [(node, run.rounds.round.message())]
    return run


def nodes_of(answers: Answers) -> list[tuple[int | None, Any]]:
    return [(node, message["nodes"]) for node, message in answers]


def test_others_begin_without_a_member_that_fails_before_all_have_begun() -> None:
    run = started(3, least=2)

    assert nodes_of(run.rounds.fail(1, 0.0)) == [(None, [0, 2])]
    assert run.rounds.fail(2, 0.0) == []  # too few: the gang ends


def test_others_go_on_without_a_member_once_all_have_begun() -> None:
    run = started(3)
    run.begun = True

    assert run.rounds.fail(1, 0.0) == []


def test_others_begin_without_a_member_whose_worker_stays_away() -> None:
    run = started(2)
    run.connected = {1}
    run.rounds.lose(0, now=5.0)
    assert run.rounds.deadline == 5.0 + ABSENCE_MAX

    answers = run.rounds.expire(5.0 + ABSENCE_MAX)

    assert nodes_of(answers) == [(None, [1])]
    assert run.arrive(0) == [(0, Round(1, (), TOO_LATE).message())]


@pytest.mark.parametrize("back", ["lease", "connected"])
def test_a_member_whose_worker_is_back_or_that_is_connected_stays(back: str) -> None:
    run = started(2)
    run.rounds.lose(0, now=5.0)
    if back == "lease":
        run.connected = {1}
        run.rounds.lease(0)

    assert run.rounds.expire(5.0 + ABSENCE_MAX) == []
    assert run.rounds.deadline is None


def test_all_begin_anew_with_a_part_that_starts_elsewhere() -> None:
    run = started(2)

    assert nodes_of(run.arrive(0)) == [(None, [0, 1])]
    assert run.rounds.round.number == 1


@pytest.mark.parametrize("joins", [True, False])
def test_a_part_that_starts_late_begins_only_if_it_can_join(joins: bool) -> None:
    run = started(2)
    run.begun, run.joins = True, joins

    assert nodes_of(run.arrive(1)) == [(1, [0, 1] if joins else [])]


def test_all_begin_anew_with_a_part_without_which_they_are_too_few() -> None:
    run = started(3, least=3)
    run.begun, run.connected = True, {0, 2}
    run.rounds.lose(1, now=5.0)
    assert run.rounds.expire(5.0 + ABSENCE_MAX) == []
    run.rounds.lease(1)
    assert run.rounds.awaits_machine

    assert nodes_of(run.arrive(1)) == [(None, [0, 1, 2])]
    assert not run.rounds.awaits_machine


@pytest.mark.parametrize("end", ["back", "failed", "done"])
def test_a_run_awaits_no_machine_in_the_place_of_one_that_is_not_lost(end: str) -> None:
    run = started(2)
    run.begun = True
    run.rounds.lose(1, now=5.0)
    assert run.rounds.awaits_machine

    match end:
        case "back":
            run.rounds.lease(1)
        case "failed":
            run.rounds.fail(1, 6.0)
        case _:
            run.rounds.end(0, done=True)
    assert not run.rounds.awaits_machine


def test_all_begin_anew_when_all_are_lost() -> None:
    run = started(2)
    run.begun, run.connected = True, set()

    assert nodes_of(run.arrive(1)) == [(None, [0, 1])]
    run.begun = False
    assert run.rounds.deadline == ABSENCE_MAX
    assert nodes_of(run.arrive(0)) == [(0, [0, 1])]


def test_a_part_does_not_begin_once_another_is_done() -> None:
    run = started(2)
    run.rounds.end(0, done=True)

    assert nodes_of(run.arrive(1)) == [(1, [])]


def test_ranks_without_their_writer_begin_anew() -> None:
    run = started(3)
    run.begun = True

    assert nodes_of(run.rounds.abandon([1, 2], 0.0)) == [(None, [1, 2])]


def test_a_member_that_missed_a_round_gets_it() -> None:
    run = started(3)
    first = run.rounds.round
    run.rounds.fail(1, 0.0)

    assert run.arrive(2, first) == [(2, run.rounds.round.message())]


def test_a_restarted_coordinator_learns_the_round_before_it_answers_others() -> None:
    run = Run(3, restarted_at=100.0)
    run.rounds.recover(1, done=True)
    assert run.arrive(0, now=101.0) == []

    answers = run.arrive(2, Round(4, (0, 2)), now=102.0)

    assert run.rounds.round == Round(4, (0, 2))
    assert nodes_of(answers) == [(0, [])]


@pytest.mark.parametrize(
    ("known", "begin"),
    [(Round(0, (0, 1, 2)), [(None, [0, 2])]), (Round(1, (0, 2)), [])],
)
def test_a_restarted_coordinator_begins_without_who_failed_unless_others_have(
    known: Round, begin: list[Any]
) -> None:
    run = Run(3, restarted_at=100.0)
    run.rounds.recover(1, done=False)
    for node in (0, 2):
        assert run.arrive(node, known, now=101.0) == []

    assert nodes_of(run.rounds.expire(100.0 + REBUILD)) == begin
    assert nodes_of(run.arrive(2, now=200.0)) == [(None, [0, 2])]  # none is done


def test_a_restarted_coordinator_does_not_wait_for_ever() -> None:
    run = Run(2, restarted_at=100.0)
    run.begun = True
    run.arrive(0, now=101.0)
    assert run.rounds.deadline == 100.0 + REBUILD

    assert nodes_of(run.rounds.expire(100.0 + REBUILD)) == [(None, [0, 1])]


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"round": "1", "nodes": []},
        {"round": 1, "nodes": 3},
        {"round": 1, "nodes": [1, 0]},
        {"round": 1, "nodes": [0, 0]},
        {"round": 1, "nodes": [-1]},
        {"round": 1, "nodes": [2]},
        {"round": 1, "nodes": [True]},
    ],
)
def test_invalid_rounds_are_refused(message: Any) -> None:
    with pytest.raises(PeerError):
        Round.of(message, 2)
