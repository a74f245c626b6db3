"""The API of accounts: balances, transfers, credits and budgets."""

from bisect import bisect_right
from typing import Annotated
from urllib.parse import unquote

import msgspec
from aiohttp import web

from shoal.domain.credentials import Scope
from shoal.domain.errors import Forbidden, InvalidRequest, NotFound
from shoal.domain.ids import WorkerId, peer_of
from shoal.domain.money import DOLLARS_MAX, MICROS
from shoal.gateway.context import AccountsGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.decoding import read_query
from shoal.gateway.http.operation import Operations
from shoal.ledger import accounts
from shoal.pool.inputs import AccountTopUp, BudgetSet
from shoal.store.ledger import PostedTransfer

api = Operations()

LISTED_MAX = 1000  # accounts, or transfers, in one response
TRANSFER_NUMBER_MAX = 2**53  # more than possible, and valid in SQL
NAME_MAX = 1024  # characters of an account's name

Amount = Annotated[int, msgspec.Meta(ge=1, le=DOLLARS_MAX * MICROS)]
Budget = Annotated[int, msgspec.Meta(ge=0, le=DOLLARS_MAX * MICROS)]


class CreditAccount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A credit in micro-dollars."""

    amount: Amount


class SetBudget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far below zero an account may go, in micro-dollars; null: without limit."""

    budget: Budget | None


class AccountQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many accounts to list, in the order of their names, ``after`` which one."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=LISTED_MAX)] = LISTED_MAX
    after: str = ""


class TransferQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many transfers to show, newest first; with a number below ``before``."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=LISTED_MAX)] = 50
    before: (
        Annotated[int, msgspec.Meta(ge=0, le=TRANSFER_NUMBER_MAX)] | msgspec.UnsetType
    ) = msgspec.UNSET


class AccountInfo(msgspec.Struct, frozen=True):
    """An account, in micro-dollars.

    ``standing`` is the balance including sub-accounts; the budget bounds it.  ``peer``
    is what the peer that the account belongs to calls itself; empty for other accounts,
    and for peers that have not connected since the start.
    """

    name: str
    peer: str
    balance: int
    standing: int
    budget: int | None


class TransferInfo(msgspec.Struct, frozen=True):
    """A transfer from one account (debit) to another (credit), in micro-dollars."""

    number: int
    at: float
    debit: str
    credit: str
    amount: int
    why: str
    job_id: str | None


class AccountDetail(AccountInfo, frozen=True):
    """An account with its latest transfers, newest first.

    ``next`` is the ``before`` of the next transfers.
    """

    transfers: list[TransferInfo]
    next: int | None


class AccountList(msgspec.Struct, frozen=True):
    """Accounts; ``total`` is the sum of all, which is zero.

    ``next`` is the ``after`` of the next page.
    """

    data: list[AccountInfo]
    total: int
    next: str | None


LATEST = TransferQuery()


@api.get("/admin/accounts", "List accounts", Scope.READ, lists=True)
async def list_accounts(
    gateway: AccountsGateway, caller: ApiCaller, query: AccountQuery
) -> AccountList:
    books = gateway.hub.books
    names = [name for name in books.account_names() if _may_see(caller, name)]
    everything = caller.has_scope(Scope.MONITOR)
    total = books.total() if everything else sum(map(books.balance, names))
    first = bisect_right(names, query.after)
    page = names[first : first + query.limit]
    more = page[-1] if first + query.limit < len(names) else None
    return AccountList([_account_info(gateway, name) for name in page], total, more)


@api.get(
    "/admin/accounts/{name}",
    "Show an account",
    Scope.READ,
    lists=True,
    query=TransferQuery,
)
async def show_account(
    gateway: AccountsGateway, request: web.Request, caller: ApiCaller
) -> AccountDetail:
    name = _account_name(request)
    if not _may_see(caller, name):
        raise Forbidden(f"{name} is not your account: use a key with the scope monitor")
    account = await _account_detail(gateway, name, read_query(request, TransferQuery))
    known = account.transfers or account.standing or account.budget is not None
    if not known and caller.has_scope(Scope.MONITOR):
        raise NotFound(
            f"the account {name} does not exist: `shoal accounts ls`, or GET "
            "/admin/accounts, lists all"
        )
    return account


@api.post("/admin/accounts/{name}/credit", "Credit an account", Scope.ADMIN)
async def credit_account(
    gateway: AccountsGateway,
    request: web.Request,
    caller: ApiCaller,
    body: CreditAccount,
) -> AccountDetail:
    name = _account_name(request, new=True)
    await gateway.hub.process(AccountTopUp(name, body.amount, caller.name))
    return await _account_detail(gateway, name)


@api.put("/admin/accounts/{name}/budget", "Set an account's budget", Scope.ADMIN)
async def set_budget(
    gateway: AccountsGateway, request: web.Request, caller: ApiCaller, body: SetBudget
) -> AccountDetail:
    name = _account_name(request, new=True)
    await gateway.hub.process(BudgetSet(name, body.budget, caller.name))
    return await _account_detail(gateway, name)


def _account_name(request: web.Request, *, new: bool = False) -> str:
    """Return the account in the path; a plain name is that of a key."""
    # From the raw path: aiohttp would decode escapes that are part of the name.
    raw = request.rel_url.raw_parts[3]
    name = unquote(raw)
    if ":" not in name and name != accounts.EXTERNAL:
        name = accounts.user_account(name)
    if len(name) > NAME_MAX or not name.isprintable():
        raise InvalidRequest(f"an account's name has at most {NAME_MAX} characters")
    if new and not name.startswith("user:"):
        raise InvalidRequest(
            f"{name}: only accounts of keys can be credited or bounded: give the name "
            "of a key, or user:KEY/USER"
        )
    return name


def _may_see(caller: ApiCaller, name: str) -> bool:
    own = accounts.user_account(caller.name)
    return caller.has_scope(Scope.MONITOR) or own in (name, accounts.parent(name))


async def _account_detail(
    gateway: AccountsGateway, name: str, query: TransferQuery = LATEST
) -> AccountDetail:
    before = None if query.before is msgspec.UNSET else query.before
    moved = await gateway.store.ledger.transfers(name, query.limit, before)
    shown = _account_info(gateway, name)
    return AccountDetail(
        **msgspec.structs.asdict(shown),
        transfers=[_transfer_info(each) for each in moved],
        next=moved[-1].number if len(moved) == query.limit else None,
    )


def _account_info(gateway: AccountsGateway, name: str) -> AccountInfo:
    books = gateway.hub.books
    peer = peer_of(WorkerId(accounts.owner_of(name)))
    return AccountInfo(
        name,
        gateway.directory.profile_of(peer).name,
        books.balance(name),
        books.total_of(name),
        books.budget(name),
    )


def _transfer_info(posted: PostedTransfer) -> TransferInfo:
    transfer = posted.transfer
    return TransferInfo(
        posted.number,
        posted.at,
        transfer.debit,
        transfer.credit,
        transfer.amount,
        transfer.why,
        transfer.job_id,
    )
