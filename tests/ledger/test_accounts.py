from collections.abc import Callable
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from harness.profiles import examples
from shoal.domain.errors import InvalidRequest
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.money import Micros
from shoal.ledger.accounts import (
    BASIS_POINTS,
    EXTERNAL,
    FEES,
    HELD,
    UNPROVEN,
    Books,
    Transfer,
    credit,
    fee_of,
    parent,
    pay_withheld,
    release,
    reserve,
    settle,
    user_account,
    withhold,
    worker_account,
)

PricedJob: TypeAlias = tuple[JobId, str, int]
"""A job, its payer and its price."""

JOB = JobId("j")
ANN = user_account("ann")
CAT = user_account("ann", "cat")
WORKER = worker_account(WorkerId("w"))


@pytest.mark.parametrize(
    ("key", "sub", "account"),
    [
        ("ann", "", "user:ann"),
        ("ann", "cat", "user:ann/cat"),
        ("ann", "a/b c%", "user:ann/a%2Fb%20c%25"),
        ("ann", "\u00fc", "user:ann/%C3%BC"),
        ("ann", "\ud800", "user:ann/%ED%A0%80"),
        ("", "", "user:"),
    ],
)
def test_account_is_named_by_key_and_user(key: str, sub: str, account: str) -> None:
    assert user_account(key, sub) == account
    assert parent(account) == (user_account(key) if sub else None)


@given(st.text(min_size=1))
def test_user_names_cannot_name_another_account(sub: str) -> None:
    assert user_account("ann", sub).count("/") == 1
    assert parent(user_account("ann", sub)) == ANN


def test_workers_have_separate_accounts() -> None:
    assert worker_account(WorkerId("w/1")) == "worker:w/1"
    assert parent("worker:w/1") is None


def test_job_transfers_its_price_from_client_to_worker() -> None:
    assert reserve(JOB, ANN, 100) == [Transfer(ANN, HELD, Micros(100), "reserved", JOB)]
    assert settle(JOB, WORKER, 100, 500) == [
        Transfer(HELD, WORKER, Micros(95), "paid", JOB),
        Transfer(HELD, FEES, Micros(5), "fee", JOB),
    ]
    assert release(JOB, ANN, 100) == [Transfer(HELD, ANN, Micros(100), "released", JOB)]


def test_job_without_a_receipt_is_paid_later() -> None:
    assert withhold(JOB, 100) == [
        Transfer(HELD, UNPROVEN, Micros(100), "withheld", JOB)
    ]
    assert pay_withheld(JOB, WORKER, 100, 5) == [
        Transfer(UNPROVEN, WORKER, Micros(95), "paid", JOB),
        Transfer(UNPROVEN, FEES, Micros(5), "fee", JOB),
    ]


@pytest.mark.parametrize(
    ("price", "share", "fee"),
    [
        (100, 0, 0),
        (100, BASIS_POINTS, 100),
        (99, 100, 0),
        (100, 100, 1),
        (1, BASIS_POINTS, 1),
    ],
)
def test_rounding_favours_the_worker(price: int, share: int, fee: int) -> None:
    assert fee_of(price, share) == fee
    assert sum(each.amount for each in settle(JOB, WORKER, price, share)) == price


@pytest.mark.parametrize(
    "made",
    [
        lambda: reserve(JOB, ANN, 0),
        lambda: settle(JOB, WORKER, 0, 500),
        lambda: withhold(JOB, 0),
        lambda: pay_withheld(JOB, WORKER, 0, 0),
        lambda: release(JOB, ANN, 0),
        lambda: credit(ANN, 0),
    ],
)
def test_free_job_transfers_nothing(made: Callable[[], list[Transfer]]) -> None:
    assert made() == []


def test_credit_comes_from_outside() -> None:
    assert credit(ANN, 5) == [Transfer(EXTERNAL, ANN, Micros(5), "credited")]
    with pytest.raises(InvalidRequest, match=r"expected an amount above \$0, got -\$0"):
        credit(ANN, -5)


def test_books_continue_from_stored_accounts() -> None:
    books = Books({ANN: -3, CAT: -2, WORKER: 5})
    books.apply(credit(ANN, 10))

    assert books.account_names() == sorted([CAT, ANN, WORKER, EXTERNAL])
    assert [books.balance(name) for name in (WORKER, EXTERNAL)] == [5, -10]
    assert (books.balance(ANN), books.total_of(ANN), books.total_of(CAT)) == (7, 5, -2)
    assert books.balance("user:nobody") == books.total_of("user:nobody") == 0
    assert books.total() == 0


def test_empty_accounts_are_forgotten() -> None:
    books = Books({WORKER: 0})
    books.apply(reserve(JOB, CAT, 60))
    books.apply(release(JOB, CAT, 60))

    assert books.account_names() == []
    assert books.total_of(ANN) == books.total() == 0


def test_users_of_a_key_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.ledger.accounts.USERS_MAX", 1)
    books = Books({})
    books.apply(reserve(JOB, CAT, 60))

    assert books.shortfall(user_account("ann", "dog"), 1) == (
        "user:ann has 1 users with an account, and this would be one more: use one of "
        "those, or another key"
    )
    assert books.shortfall(CAT, 1) is None
    assert books.shortfall(ANN, 1) is None
    assert books.shortfall(user_account("bo", "dog"), 1) is None

    books.apply(release(JOB, CAT, 60))
    assert books.shortfall(user_account("ann", "dog"), 1) is None


def test_account_without_a_budget_is_unlimited() -> None:
    assert Books({}).shortfall(ANN, 10**15) is None


def test_budget_limits_the_debt() -> None:
    books = Books({}, {ANN: 100})

    assert books.shortfall(ANN, 100) is None
    books.apply(reserve(JOB, ANN, 60))
    assert books.shortfall(ANN, 40) is None
    assert books.shortfall(ANN, 41) == (
        "user:ann has $0.00004 left to spend, and this costs $0.000041: ask for "
        "credit, or for a higher budget"
    )
    books.apply(credit(ANN, 1))
    assert books.shortfall(ANN, 41) is None


def test_zero_budget_allows_credit_only() -> None:
    books = Books({}, {ANN: 0})
    books.apply(credit(ANN, 10))

    assert books.shortfall(ANN, 10) is None
    assert books.shortfall(ANN, 11) is not None
    assert books.shortfall(ANN, 0) is None


def test_budget_of_a_key_binds_its_users() -> None:
    books = Books({}, {ANN: 100})
    books.apply(reserve(JOB, CAT, 60))
    books.apply(reserve(JOB, user_account("ann", "dog"), 30))

    refusal = books.shortfall(CAT, 11)

    assert refusal is not None
    assert refusal.startswith("user:ann has $0.00001 left")
    assert books.shortfall(ANN, 11) is not None
    assert books.shortfall(ANN, 10) is None
    assert books.shortfall(user_account("bob"), 11) is None


def test_sub_account_has_its_own_budget_as_well() -> None:
    books = Books({}, {ANN: 100, CAT: 10})

    refusal = books.shortfall(CAT, 11)

    assert refusal is not None
    assert refusal.startswith("user:ann/cat has $0.00001 left")
    assert books.shortfall(ANN, 100) is None


def test_budget_can_be_changed_and_removed() -> None:
    books = Books({ANN: -50, HELD: 50}, {ANN: 100})

    books.set_budget(ANN, 20)
    assert books.budget(ANN) == 20
    assert books.shortfall(ANN, 1) == (
        "user:ann has $0.000 left to spend, and this costs $0.000001: ask for credit, "
        "or for a higher budget"
    )
    books.set_budget(ANN, None)
    assert books.budget(ANN) is None
    assert books.shortfall(ANN, 1) is None


def test_account_whose_budget_is_removed_is_forgotten() -> None:
    books = Books({}, {ANN: 100})

    books.set_budget(ANN, None)

    assert books.account_names() == []


def test_free_job_needs_nothing_left_to_spend() -> None:
    books = Books({ANN: -50, HELD: 50}, {ANN: 20})

    assert books.shortfall(ANN, 0) is None


USERS = [
    ANN,
    CAT,
    user_account("ann", "dog"),
    user_account("bob"),
    user_account("bob", "cat"),
]
WORKERS = [WORKER, worker_account(WorkerId("v"))]
BUDGETS = {ANN: 300, CAT: 100, user_account("bob"): 0}


class Accounting(RuleBasedStateMachine):
    """Payments and credits in any valid order."""

    held: Bundle[PricedJob] = Bundle("held")
    unproven: Bundle[PricedJob] = Bundle("unproven")

    def __init__(self) -> None:
        super().__init__()
        self.books = Books({}, BUDGETS)
        self.jobs = 0
        self.open: dict[JobId, int] = {}
        self.withheld: dict[JobId, int] = {}

    @rule(target=held, payer=st.sampled_from(USERS), price=st.integers(0, 120))
    def ask(self, payer: str, price: int) -> PricedJob | MultipleResults[PricedJob]:
        if self.books.shortfall(payer, price) is not None:
            return multiple()
        self.jobs += 1
        job_id = JobId(str(self.jobs))
        self.books.apply(reserve(job_id, payer, price))
        self.open[job_id] = price
        return (job_id, payer, price)

    @rule(
        job=consumes(held),
        to=st.sampled_from(WORKERS),
        share=st.integers(0, BASIS_POINTS),
    )
    def pay(self, job: PricedJob, to: str, share: int) -> None:
        job_id, _, price = job
        self.books.apply(settle(job_id, to, price, share))
        del self.open[job_id]

    @rule(job=consumes(held))
    def give_back(self, job: PricedJob) -> None:
        job_id, payer, price = job
        self.books.apply(release(job_id, payer, price))
        del self.open[job_id]

    @rule(target=unproven, job=consumes(held))
    def keep(self, job: PricedJob) -> PricedJob:
        job_id, _, price = job
        self.books.apply(withhold(job_id, price))
        self.withheld[job_id] = self.open.pop(job_id)
        return job

    @rule(job=consumes(unproven), to=st.sampled_from(WORKERS), fee=st.integers(0, 120))
    def pay_late(self, job: PricedJob, to: str, fee: int) -> None:
        job_id, _, price = job
        self.books.apply(pay_withheld(job_id, to, price, min(fee, price)))
        del self.withheld[job_id]

    @rule(account=st.sampled_from(USERS), amount=st.integers(0, 200))
    def top_up(self, account: str, amount: int) -> None:
        self.books.apply(credit(account, amount))

    @invariant()
    def all_sum_to_zero(self) -> None:
        assert self.books.total() == 0

    @invariant()
    def budgets_hold(self) -> None:
        for account, budget in BUDGETS.items():
            mine = [name for name in USERS if account in (name, parent(name))]
            assert sum(map(self.books.balance, mine)) >= -budget

    @invariant()
    def pool_holds_prices_of_open_jobs(self) -> None:
        assert self.books.balance(HELD) == sum(self.open.values())
        assert self.books.balance(UNPROVEN) == sum(self.withheld.values())

    @invariant()
    def workers_and_pool_have_no_debt(self) -> None:
        assert all(self.books.balance(name) >= 0 for name in [*WORKERS, FEES])


Accounting.TestCase.settings = settings(
    stateful_step_count=40, max_examples=examples(0.6)
)
TestAccounting = Accounting.TestCase
