"""Show accounts and their transfers, and credit them."""

import argparse
import json
from typing import Any
from urllib.parse import quote

from shoal.cli import api
from shoal.cli.arguments import add_action
from shoal.cli.terminal import format_day, format_peer, print_table
from shoal.domain.money import dollars, parse_dollars

PATH = "/admin/accounts"
HEAD = ("ACCOUNT", "BALANCE", "WITH SUBS", "OVERDRAFT")
TRANSFER_HEAD = ("AT", "FROM", "TO", "AMOUNT", "WHY", "JOB")
NAME_HELP = "name of a key, or account from `shoal accounts ls`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = add_action(actions, "ls", "list all accounts")
    show = add_action(actions, "show", "show an account and its latest transfers")
    credit = add_action(actions, "credit", "credit an account")
    budget = add_action(actions, "budget", "set the overdraft limit of an account")
    for each in (show, credit, budget):
        each.add_argument("name", help=NAME_HELP)
    credit.add_argument("amount", help="amount in dollars, such as 5 or $0.50")
    budget.add_argument(
        "amount", help="limit in dollars, such as 5; 0: prepaid only; none: unlimited"
    )
    for each in (listing, show, credit, budget):
        each.add_argument("--json", action="store_true", help="print JSON")
        api.add_arguments(each)


def run(args: argparse.Namespace) -> int:
    return {"ls": _list, "show": _show, "credit": _credit, "budget": _budget}[
        args.action
    ](args)


def _list(args: argparse.Namespace) -> int:
    accounts = api.request_all(args, PATH)
    if args.json:
        print(json.dumps(accounts))
    elif accounts["data"]:
        print_table(HEAD, [_row(account) for account in accounts["data"]])
        print(f"total {dollars(accounts['total'])}")
    else:
        print("no transfers yet")
    return 0


def _show(args: argparse.Namespace) -> int:
    return _print(args, api.request(args, _path(args)))


def _credit(args: argparse.Namespace) -> int:
    amount = {"amount": parse_dollars(args.amount)}
    return _print(args, api.request(args, f"{_path(args)}/credit", amount))


def _budget(args: argparse.Namespace) -> int:
    amount = None if args.amount == "none" else parse_dollars(args.amount)
    path = f"{_path(args)}/budget"
    return _print(args, api.request(args, path, {"budget": amount}, method="PUT"))


def _path(args: argparse.Namespace) -> str:
    return f"{PATH}/{quote(args.name, safe='')}"


def _print(args: argparse.Namespace, account: dict[str, Any]) -> int:
    if args.json:
        print(json.dumps(account))
        return 0
    print_table(HEAD, [_row(account)])
    if account["transfers"]:
        print()
        print_table(
            TRANSFER_HEAD, [_transfer_row(each) for each in account["transfers"]]
        )
    return 0


def _row(account: dict[str, Any]) -> tuple[str, ...]:
    budget = account["budget"]
    return (
        format_peer(account["peer"], account["name"]),
        dollars(account["balance"]),
        dollars(account["standing"]),
        "unlimited" if budget is None else dollars(budget),
    )


def _transfer_row(transfer: dict[str, Any]) -> tuple[str, ...]:
    return (
        format_day(transfer["at"]),
        transfer["debit"],
        transfer["credit"],
        dollars(transfer["amount"]),
        transfer["why"],
        transfer["job_id"] or "",
    )
