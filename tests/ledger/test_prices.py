import pytest

from ledger.builders import PRICES
from shoal.domain.job import Policy
from shoal.domain.money import Micros, dollars
from shoal.domain.work import JobKind
from shoal.ledger.accounts import PriceList


def test_jobs_are_free_until_an_operator_sets_prices() -> None:
    prices = PriceList()

    assert {prices.price(policy, kind) for policy in Policy for kind in JobKind} == {0}


@pytest.mark.parametrize(
    ("policy", "kind", "price"),
    [
        (Policy.FAST, JobKind.CHAT, "$0.010"),
        (Policy.FAST, JobKind.COMPLETION, "$0.010"),
        (Policy.FAST, JobKind.TASK, "$0.003"),
        (Policy.FAST, JobKind.EMBEDDING, "$0.003"),
        (Policy.CHEAP, JobKind.CHAT, "$0.005"),
        (Policy.CHEAP, JobKind.COMPLETION, "$0.005"),
        (Policy.CHEAP, JobKind.TASK, "$0.001"),
        (Policy.CHEAP, JobKind.EMBEDDING, "$0.001"),
        (Policy.FAST, JobKind.CALL, "$0.000"),
    ],
)
def test_each_kind_of_job_has_its_price(
    policy: Policy, kind: JobKind, price: str
) -> None:
    assert dollars(PRICES.price(policy, kind)) == price


def test_configured_price_applies_to_every_job() -> None:
    prices = PriceList(Micros(1), Micros(2), Micros(3), Micros(4), Micros(5))

    found = [prices.price(policy, kind) for policy in Policy for kind in JobKind]

    assert sorted(set(found)) == [1, 2, 3, 4, 5]
