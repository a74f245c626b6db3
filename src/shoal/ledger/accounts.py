"""Double-entry accounts: each transfer has two sides, so that all balances sum to zero.

A job's price is reserved before the work: it moves from the payer to ``pool:held``.
From there it moves to the worker and the pool's fees, or back to the payer; or to
``pool:unproven``, until the worker has proved its work.  Amounts are micro-dollars.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

from shoal.domain.errors import InvalidRequest
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.job import Policy
from shoal.domain.job_kinds import FUNCTION_KINDS, TEXT_KINDS
from shoal.domain.money import Micros, dollars
from shoal.domain.work import JobKind

HELD = "pool:held"  # reserved prices of open jobs
FEES = "pool:fees"  # the pool's income
UNPROVEN = "pool:unproven"  # owed to workers that have yet to prove their work
EXTERNAL = "world"  # the source of credits

_USER = "user:"
_WORKER = "worker:"

BASIS_POINTS = 10_000  # basis points
USERS_MAX = 100_000  # sub-accounts of a key with a balance: all are in memory
FREE = Micros(0)


@dataclass(frozen=True, slots=True)
class PriceList:
    """Prices of one job each, in micro-dollars; free without an operator's prices.

    The price of a task applies to all jobs except inference and function calls.
    """

    fast_inference: Micros = FREE
    fast_task: Micros = FREE
    cheap_inference: Micros = FREE
    cheap_task: Micros = FREE
    call: Micros = FREE

    def price(self, policy: Policy, kind: JobKind) -> Micros:
        """Return the price of a job."""
        if kind in FUNCTION_KINDS:
            return self.call
        prices = {
            (Policy.FAST, True): self.fast_inference,
            (Policy.FAST, False): self.fast_task,
            (Policy.CHEAP, True): self.cheap_inference,
            (Policy.CHEAP, False): self.cheap_task,
        }
        return prices[policy, kind in TEXT_KINDS]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A positive amount that moves from ``debit`` to ``credit``."""

    debit: str
    credit: str
    amount: Micros
    why: str
    job_id: JobId | None = None

    def __post_init__(self) -> None:
        assert self.amount > 0, f"a transfer of {self.amount}"


def user_account(key: str, sub: str = "") -> str:
    """Return the account of a key, or the sub-account of one of its owner's users.

    Names of keys contain no slash, and neither do the names made from ``sub``.
    """
    if not sub:
        return f"{_USER}{key}"
    return f"{_USER}{key}/{quote(sub, safe='', errors='surrogatepass')}"


def worker_account(worker_id: WorkerId) -> str:
    """Return the account of a worker."""
    return f"{_WORKER}{worker_id}"


def owner_of(account: str) -> str:
    """Return the key, peer or worker that an account belongs to."""
    return account.removeprefix(_USER).removeprefix(_WORKER)


def parent(account: str) -> str | None:
    """Return the key's account that a sub-account belongs to; None if it is none."""
    if not account.startswith(_USER):
        return None
    key, slash, _ = account.partition("/")
    return key if slash else None


def fee_of(price: int, share: int) -> Micros:
    """Return the pool's share of a price; ``share`` is in basis points.

    The worker gets the remainder of the division.
    """
    assert 0 <= share <= BASIS_POINTS, f"a share of {share} basis points"
    return Micros(price * share // BASIS_POINTS)


def reserve(job_id: JobId, payer: str, price: int) -> list[Transfer]:
    """Reserve a job's price before the work."""
    return _transfers([(payer, HELD, price, "reserved")], job_id)


def adjust(job_id: JobId, payer: str, price: int, cost: int) -> list[Transfer]:
    """Change what is reserved for a job to what it costs, by the tokens it took."""
    if cost < price:
        return _transfers([(HELD, payer, price - cost, "released")], job_id)
    return _transfers([(payer, HELD, cost - price, "reserved")], job_id)


def settle(job_id: JobId, worker: str, price: int, fee_share: int) -> list[Transfer]:
    """Pay for a completed job; ``fee_share`` is the pool's, in basis points."""
    return _payment(HELD, job_id, worker, price, fee_of(price, fee_share))


def withhold(job_id: JobId, price: int) -> list[Transfer]:
    """Withhold a job's price until its worker has proved its work."""
    return _transfers([(HELD, UNPROVEN, price, "withheld")], job_id)


def pay_withheld(job_id: JobId, worker: str, price: int, fee: int) -> list[Transfer]:
    """Pay a withheld price after the worker proved its work; see ``fee_of``."""
    return _payment(UNPROVEN, job_id, worker, price, fee)


def give_back(job_id: JobId, payer: str, price: int) -> list[Transfer]:
    """Refund a withheld price: the worker did not prove its work."""
    return _transfers([(UNPROVEN, payer, price, "given back")], job_id)


def release(job_id: JobId, payer: str, price: int) -> list[Transfer]:
    """Release the reserved price of a job that was not completed."""
    return _transfers([(HELD, payer, price, "released")], job_id)


def credit(account: str, amount: int) -> list[Transfer]:
    """Credit an account from outside the pool.

    Raises InvalidRequest for a negative amount.
    """
    if amount < 0:
        raise InvalidRequest(f"expected an amount above $0, got {dollars(amount)}")
    return _transfers([(EXTERNAL, account, amount, "credited")], None)


def _payment(
    source: str, job_id: JobId, worker: str, price: int, fee: int
) -> list[Transfer]:
    assert 0 <= fee <= price, f"a fee of {fee} for {price}"
    return _transfers(
        [(source, worker, price - fee, "paid"), (source, FEES, fee, "fee")], job_id
    )


def _transfers(
    moves: Iterable[tuple[str, str, int, str]], job_id: JobId | None
) -> list[Transfer]:
    return [
        Transfer(debit, credit, Micros(amount), why, job_id)
        for debit, credit, amount, why in moves
        if amount
    ]


class Books:
    """The balance and the overdraft limit (budget) of every account.

    Accounts with a zero balance use no memory.  A key's budget bounds the sum of its
    account and all its sub-accounts; a sub-account may have a budget besides, and must
    keep within both.  Without a budget, an account is unbounded.  Budgets restrict new
    jobs, not transfers that are applied: they may change in between.
    """

    def __init__(
        self, balances: Mapping[str, int], budgets: Mapping[str, int] | None = None
    ) -> None:
        self._balances: dict[str, int] = {}
        self._subs: dict[str, int] = {}  # the sum of a key's sub-accounts
        self._users: Counter[str] = Counter()  # the number of a key's sub-accounts
        self._budgets = dict(budgets or {})
        for account, balance in balances.items():
            self._post(account, balance)

    def balance(self, account: str) -> Micros:
        """Return the balance of an account."""
        return Micros(self._balances.get(account, 0))

    def total_of(self, account: str) -> Micros:
        """Return the balance of an account with all its sub-accounts."""
        return Micros(self.balance(account) + self._subs.get(account, 0))

    def budget(self, account: str) -> int | None:
        """Return how far below zero ``total_of`` may go; None: unbounded."""
        return self._budgets.get(account)

    def set_budget(self, account: str, budget: int | None) -> None:
        """Set an account's budget; None removes it."""
        if budget is None:
            self._budgets.pop(account, None)
        else:
            self._budgets[account] = budget

    def account_names(self) -> list[str]:
        """Return the accounts with a balance or a budget."""
        return sorted(self._balances.keys() | self._budgets.keys())

    def total(self) -> int:
        """Return the sum of all accounts, which is zero."""
        return sum(self._balances.values())

    def apply(self, transfers: Iterable[Transfer]) -> None:
        """Post transfers."""
        for each in transfers:
            self._post(each.debit, -each.amount)
            self._post(each.credit, each.amount)

    def shortfall(self, payer: str, price: int) -> str | None:
        """Describe what ``payer`` lacks to pay a price; None if it can pay.

        The wording reaches users.
        """
        if price <= 0:
            return None
        key = parent(payer)
        if key and payer not in self._balances and self._users[key] >= USERS_MAX:
            return (
                f"{key} has {USERS_MAX} users with an account, and this would be one "
                "more: use one of those, or another key"
            )
        for account in (payer, key):
            if account is None or (budget := self._budgets.get(account)) is None:
                continue
            left = self.total_of(account) + budget
            if left < price:
                return (
                    f"{account} has {dollars(max(left, 0))} left to spend, and this "
                    f"costs {dollars(price)}: ask for credit, or for a higher budget"
                )
        return None

    def _post(self, account: str, amount: int) -> None:
        known = account in self._balances
        _add(self._balances, account, amount)
        if (key := parent(account)) is not None:
            _add(self._subs, key, amount)
            _add(self._users, key, (account in self._balances) - known)


def _add(to: dict[str, int], name: str, amount: int) -> None:
    """Add to the amount of a name; a name whose amount becomes zero is removed."""
    if there := to.pop(name, 0) + amount:
        to[name] = there
