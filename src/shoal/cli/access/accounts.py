"""``shoal accounts``: show accounts and their transfers, and credit them."""

import json
from typing import Any
from urllib.parse import quote

import click

from shoal.cli.options import json_option, pass_api
from shoal.cli.terminal import format_day, format_peer, print_table, printable
from shoal.client.coordinator import CoordinatorApi
from shoal.domain.money import dollars, parse_dollars

PATH = "/admin/accounts"
HEAD = ("ACCOUNT", "BALANCE", "WITH SUBS", "OVERDRAFT")
TRANSFER_HEAD = ("AT", "FROM", "TO", "AMOUNT", "WHY", "JOB")


@click.group("accounts")
def command() -> None:
    """Show accounts and their transfers, and credit them.

    NAME is the name of a key, or of an account from `shoal accounts ls`.
    """


@command.command("ls")
@json_option
@pass_api
def list_(api: CoordinatorApi, as_json: bool) -> None:
    """List all accounts."""
    found = api.request_all(PATH)
    if as_json:
        click.echo(json.dumps(found))
    elif found["data"]:
        print_table(HEAD, [_row(account) for account in found["data"]])
        click.echo(f"total {dollars(found['total'])}")
    else:
        click.echo("no transfers yet; jobs are free unless `shoal serve` sets prices")


@command.command("show")
@click.argument("name")
@json_option
@pass_api
def show(api: CoordinatorApi, name: str, as_json: bool) -> None:
    """Show an account and its latest transfers."""
    account = api.request(_path(name))
    if as_json:
        click.echo(json.dumps(account))
        return
    print_table(HEAD, [_row(account)])
    if account["transfers"]:
        rows = [_transfer_row(each) for each in account["transfers"]]
        click.echo()
        print_table(TRANSFER_HEAD, rows)


@command.command("credit")
@click.argument("name")
@click.argument("amount")
@json_option
@pass_api
def credit(api: CoordinatorApi, name: str, amount: str, as_json: bool) -> None:
    """Credit an account.

    AMOUNT is an amount in dollars, such as 5 or 0.50.
    """
    body = {"amount": parse_dollars(amount)}
    account = api.request(f"{_path(name)}/credit", body)
    if as_json:
        click.echo(json.dumps(account))
    else:
        click.echo(f"balance of {_owner(account)}: {dollars(account['balance'])}")


@command.command("budget")
@click.argument("name")
@click.argument("amount")
@json_option
@pass_api
def budget(api: CoordinatorApi, name: str, amount: str, as_json: bool) -> None:
    """Set the overdraft limit of an account.

    AMOUNT is a limit in dollars, such as 5; 0: prepaid only; none: unlimited.
    """
    body = {"budget": None if amount == "none" else parse_dollars(amount)}
    account = api.request(f"{_path(name)}/budget", body, method="PUT")
    if as_json:
        click.echo(json.dumps(account))
    else:
        click.echo(f"overdraft limit of {_owner(account)}: {_overdraft(account)}")


def _path(name: str) -> str:
    return f"{PATH}/{quote(name, safe='')}"


def _row(account: dict[str, Any]) -> tuple[str, ...]:
    return (
        format_peer(account["peer"], account["name"]),
        dollars(account["balance"]),
        dollars(account["standing"]),
        _overdraft(account),
    )


def _owner(account: dict[str, Any]) -> str:
    return printable(format_peer(account["peer"], account["name"]))


def _overdraft(account: dict[str, Any]) -> str:
    limit = account["budget"]
    return "unlimited" if limit is None else dollars(limit)


def _transfer_row(transfer: dict[str, Any]) -> tuple[str, ...]:
    return (
        format_day(transfer["at"]),
        transfer["debit"],
        transfer["credit"],
        dollars(transfer["amount"]),
        transfer["why"],
        transfer["job_id"] or "",
    )
