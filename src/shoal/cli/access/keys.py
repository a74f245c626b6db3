"""``shoal keys``: create, list and revoke API keys."""

import json
from typing import Any

import click

from shoal.cli.access.credentials import format_expiry, listing, revocation
from shoal.cli.options import DURATION, json_option, pass_api
from shoal.cli.terminal import format_day
from shoal.client.coordinator import CoordinatorApi

PATH = "/admin/keys"
LIMITS = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute",
    "tokens_per_day": "tokens a day",
    "budget": "tokens in all",
}
HEAD = ("NAME", "ID", "KEY", "SCOPE", "EXPIRES", "REQUESTS", "TOKENS", "LIMITS")


@click.group("keys")
def command() -> None:
    """Create, list and revoke API keys."""


@command.command("create")
@click.argument("name")
@click.option(
    "--scope",
    type=click.Choice(("read", "use", "monitor", "admin")),
    default="use",
    show_default=True,
    help="Rights of the key: read what is its own, run jobs as well, read what belongs "
    "to all keys (monitor), or everything.",
)
@click.option(
    "--expires",
    type=DURATION,
    metavar="TIME",
    help="Lifetime, such as 12h or 30d.  Default: unlimited.",
)
@click.option(
    "--requests-per-minute", type=int, metavar="N", help="Limit of requests a minute."
)
@click.option(
    "--tokens-per-minute", type=int, metavar="N", help="Limit of tokens a minute."
)
@click.option("--tokens-per-day", type=int, metavar="N", help="Limit of tokens a day.")
@click.option("--budget", type=int, metavar="N", help="Limit of tokens in all.")
@click.option(
    "--priority-max",
    type=click.Choice(("low", "normal", "high")),
    default="high",
    show_default=True,
    help="Highest priority of its jobs.",
)
@json_option
@pass_api
def create(
    api: CoordinatorApi,
    name: str,
    scope: str,
    expires: int | None,
    priority_max: str,
    as_json: bool,
    **limits: int | None,
) -> None:
    """Create a key and print it, once.

    NAME is the owner of the key; jobs and usage are recorded under it.
    """
    body = {"name": name, "scope": scope, "expires_in": expires, **limits}
    key = api.request(PATH, body | {"priority_max": priority_max})
    if as_json:
        click.echo(json.dumps(key))
        return
    until = f", until {format_day(key['expires_at'])}" if key["expires_at"] else ""
    click.echo(
        f"{key['key']}\n\n"
        f"This is the key of {key['name']} (scope {key['scope']}{until}).\n"
        "It is shown only now: the coordinator stores nothing but its digest."
    )
    if "pinned_key" in key:
        click.echo(
            "Shoal's programs on other machines also take it with the coordinator's "
            "fingerprint,\nand then trust this coordinator only:\n\n"
            + key["pinned_key"]
        )


def _row(key: dict[str, Any]) -> tuple[str, ...]:
    tokens = key["prompt_tokens"] + key["completion_tokens"]
    limits = [f"{key[name]} {what}" for name, what in LIMITS.items() if key[name]]
    if key["priority_max"] != "high":
        limits.append(f"priority up to {key['priority_max']}")
    return (
        key["name"],
        key["id"],
        f"{key['start']}…" if key["start"] else "",
        key["scope"],
        format_expiry(key),
        str(key["requests"]),
        str(tokens),
        ", ".join(limits),
    )


command.add_command(listing("key", PATH, HEAD, _row))
command.add_command(
    revocation(
        PATH,
        "Revoke a key, and cancel the requests that use it.",
        "Requests that use it are cancelled.",
    )
)
