"""``shoal models alias``: names that stand for models."""

import click

from shoal.cli.options import pass_api_with_json
from shoal.cli.terminal import Columns, printable, show, show_table
from shoal.client.coordinator import CoordinatorApi, item_path

PATH = "/admin/aliases"
COLUMNS: Columns = {
    "NAME": "name",
    "MODELS": lambda alias: ", ".join(alias["models"]),
    "SERVES": lambda alias: alias["serves"] or "",
}
NONE = "no aliases: `shoal models alias set NAME MODEL,MODEL` makes one"


@click.group("alias")
def command() -> None:
    """Let names stand for models, such as gpt-4o-mini for qwen3-8b.

    A request for the name gets the first of its models that a worker serves.
    """


@command.command("set")
@click.argument("name")
@click.argument("models", metavar="MODEL[,MODEL...]")
@pass_api_with_json
def set_(api: CoordinatorApi, name: str, models: str, as_json: bool) -> None:
    """Let NAME stand for models, the preferred one first.

    NAME may have one *, such as claude-*, for any characters.  Models of the pool with
    that name are served themselves.
    """
    wanted = [each.strip() for each in models.split(",") if each.strip()]
    alias = api.request(item_path(PATH, name), {"models": wanted}, method="PUT")
    serves = alias["serves"]
    now = f"now {serves}" if serves else "no worker serves any of them now"
    line = f"{name} stands for {', '.join(alias['models'])}: {now}"
    show(alias, as_json, printable(line))


@command.command("ls")
@pass_api_with_json
def list_(api: CoordinatorApi, as_json: bool) -> None:
    """List the aliases, and the model that requests for each get now."""
    listed = api.request(PATH)
    show_table(listed, as_json, COLUMNS, listed["data"], NONE)


@command.command("rm")
@click.argument("name")
@pass_api_with_json
def remove(api: CoordinatorApi, name: str, as_json: bool) -> None:
    """Remove an alias; its models stay."""
    removed = api.request(item_path(PATH, name), method="DELETE")
    show(removed, as_json, printable(f"{name} stands for no model any more"))
