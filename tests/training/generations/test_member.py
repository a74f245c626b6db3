"""What a rank says to the rendezvous, and when."""

from typing import Any

from shoal.training.generations.member import (
    BEAT,
    LATE_FIRST,
    LATE_INTERVAL,
    LATE_MIN,
    SAMPLES_MIN,
    GenerationMember,
)
from shoal.training.generations.messages import (
    EndCause,
    EndReport,
    Formation,
    FormedRank,
    RankState,
)


def formation(generation: int, **changes: Any) -> dict[str, Any]:
    ranks = [
        FormedRank(rank, ("10.0.0.1",), 1, str(rank), operation, 7)
        for rank, operation in enumerate((4, 3))
    ]
    formed = Formation(generation, 1, "secret", ranks, newest=4).message()
    return {**formed, **changes}


def member(generation: int = 0) -> GenerationMember:
    member = GenerationMember(RankState(1, ("10.0.0.1",), 1, "1"))
    member.receive(formation(generation))
    return member


def ended(message: Any) -> tuple[int, str, str]:
    return message["ended"], message["reason"], message["cause"]


def test_a_rank_announces_itself_until_it_has_a_generation() -> None:
    waiting = GenerationMember(RankState(1, ("10.0.0.1",), 1, "1"))

    [greeting] = waiting.greeting()
    assert greeting["announce"] == -1
    assert waiting.tick(0.0) == ()
    assert waiting.tick(BEAT) == (greeting,)
    waiting.receive(formation(3))
    assert waiting.tick(3 * BEAT) == ()
    [greeting] = waiting.greeting()
    assert greeting["announce"] == 3
    assert Formation.of(greeting) == Formation.of(formation(3))
    assert waiting.operation == 4, "a rank that joins begins after the newest one"


def test_the_end_is_reported_at_once_by_a_rank_that_computes() -> None:
    computes = member()

    reaction = computes.receive({"end": 0, "reason": "lost", "cause": "failure"})

    assert reaction.end == "lost"
    assert [*map(ended, reaction.send)] == [(0, "lost", "failure")]
    assert computes.formation is None
    again = computes.receive({"end": 0, "reason": "lost", "cause": "failure"})
    assert again == ((), "")


def test_the_end_is_reported_once_by_an_operation_that_fails() -> None:
    runs = member()
    runs.begin("key", 0.0)

    reaction = runs.receive({"end": 0, "reason": "lost", "cause": "failure"})
    reports = runs.fail(EndReport("rank 0: reset", suspect=0))

    assert reaction == ((), "lost")
    assert [*map(ended, reports)] == [(0, "rank 0: reset", "failure")]
    assert reports[0]["suspect"] == 0


def test_an_operation_that_completes_nevertheless_counts() -> None:
    runs = member()
    before = runs.operation
    runs.begin("key", 0.0)
    runs.receive({"end": 0, "reason": "lost", "cause": "failure"})

    [report] = runs.complete(0.1)

    assert ended(report) == (0, "lost", "failure")
    assert report["operation"] == before + 1


def test_an_admission_is_reported_by_each_rank_itself() -> None:
    runs = member()

    end: Any = {"end": 0, "reason": "new ranks", "cause": EndCause.ADMISSION.value}

    assert runs.receive(end) == ((), "")
    assert runs.formation is not None


def test_deadlines_follow_the_median_of_an_operation() -> None:
    runs = member()
    runs.begin("slow", 0.0)
    assert runs.tick(LATE_FIRST - 0.1) == ()
    assert runs.tick(LATE_FIRST) == ({"late": 0},)
    assert runs.tick(LATE_FIRST + 0.1) == ()
    assert runs.tick(LATE_FIRST + LATE_INTERVAL) == ({"late": 0},)
    runs.complete(10.0)
    now = 10.0
    for _ in range(SAMPLES_MIN):
        runs.begin("quick", now)
        runs.complete(now := now + 0.0625)
        runs.begin("slow", now)
        runs.complete(now := now + 1.0)

    runs.begin("quick", now)
    assert runs.tick(now + LATE_MIN) == ({"late": 0},)
    runs.complete(now)
    runs.begin("slow", now)
    assert runs.tick(now + 7.9) == ()
    assert runs.tick(now + 8.0) == ({"late": 0},)


def test_transfers_are_late_as_operations_are() -> None:
    sends = member()

    assert sends.tick(10.0) == ()
    assert sends.tick(9.9 + LATE_FIRST, transfers=True) == ()
    assert sends.tick(10.0 + LATE_FIRST, transfers=True) == ({"late": 0},)
    assert sends.tick(10.1 + LATE_FIRST, transfers=True) == ()
    assert sends.tick(20.0, transfers=False) == ()


def test_a_rank_that_is_out_says_nothing_more() -> None:
    out = member()

    assert out.receive({"out": "it did not answer"}).end == "it did not answer"
    assert out.out == "it did not answer"
    assert out.receive(formation(1)) == ((), "")
    assert out.receive({"ping": 3}) == ((), "")
    assert out.tick(100.0) == ()
    assert out.greeting() == ()
