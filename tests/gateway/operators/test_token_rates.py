"""Tokens a second, from the characters of answers and the reported usage."""

from shoal.coordinator.answer import Answer
from shoal.domain.facts import JobCompleted
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.outcome import Outcome, Usage
from shoal.domain.work import JobKind
from shoal.domain.worker import Offer
from shoal.gateway.operators.pool_view import TokenRates
from shoal.pool.worker import Worker

JOB, WORKER, LEASE = JobId("j"), WorkerId("w"), LeaseNumber(1)


def running() -> tuple[Worker, Answer]:
    worker = Worker(WORKER, Offer(frozenset({JobKind.CHAT})), True)
    worker.leases[JOB] = LEASE
    answer = Answer(JOB)
    answer.grant(LEASE, WORKER, continues=False)
    return worker, answer


def test_four_characters_are_taken_for_a_token() -> None:
    worker, answer = running()
    rates = TokenRates({JOB: answer}, 0.0)

    answer.append(["12345678" * 10], 0.5)

    assert rates.sample([worker], 2.0) == ({WORKER: 10.0}, 0.0)
    assert rates.sample([worker], 3.0) == ({}, 0.0)
    answer.append(["1234"], 3.5)
    assert rates.sample([worker], 4.0) == ({WORKER: 1.0}, 0.0)


def test_what_was_written_before_the_first_sample_is_no_rate() -> None:
    worker, answer = running()
    answer.append(["x" * 4000], 0.5)
    rates = TokenRates({JOB: answer}, 100.0)

    assert rates.sample([worker], 100.001) == ({}, 0.0)
    answer.append(["12345678" * 10], 100.5)
    assert rates.sample([worker], 101.001) == ({WORKER: 20.0}, 0.0)


def test_reported_usage_corrects_the_rest_of_an_answer() -> None:
    worker, answer = running()
    rates = TokenRates({JOB: answer}, 0.0)
    answer.append(["x" * 40], 0.5)
    rates.sample([worker], 1.0)
    answer.append(["x" * 40], 1.5)

    rates.on_fact(JobCompleted(JOB, LEASE, Outcome("", usage=Usage(5, 40))))
    worker.leases.clear()

    # Half of the characters are new, and with them half of the 40 tokens.
    assert rates.sample([worker], 2.0) == ({WORKER: 20.0}, 1.0)


def test_answer_that_is_over_between_two_samples_counts() -> None:
    _, answer = running()
    rates = TokenRates({JOB: answer}, 0.0)
    answer.append(["x" * 40], 0.5)

    rates.on_fact(JobCompleted(JOB, LEASE, Outcome("")))

    assert rates.sample([], 1.0) == ({WORKER: 10.0}, 1.0)


def test_answer_that_starts_over_counts_nothing_twice() -> None:
    worker, answer = running()
    rates = TokenRates({JOB: answer}, 0.0)
    answer.append(["x" * 40], 0.5)
    rates.sample([worker], 1.0)

    answer.grant(LeaseNumber(2), WORKER, continues=False)
    answer.append(["x" * 20], 1.5)

    assert rates.sample([worker], 2.0) == ({}, 0.0)
