import pytest

from shoal.domain.money import Micros, dollars
from shoal.domain.work import Kind, Policy
from shoal.ledger.prices import PriceList


@pytest.mark.parametrize(
    ("policy", "kind", "price"),
    [
        (Policy.FAST, Kind.CHAT, "$0.010"),
        (Policy.FAST, Kind.COMPLETION, "$0.010"),
        (Policy.FAST, Kind.TASK, "$0.003"),
        (Policy.FAST, Kind.EMBEDDING, "$0.003"),
        (Policy.CHEAP, Kind.CHAT, "$0.005"),
        (Policy.CHEAP, Kind.COMPLETION, "$0.005"),
        (Policy.CHEAP, Kind.TASK, "$0.001"),
        (Policy.CHEAP, Kind.EMBEDDING, "$0.001"),
        (Policy.FAST, Kind.CALL, "$0.000"),
    ],
)
def test_a_job_costs_what_the_documents_say(
    policy: Policy, kind: Kind, price: str
) -> None:
    assert dollars(PriceList().price(policy, kind)) == price


def test_every_job_has_the_price_that_was_set_for_it() -> None:
    prices = PriceList(Micros(1), Micros(2), Micros(3), Micros(4), Micros(5))

    found = [prices.price(policy, kind) for policy in Policy for kind in Kind]

    assert sorted(set(found)) == [1, 2, 3, 4, 5]
