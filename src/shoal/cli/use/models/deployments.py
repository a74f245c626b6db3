"""``shoal models deploy``, ``undeploy`` and ``deployments``."""

from collections.abc import Iterator, Mapping
from typing import Any

import click

from shoal.cli.options import DURATION, pass_api_with_json
from shoal.cli.terminal import Columns, printable, show, show_table
from shoal.client.coordinator import CoordinatorApi, item_path
from shoal.domain.errors import ConfigError

PATH = "/admin/deployments"
AUTO = "auto"
AUTO_MOST = 1000  # replicas: as many as there are machines
COLUMNS: Columns = {
    "MODEL": "name",
    "REPLICAS": lambda each: _count(each),
    "ON": lambda each: ", ".join(each["on"]) or "any",
    "PINNED": lambda each: "yes" if each["pinned"] else "",
    "TIMES": lambda each: ", ".join(each.get("schedule", [])),
    "GROUP": lambda each: each.get("exclusive_group", ""),
    "NOW": lambda each: "; ".join(_replicas(each)) or each["why"] or "",
}
NONE = "no deployments: `shoal models deploy NAME` makes one"


@click.command("deploy")
@click.argument("name")
@click.option(
    "--replicas",
    default="1",
    metavar="COUNT|auto",
    help="Machines that have it; auto: one to --most, by demand.  Default: 1.",
)
@click.option(
    "--most", type=click.IntRange(1), metavar="COUNT", help="With --replicas auto."
)
@click.option(
    "--on", metavar="MACHINE[,MACHINE...]", default="", help="Only these machines."
)
@click.option("--pin", is_flag=True, help="No other model takes its memory.")
@click.option(
    "--idle",
    type=DURATION,
    metavar="TIME",
    help="Unload a replica beyond the least after so long without a request: 30m, 2h.",
)
@click.option(
    "--context",
    type=click.IntRange(1),
    metavar="TOKENS",
    help="Context of each slot.  Default: the machine's.",
)
@click.option(
    "--slots",
    type=click.IntRange(1),
    metavar="COUNT",
    help="Jobs at a time.  Default: the machine's.",
)
@click.option(
    "--group",
    metavar="NAME",
    default="",
    help="A machine loads only one model of the group at a time.",
)
@click.option(
    "--schedule",
    metavar="TIME",
    multiple=True,
    help="Only then, by the coordinator's clock: 'mon-fri 8:00-18:00'.",
)
@click.option(
    "--hub",
    metavar="ORGANIZATION/NAME[:QUANTIZATION]",
    default="",
    help="Machines with `--load pull` get it from the hub if no other has it.",
)
@pass_api_with_json
def deploy(
    api: CoordinatorApi,
    name: str,
    replicas: str,
    most: int | None,
    on: str,
    pin: bool,
    idle: int | None,
    context: int | None,
    slots: int | None,
    group: str,
    schedule: tuple[str, ...],
    hub: str,
    as_json: bool,
) -> None:
    """Keep a model loaded, on as many machines as you say.

    It is loaded again after restarts, and elsewhere if a machine is lost.
    """
    auto = replicas == AUTO
    if most is not None and not auto:
        raise ConfigError("--most needs --replicas auto")
    wanted = {
        "replicas": 1 if auto else _whole(replicas),
        "most": (most or AUTO_MOST) if auto else None,
        "on": [each.strip() for each in on.split(",") if each.strip()],
        "pinned": pin,
        "idle": idle,
        "context": context,
        "slots": slots,
        "exclusive_group": group,
        "schedule": schedule,
        "hub": hub or None,
    }
    deployed = api.request(item_path(PATH, name), wanted, method="PUT")
    show(deployed, as_json, *map(printable, _lines(deployed)))


@click.command("undeploy")
@click.argument("name")
@pass_api_with_json
def undeploy(api: CoordinatorApi, name: str, as_json: bool) -> None:
    """Keep a model loaded no longer; it is unloaded when it is idle."""
    removed = api.request(item_path(PATH, name), method="DELETE")
    line = f"{name} is unloaded once it is idle, or its memory is needed"
    show(removed, as_json, printable(line))


@click.command("deployments")
@pass_api_with_json
def list_(api: CoordinatorApi, as_json: bool) -> None:
    """List the models that are kept loaded."""
    listed = api.request(PATH)
    show_table(listed, as_json, COLUMNS, listed["data"], NONE)


def _lines(deployed: dict[str, Any]) -> Iterator[str]:
    count = _count(deployed)
    one = "replica" if count == "1" else "replicas"
    yield f"{deployed['name']}: {count} {one}"
    yield from (f"  {each}" for each in _replicas(deployed))
    if deployed["why"]:
        yield f"  not more now: {deployed['why']}"


def _count(deployed: dict[str, Any]) -> str:
    if not deployed["auto"]:
        return str(deployed["replicas"])
    most = deployed["most"]
    return (
        f"{max(1, deployed['replicas'])} or more"
        if most == AUTO_MOST
        else (f"{deployed['replicas']} to {most}")
    )


def _replicas(deployed: dict[str, Any]) -> Iterator[str]:
    for each in deployed["present"]:
        done = ""
        if each["bytes"] is not None and each["size"]:
            done = f" {each['bytes'] / each['size']:.0%}"
        yield f"{each['state']}{done} on {machine_name(each)}{with_others(each)}"


def with_others(replica: dict[str, Any]) -> str:
    """Return the machines that run a model with this one; empty: it runs it alone."""
    others = [
        f"{machine_name(each)} ({each['layers']} layers)"
        for each in replica.get("parts", [])[:-1]  # earlier coordinators have none
    ]
    return f" with {', '.join(others)}" if others else ""


def machine_name(each: Mapping[str, Any]) -> str:
    """Return what a machine is called, for users."""
    name: str = each["name"] or each["node"]
    return name


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"--replicas {text!r}: expected a number, or {AUTO}")
    return int(text)
