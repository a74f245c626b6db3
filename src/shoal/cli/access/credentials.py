"""What ``shoal keys`` and ``shoal tokens`` have in common: listing and revocation."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias
from urllib.parse import quote

import click

from shoal.cli.options import json_option, pass_api, yes_option
from shoal.cli.terminal import format_day, print_table
from shoal.client.coordinator import CoordinatorApi

Credential: TypeAlias = dict[str, Any]
"""A key or a token, as the admin API describes it."""


def listing(
    noun: str,
    path: str,
    head: Sequence[str],
    row: Callable[[Credential], Sequence[str]],
) -> click.Command:
    """Return the command ``ls``, for credentials at a ``path`` of the API."""

    @click.command("ls", help=f"List {noun}s.")
    @click.option("--all", "revoked", is_flag=True, help=f"Include revoked {noun}s.")
    @json_option
    @pass_api
    def command(api: CoordinatorApi, revoked: bool, as_json: bool) -> None:
        found = api.request_all(path)["data"]
        found = [each for each in found if revoked or each["revoked_at"] is None]
        if as_json:
            click.echo(json.dumps({"data": found}))
        elif found:
            print_table(head, [row(each) for each in found])
        else:
            click.echo(f"no {noun}s; create one with: shoal {noun}s create NAME")

    return command


def revocation(path: str, help_: str, consequence: str) -> click.Command:
    """Return the command ``revoke``; the ``consequence`` is told before it."""

    @click.command("revoke", help=f"{help_}\n\n`ls` lists names and ids.")
    @click.argument("name", metavar="NAME_OR_ID")
    @yes_option
    @json_option
    @pass_api
    def command(api: CoordinatorApi, name: str, yes: bool, as_json: bool) -> None:
        if not yes:
            confirm_revocation(name, consequence)
        revoked = api.request(f"{path}/{quote(name, safe='')}", method="DELETE")
        if as_json:
            click.echo(json.dumps(revoked))
        else:
            click.echo(f"revoked {revoked['name']} ({revoked['id']})")

    return command


def format_expiry(credential: Credential) -> str:
    """Return when a credential expires, or when it was revoked."""
    if credential["revoked_at"] is not None:
        return f"revoked {format_day(credential['revoked_at'])}"
    return format_day(credential["expires_at"]) or "never"


def confirm_revocation(name: str, consequence: str) -> None:
    """Ask at a terminal whether to revoke ``name``; without one, do not ask.

    Raises click.exceptions.Exit with status 1 unless the answer is yes.
    """
    if not sys.stdin.isatty():
        return
    try:
        agreed = click.confirm(f"Revoke {name}?  {consequence}", err=True)
    except click.Abort:
        agreed = False
    if not agreed:
        raise click.exceptions.Exit(1)
