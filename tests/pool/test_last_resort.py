"""Which jobs go to hosted providers, and when."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pool.builders import assign, job, joined, leased, pool_after
from shoal.domain.errors import CannotDo, InvalidRequest, UnknownModel
from shoal.domain.facts import (
    JobCompleted,
    JobLeased,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, JobTerms, Privacy
from shoal.domain.money import Micros
from shoal.domain.outcome import Outcome
from shoal.domain.worker import TokenPrices
from shoal.pool.hedge import hedges
from shoal.pool.job_admission import permanent_rejection, queue_rejection
from shoal.pool.last_resort import last_resorts, next_resort
from shoal.pool.open_job import OpenJob
from shoal.pool.own_offers import own_offers, own_slots
from shoal.pool.state import PoolState
from shoal.pool.worker import Worker

AFTER = 20.0  # seconds
CHEAP = TokenPrices(Micros(150_000), Micros(600_000))
DEAR = TokenPrices(Micros(2_500_000), Micros(10_000_000))


def hosted(
    name: str = "cloud", prices: TokenPrices = CHEAP, slots: int = 4
) -> WorkerJoined:
    machine = joined(name, slots=slots)
    return replace(machine, offer=replace(machine.offer, last_resort=prices))


def allowed(name: str = "j", after: float = AFTER, owner: str = "") -> Job:
    return replace(job(name, owner=owner), terms=JobTerms(hosted_after=after))


def pays(job: OpenJob, worker: Worker) -> bool:
    return True


def resort(
    pool: PoolState, now: float, can_pay: Callable[[OpenJob, Worker], bool] = pays
) -> list[JobLeased]:
    """Apply the leases that are due; return them."""
    found = []
    for lease in last_resorts(pool, now, can_pay):
        pool.apply(lease, now)
        found.append(lease)
    return found


def busy_pool(*jobs: Job) -> PoolState:
    """Return a pool whose only machine is busy, with jobs that wait."""
    pool = pool_after(joined("anna"), hosted(), JobSubmitted(job("first")))
    assign(pool)
    for each in jobs:
        pool.apply(JobSubmitted(each), 0.0)
    return pool


def test_job_goes_to_a_provider_when_no_machine_took_it_in_time() -> None:
    pool = busy_pool(allowed())
    assert assign(pool) == []
    assert resort(pool, AFTER - 1.0) == []
    assert next_resort(pool, AFTER - 1.0) == AFTER

    (lease,) = resort(pool, AFTER)

    assert lease.worker_id == "cloud"
    assert lease.reason == (
        "no machine of the pool could take it for 20 s: a hosted provider does, for "
        "$0.150 and $0.600 for a million tokens read and written"
    )
    assert [(each.reason, each.workers) for each in lease.passed_over] == [
        ("all slots busy", ("anna",))
    ]
    assert next_resort(pool, AFTER) is None
    assert not pool.resorting


def test_machine_that_is_free_in_time_takes_it() -> None:
    pool = busy_pool(allowed())
    pool.apply(JobCompleted(JobId("first"), LeaseNumber(1), Outcome("")), 5.0)

    assert assign(pool) == [("j", "anna")]
    assert resort(pool, AFTER) == []


def test_job_of_a_key_without_permission_waits_for_a_machine() -> None:
    pool = busy_pool(job())

    assert resort(pool, 1000.0) == []
    assert assign(pool) == []


def test_only_the_pool_plans_for_its_machines() -> None:
    pool = pool_after(hosted())
    pool.apply(JobSubmitted(job()), 0.0)
    pool.apply(JobSubmitted(allowed("a", 5.0)), 0.0)

    assert assign(pool) == []
    assert pool.roster.models == set()
    assert pool.roster.slots["m"] == 0


def test_private_job_never_leaves_the_pool() -> None:
    pool = busy_pool()
    pool.apply(joined("ours"), 0.0)
    pool.trusted_keys["", ""] = {"aa"}
    offer = hosted("paired").offer
    offer = replace(offer, public_key="aa", proven=True)
    pool.apply(replace(hosted("paired"), offer=offer), 0.0)
    private = JobTerms(privacy=Privacy.PRIVATE, hosted_after=0.0)
    pool.apply(JobSubmitted(replace(job(), terms=private)), 0.0)

    assert resort(pool, 1000.0) == []


def test_without_a_machine_of_the_model_it_need_not_wait() -> None:
    pool = pool_after(joined("anna", "other"), hosted(), JobSubmitted(allowed()))

    assert [each.worker_id for each in resort(pool, 0.0)] == ["cloud"]


def test_after_a_restart_machines_may_come_back_first() -> None:
    pool = pool_after(hosted())
    pool.restore(allowed(), LeaseNumber(0), 0.0, grace_until=10.0)

    assert resort(pool, 9.0) == []
    assert next_resort(pool, 9.0) == 10.0
    assert len(resort(pool, 10.0)) == 1


def test_cheapest_provider_that_can_be_paid_gets_it() -> None:
    pool = pool_after(hosted("dear", DEAR), hosted("cheap"))
    for number in range(3):
        pool.apply(JobSubmitted(allowed(f"j{number}")), 0.0)

    assert {each.worker_id for each in resort(pool, 0.0)} == {"cheap"}

    pool.apply(JobSubmitted(allowed("next")), 0.0)
    assert resort(pool, 0.0, lambda job, worker: False) == []
    found = resort(pool, 0.0, lambda job, worker: worker.id == "dear")
    assert [each.worker_id for each in found] == ["dear"]


def test_owner_without_money_costs_one_look_and_others_go_on() -> None:
    pool = pool_after(hosted())
    for number in range(10):
        pool.apply(JobSubmitted(allowed(f"p{number}", owner="poor")), 0.0)
    pool.apply(JobSubmitted(allowed("rich", owner="rich")), 0.0)
    asked: list[str] = []

    def can_pay(job: OpenJob, worker: Worker) -> bool:
        asked.append(job.job.owner)
        return job.job.owner == "rich"

    assert [each.job_id for each in resort(pool, 0.0, can_pay)] == ["rich"]
    assert asked == ["poor", "rich"]


def test_slots_of_a_provider_are_not_exceeded() -> None:
    pool = pool_after(hosted(slots=2))
    for number in range(3):
        pool.apply(JobSubmitted(allowed(f"j{number}")), 0.0)

    assert len(resort(pool, 0.0)) == 2


def test_answer_that_has_begun_goes_on_at_a_machine() -> None:
    pool = pool_after(joined("anna"), joined("bo"), hosted(), JobSubmitted(allowed()))
    pool.apply(leased("j", "anna"), 0.0)
    pool.apply(JobStarted(JobId("j"), LeaseNumber(1)), 0.0)
    pool.apply(JobRequeued(JobId("j"), LeaseNumber(1), "lost", None), 1.0)

    assert resort(pool, 1000.0) == []


def test_drained_provider_gets_nothing() -> None:
    pool = pool_after(hosted(), JobSubmitted(allowed()))
    pool.apply(WorkerDraining(WorkerId("cloud"), ""), 0.0)

    assert resort(pool, 1000.0) == []


def test_silent_job_is_not_hedged_at_a_provider() -> None:
    pool = pool_after(joined("anna"), hosted(), JobSubmitted(allowed()))
    assign(pool)

    assert hedges(pool, 100.0, 1.0) == []


def test_peers_do_not_learn_of_providers() -> None:
    pool = pool_after(hosted())

    assert own_offers(pool) == ()
    assert own_slots(pool) == 0


def test_job_is_accepted_only_if_its_key_allows_what_it_needs() -> None:
    pool = pool_after(hosted())

    assert isinstance(permanent_rejection(pool, job(), 0.0), UnknownModel)
    assert permanent_rejection(pool, allowed(), 0.0) is None
    stops = replace(job(stop=True), terms=JobTerms(hosted_after=AFTER))
    assert isinstance(permanent_rejection(pool, stops, 0.0), UnknownModel | CannotDo)


def test_long_queue_is_no_reason_to_refuse_what_a_provider_can_do() -> None:
    pool = busy_pool(*(job(f"w{number}") for number in range(100)))
    pool.speeds.job_seconds["m"] = 10.0

    assert queue_rejection(pool, job(), 1000) is not None
    assert queue_rejection(pool, allowed(), 1000) is None


def test_provider_that_leaves_is_forgotten() -> None:
    pool = pool_after(hosted(), WorkerLeft(WorkerId("cloud"), ""))

    assert not pool.roster.hosted
    assert pool.last_resorts == 0
    assert "m" not in pool.roster.models_last_seen


def test_its_speed_says_nothing_about_the_machines() -> None:
    pool = pool_after(hosted(), JobSubmitted(allowed()))
    resort(pool, 0.0)
    pool.apply(JobCompleted(JobId("j"), LeaseNumber(1), Outcome("word " * 50)), 1.0)

    assert pool.speeds.typical_pace is None
    assert not pool.speeds.job_seconds


def test_prices_are_amounts_that_somebody_could_mean() -> None:
    for prompt, completion in ((-1, 0), (0, -1), (10**11, 0)):
        with pytest.raises(InvalidRequest, match=r"up to \$10000"):
            TokenPrices(Micros(prompt), Micros(completion))


@given(st.integers(0, 10**7), st.integers(0, 10**7))
def test_cost_is_rounded_up(read: int, written: int) -> None:
    cost = CHEAP.cost(read, written)

    assert 0 <= cost * 10**6 - (read * 150_000 + written * 600_000) < 10**6
