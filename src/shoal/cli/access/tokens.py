"""``shoal tokens``: create, list and revoke join tokens of workers."""

import json
from typing import Any

import click

from shoal.cli.access.credentials import format_expiry, listing, revocation
from shoal.cli.options import DURATION, json_option, pass_api
from shoal.client.coordinator import CoordinatorApi

PATH = "/admin/tokens"
HEAD = ("NAME", "ID", "EXPIRES", "USES", "CONNECTED", "MODELS")


@click.group("tokens")
def command() -> None:
    """Create, list and revoke join tokens of workers."""


@command.command("create")
@click.argument("name")
@click.option(
    "--uses",
    type=int,
    metavar="N",
    help="Number of workers that may join with it; they may reconnect, even after it "
    "has expired.  Default: unlimited.",
)
@click.option(
    "--expires",
    type=DURATION,
    metavar="TIME",
    help="Lifetime, such as 1h or 7d.  Default: unlimited.",
)
@click.option(
    "--models",
    default="",
    metavar="PATTERNS",
    help="Models that the workers may offer, such as 'llama*,qwen3-8b'.  Default: any.",
)
@json_option
@pass_api
def create(
    api: CoordinatorApi,
    name: str,
    uses: int | None,
    expires: int | None,
    models: str,
    as_json: bool,
) -> None:
    """Create a token and print it, once."""
    patterns = [each.strip() for each in models.split(",") if each.strip()]
    body = {"name": name, "uses": uses, "expires_in": expires, "models": patterns}
    token = api.request(PATH, body)
    if as_json:
        click.echo(json.dumps(token))
        return
    click.echo(
        f"{token['join']}\n\n"
        f"This command joins with the token {token['name']}.  It is shown only now."
    )
    if token["uses"] is not None:
        advice = "Keep" if "--name" in token["join"] else "Add a"
        click.echo(
            f"{advice} --name: a worker that reconnects under another name counts as "
            "another one."
        )


def _row(token: dict[str, Any]) -> tuple[str, ...]:
    uses = "any"
    if token["uses"] is not None:
        uses = f"{len(token['workers'])} of {token['uses']}"
    return (
        token["name"],
        token["id"],
        format_expiry(token),
        uses,
        str(token["present"]),
        ", ".join(token["models"]) or "any",
    )


command.add_command(listing("token", PATH, HEAD, _row))
command.add_command(
    revocation(
        PATH,
        "Revoke a token, and disconnect the workers that joined with it.",
        "Workers that joined with it are disconnected.",
    )
)
