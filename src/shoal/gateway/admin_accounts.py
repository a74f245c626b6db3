"""Accounts over HTTP: what is on them, what moved, and topping them up."""

from functools import partial
from typing import Annotated
from urllib.parse import unquote

import msgspec
from aiohttp import web

from shoal.domain.credentials import Scope
from shoal.domain.errors import Forbidden, InvalidRequest, NotFound
from shoal.domain.money import DOLLARS_MAX, MICROS
from shoal.gateway.access import Caller
from shoal.gateway.decoding import decode
from shoal.gateway.parts import Gateway
from shoal.gateway.respond import json_answer
from shoal.ledger import accounts
from shoal.pool.stimuli import Bounded, Funded
from shoal.store.entries import Posted

TRANSFERS_SHOWN = 50
NAME_MAX = 1024  # characters of an account's name

Amount = Annotated[int, msgspec.Meta(ge=1, le=DOLLARS_MAX * MICROS)]
Budget = Annotated[int, msgspec.Meta(ge=0, le=DOLLARS_MAX * MICROS)]


class Credit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much an account is given, in micro-dollars."""

    amount: Amount


class Limit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far below zero an account may go, in micro-dollars; null: without limit."""

    budget: Budget | None


class AccountShown(msgspec.Struct, frozen=True):
    """An account, in micro-dollars.

    ``standing`` is the balance with those of its sub-accounts, which is what the budget
    bounds.
    """

    name: str
    balance: int
    standing: int
    budget: int | None


class TransferShown(msgspec.Struct, frozen=True):
    """What went from one account (debit) to another (credit), in micro-dollars."""

    number: int
    at: float
    debit: str
    credit: str
    amount: int
    why: str
    job_id: str | None


class AccountDetail(AccountShown, frozen=True):
    """An account with what moved last, the newest first."""

    transfers: list[TransferShown]


class AccountList(msgspec.Struct, frozen=True):
    """All accounts; ``total`` is their sum, which is zero."""

    data: list[AccountShown]
    total: int


_credit = msgspec.json.Decoder(Credit)
_limit = msgspec.json.Decoder(Limit)


def routes(gateway: Gateway) -> list[web.RouteDef]:
    """Return the paths of this face."""
    return [
        web.get("/admin/accounts", partial(_list, gateway)),
        web.get("/admin/accounts/{name}", partial(_show, gateway)),
        web.post("/admin/accounts/{name}/credit", partial(_top_up, gateway)),
        web.put("/admin/accounts/{name}/budget", partial(_bound, gateway)),
    ]


async def _list(gateway: Gateway, request: web.Request) -> web.Response:
    caller = await gateway.access.admit(request, Scope.READ)
    books = gateway.hub.books
    names = [name for name in books.names() if _may_see(caller, name)]
    everything = caller.may(Scope.ADMIN)
    total = books.total() if everything else sum(map(books.balance, names))
    return json_answer(AccountList([_shown(gateway, name) for name in names], total))


async def _show(gateway: Gateway, request: web.Request) -> web.Response:
    caller = await gateway.access.admit(request, Scope.READ)
    name = _name(request)
    if not _may_see(caller, name):
        raise Forbidden(f"{name} is not yours: this takes a key with the scope admin")
    account = await _detail(gateway, name)
    known = account.transfers or account.standing or account.budget is not None
    if not known and caller.may(Scope.ADMIN):
        raise NotFound(
            f"there is nothing on the account {name}: `shoal accounts ls`, or GET "
            "/admin/accounts, lists all"
        )
    return json_answer(account)


async def _top_up(gateway: Gateway, request: web.Request) -> web.Response:
    caller = await gateway.access.admit(request, Scope.ADMIN)
    name = _name(request, new=True)
    credit = decode(_credit, await gateway.bodies.read(request))
    gateway.access.check(caller)
    await gateway.hub.tell(Funded(name, credit.amount, caller.name))
    return json_answer(await _detail(gateway, name))


async def _bound(gateway: Gateway, request: web.Request) -> web.Response:
    caller = await gateway.access.admit(request, Scope.ADMIN)
    name = _name(request, new=True)
    limit = decode(_limit, await gateway.bodies.read(request))
    gateway.access.check(caller)
    await gateway.hub.tell(Bounded(name, limit.budget, caller.name))
    return json_answer(await _detail(gateway, name))


def _name(request: web.Request, *, new: bool = False) -> str:
    """Return which account is meant; a name alone is that of a key."""
    # As sent, for aiohttp would take a name's own escapes for ones of the path.
    raw = request.rel_url.raw_parts[3]
    name = unquote(raw)
    if ":" not in name and name != accounts.WORLD:
        name = accounts.user(name)
    if len(name) > NAME_MAX or not name.isprintable():
        raise InvalidRequest(f"an account's name has at most {NAME_MAX} characters")
    if new and not name.startswith("user:"):
        raise InvalidRequest(
            f"{name}: only accounts of keys can be credited or bounded: give the name "
            "of a key, or user:KEY/USER"
        )
    return name


def _may_see(caller: Caller, name: str) -> bool:
    own = accounts.user(caller.name)
    return caller.may(Scope.ADMIN) or own in (name, accounts.parent(name))


async def _detail(gateway: Gateway, name: str) -> AccountDetail:
    moved = await gateway.store.ledger.transfers(name, TRANSFERS_SHOWN)
    shown = _shown(gateway, name)
    return AccountDetail(
        **msgspec.structs.asdict(shown), transfers=[_moved(each) for each in moved]
    )


def _shown(gateway: Gateway, name: str) -> AccountShown:
    books = gateway.hub.books
    return AccountShown(
        name, books.balance(name), books.standing(name), books.budget(name)
    )


def _moved(posted: Posted) -> TransferShown:
    transfer = posted.transfer
    return TransferShown(
        posted.number,
        posted.at,
        transfer.debit,
        transfer.credit,
        transfer.amount,
        transfer.why,
        transfer.job_id,
    )
