"""``shoal accounts``: show accounts and their transfers, and credit them."""

from typing import Any

import click

from shoal.cli import terminal
from shoal.cli.options import pass_api_with_json
from shoal.client.coordinator import CoordinatorApi, item_path
from shoal.domain.money import dollars, parse_dollars

PATH = "/admin/accounts"
COLUMNS: terminal.Columns = {
    "ACCOUNT": lambda account: terminal.format_peer(account["peer"], account["name"]),
    "BALANCE": lambda account: dollars(account["balance"]),
    "WITH SUBS": lambda account: dollars(account["standing"]),
    "OVERDRAFT": lambda account: _overdraft(account),
}
TRANSFERS: terminal.Columns = {
    "AT": lambda transfer: terminal.format_day(transfer["at"]),
    "FROM": "debit",
    "TO": "credit",
    "AMOUNT": lambda transfer: dollars(transfer["amount"]),
    "WHY": "why",
    "JOB": lambda transfer: transfer["job_id"] or "",
}
NO_TRANSFERS = "no transfers yet; jobs are free unless `shoal serve` sets prices"


@click.group("accounts")
def command() -> None:
    """Show accounts and their transfers, and credit them.

    NAME is the name of a key, or of an account from `shoal accounts ls`.
    """


@command.command("ls")
@pass_api_with_json
def list_(api: CoordinatorApi, as_json: bool) -> None:
    """List all accounts."""
    found = api.request_all(PATH)
    terminal.show_table(found, as_json, COLUMNS, found["data"], NO_TRANSFERS)
    if found["data"] and not as_json:
        click.echo(f"total {dollars(found['total'])}")


@command.command("show")
@click.argument("name")
@pass_api_with_json
def show_account(api: CoordinatorApi, name: str, as_json: bool) -> None:
    """Show an account and its latest transfers."""
    account = api.request(item_path(PATH, name))
    lines = terminal.table(COLUMNS, [account])
    if account["transfers"]:
        lines += ["", *terminal.table(TRANSFERS, account["transfers"])]
    terminal.show(account, as_json, *lines)


@command.command("credit")
@click.argument("name")
@click.argument("amount")
@pass_api_with_json
def credit(api: CoordinatorApi, name: str, amount: str, as_json: bool) -> None:
    """Credit an account.

    AMOUNT is an amount in dollars, such as 5 or 0.50.
    """
    body = {"amount": parse_dollars(amount)}
    account = api.request(f"{item_path(PATH, name)}/credit", body)
    text = f"balance of {_owner(account)}: {dollars(account['balance'])}"
    terminal.show(account, as_json, text)


@command.command("budget")
@click.argument("name")
@click.argument("amount")
@pass_api_with_json
def budget(api: CoordinatorApi, name: str, amount: str, as_json: bool) -> None:
    """Set the overdraft limit of an account.

    AMOUNT is a limit in dollars, such as 5; 0: prepaid only; none: unlimited.
    """
    body = {"budget": None if amount == "none" else parse_dollars(amount)}
    account = api.request(f"{item_path(PATH, name)}/budget", body, method="PUT")
    text = f"overdraft limit of {_owner(account)}: {_overdraft(account)}"
    terminal.show(account, as_json, text)


def _owner(account: dict[str, Any]) -> str:
    return terminal.printable(terminal.format_peer(account["peer"], account["name"]))


def _overdraft(account: dict[str, Any]) -> str:
    limit = account["budget"]
    return "unlimited" if limit is None else dollars(limit)
