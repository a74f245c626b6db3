"""Accounts in double entry: what one gets, another gives, so that all sum to zero.

A job's price is reserved before the work: it goes from who asked to ``pool:held``.
From there it goes to the worker and the pool's fees, or back; or to ``pool:unproven``,
until the worker has proved that the work was its own.  Amounts are micro-dollars.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

from shoal.domain.errors import InvalidRequest
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.money import Micros, dollars

HELD = "pool:held"  # what jobs that have not ended will cost
FEES = "pool:fees"  # what the pool keeps
UNPROVEN = "pool:unproven"  # what workers get once they have proved their work
EXTERNAL = "world"  # whence credit comes

_USER = "user:"
_WORKER = "worker:"

BASIS_POINTS = 10_000  # basis points
USERS_MAX = 100_000  # sub-accounts of a key with something on them: all are in memory


@dataclass(frozen=True, slots=True)
class Transfer:
    """An amount, more than zero, that goes from ``debit`` to ``credit``."""

    debit: str
    credit: str
    amount: Micros
    why: str
    job_id: JobId | None = None

    def __post_init__(self) -> None:
        assert self.amount > 0, f"a transfer of {self.amount}"


def user_account(key: str, sub: str = "") -> str:
    """Return the account of a key, or of somebody for whom its owner asks.

    There are no slashes in the names of keys, and none in what comes of ``sub``.
    """
    if not sub:
        return f"{_USER}{key}"
    return f"{_USER}{key}/{quote(sub, safe='', errors='surrogatepass')}"


def worker_account(worker_id: WorkerId) -> str:
    """Return the account of a worker."""
    return f"{_WORKER}{worker_id}"


def parent(account: str) -> str | None:
    """Return the key's account to which a sub-account belongs; None if it is none."""
    if not account.startswith(_USER):
        return None
    key, slash, _ = account.partition("/")
    return key if slash else None


def fee_of(price: int, share: int) -> Micros:
    """Return the pool's part of a price; ``share`` is in basis points.

    What cannot be divided is the worker's.
    """
    assert 0 <= share <= BASIS_POINTS, f"a share of {share} basis points"
    return Micros(price * share // BASIS_POINTS)


def reserve(job_id: JobId, payer: str, price: int) -> list[Transfer]:
    """Set a job's price aside, before the work."""
    return _transfers([(payer, HELD, price, "reserved")], job_id)


def settle(job_id: JobId, worker: str, price: int, fee_share: int) -> list[Transfer]:
    """Pay for a job that was done; ``fee_share`` is the pool's, in basis points."""
    return _payment(HELD, job_id, worker, price, fee_of(price, fee_share))


def withhold(job_id: JobId, price: int) -> list[Transfer]:
    """Keep what a job costs until its worker has proved that the work was its own."""
    return _transfers([(HELD, UNPROVEN, price, "withheld")], job_id)


def pay_withheld(job_id: JobId, worker: str, price: int, fee: int) -> list[Transfer]:
    """Pay for a job whose worker has proved its work since; see ``fee_of``."""
    return _payment(UNPROVEN, job_id, worker, price, fee)


def give_back(job_id: JobId, payer: str, price: int) -> list[Transfer]:
    """Give back what a job cost whose worker turned out to have proved nothing."""
    return _transfers([(UNPROVEN, payer, price, "given back")], job_id)


def release(job_id: JobId, payer: str, price: int) -> list[Transfer]:
    """Give back what was set aside for a job that was not done."""
    return _transfers([(HELD, payer, price, "released")], job_id)


def credit(account: str, amount: int) -> list[Transfer]:
    """Top up an account from outside.

    Raises InvalidRequest for less than nothing.
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
    """What every account has, and how far below zero it may go.

    Accounts on which there is nothing take no room, whatever went through them.
    A key's budget bounds the sum of its account and all its sub-accounts; a sub-account
    may have one of its own as well, and is bound by both.  Without, there is no bound.
    Budgets bind what is asked, not what is applied: they may change meanwhile.
    """

    def __init__(
        self, balances: Mapping[str, int], budgets: Mapping[str, int] | None = None
    ) -> None:
        self._balances: dict[str, int] = {}
        self._subs: dict[str, int] = {}  # what the sub-accounts of a key have in all
        self._users: Counter[str] = Counter()  # how many those are
        self._budgets = dict(budgets or {})
        for account, balance in balances.items():
            self._post(account, balance)

    def balance(self, account: str) -> Micros:
        """Return what an account has."""
        return Micros(self._balances.get(account, 0))

    def total_of(self, account: str) -> Micros:
        """Return what an account and all its sub-accounts have."""
        return Micros(self.balance(account) + self._subs.get(account, 0))

    def budget(self, account: str) -> int | None:
        """Return how far below zero ``standing`` may go; None: without bound."""
        return self._budgets.get(account)

    def set_budget(self, account: str, budget: int | None) -> None:
        """Give an account a budget; None: it has none any longer."""
        if budget is None:
            self._budgets.pop(account, None)
        else:
            self._budgets[account] = budget

    def account_names(self) -> list[str]:
        """Return the accounts that have or owe something, or that are bounded."""
        return sorted(self._balances.keys() | self._budgets.keys())

    def total(self) -> int:
        """Return the sum of all accounts, which is zero."""
        return sum(self._balances.values())

    def apply(self, transfers: Iterable[Transfer]) -> None:
        """Post transfers."""
        for each in transfers:
            self._post(each.debit, -each.amount)
            self._post(each.credit, each.amount)

    def why_unaffordable(self, payer: str, price: int) -> str | None:
        """Say why ``payer`` cannot afford a price; None if it can.

        The wording reaches users.
        """
        if price <= 0:
            return None
        key = parent(payer)
        if key and payer not in self._balances and self._users[key] >= USERS_MAX:
            return (
                f"{key} has {USERS_MAX} users with something on their accounts, and "
                "this would be one more: ask for those, or under another key"
            )
        for account in (payer, key):
            if account is None or (budget := self._budgets.get(account)) is None:
                continue
            left = self.total_of(account) + budget
            if left < price:
                return (
                    f"{account} has {dollars(max(left, 0))} left to spend, and this "
                    f"costs {dollars(price)}: have it credited, or its budget raised"
                )
        return None

    def _post(self, account: str, amount: int) -> None:
        known = account in self._balances
        _add(self._balances, account, amount)
        if (key := parent(account)) is not None:
            _add(self._subs, key, amount)
            _add(self._users, key, (account in self._balances) - known)


def _add(to: dict[str, int], name: str, amount: int) -> None:
    """Add to what stands under a name; what comes to nothing is forgotten."""
    if there := to.pop(name, 0) + amount:
        to[name] = there
