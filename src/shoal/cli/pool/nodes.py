"""``shoal nodes``: list the machines of a pool, approve them, and give orders."""

import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import click

from shoal.cli import terminal
from shoal.cli.options import DURATION, pass_api_with_json
from shoal.cli.pool.machines import machines
from shoal.client.coordinator import CoordinatorApi, item_path
from shoal.domain.errors import InvalidRequest, NotFound, Unavailable
from shoal.pool.roster import suggest_names

F = TypeVar("F", bound=Callable[..., Any])
Order: TypeAlias = dict[str, Any]
"""The order in force for a node, as the API describes it."""

PATH = "/admin/workers"
COLUMNS: terminal.Columns = {
    "NAME": lambda node: terminal.format_peer(node.title, ", ".join(node.ids)),
    "STATE": lambda node: ", ".join(node.states),
    "WIRES": lambda node: ", ".join(node.wires),
    "MODELS": lambda node: len(node.models),
    "FUNCTIONS": lambda node: len(node.functions),
    "RUNNING": lambda node: f"{node.running}/{node.slots}",
    "SINCE": lambda node: terminal.format_day(node.since),
}
NO_NODES = "no nodes: `shoal join-line` prints the command that adds one"
NOT_CONNECTED = "no worker of this name is connected now"
ABSENT = {
    "approve": f"{NOT_CONNECTED}; the approval is for the first one that connects",
    "pause": f"{NOT_CONNECTED}; the pause starts when it connects",
    "resume": f"{NOT_CONNECTED}; if its `shoal join` has ended, start that again",
    "drain": f"{NOT_CONNECTED}; it gets no jobs when it connects",
    "remove": NOT_CONNECTED,
}
UNPROVEN = (
    "workers of this name that have not proved a key are still pending: approve each "
    "by its name in `shoal status --json`"
)
POLL_INTERVAL = 1.0  # seconds
ENDING_STATES = ("draining", "drained", "removed")
SUSPENDED_STATES = ("paused", *ENDING_STATES)


@click.group("nodes")
def command() -> None:
    """List, approve, pause, resume, drain and remove the machines of a pool.

    NAME is the name of a machine in `shoal nodes ls`, or of one of its workers in
    `shoal status`, such as shoal:vm/qwen3-8b; shoal:vm stands for all its models.
    """


@command.command("ls")
@pass_api_with_json
def list_(api: CoordinatorApi, as_json: bool) -> None:
    """List the machines of the pool."""
    found = machines(api.request("/admin/status"))
    listed = {"data": [each.as_json() for each in found]}
    terminal.show_table(listed, as_json, COLUMNS, found, NO_NODES)
    for each in found:
        if each.remark and not as_json:
            click.echo(terminal.printable(f"{each.name}: {each.remark}"))


def _order_parameters(function: F) -> F:
    """Add the parameters of a command that gives an order about a node."""
    name = click.argument("name", callback=_check_name)
    return name(pass_api_with_json(function))


def _check_name(ctx: click.Context, param: click.Parameter, name: str) -> str:
    if not name:
        raise click.BadParameter("expected the name of a node, got ''")
    return name


@command.command("drain")
@click.option(
    "--within",
    type=DURATION,
    metavar="TIME",
    help="Time after which other nodes get the jobs that still run, such as 10m.  "
    "Default: unlimited.",
)
@click.option("--wait", is_flag=True, help="Wait until its jobs have ended.")
@_order_parameters
def drain(
    api: CoordinatorApi, name: str, within: int | None, wait: bool, as_json: bool
) -> None:
    """Let a node finish its jobs, and give it no new ones until it is resumed.

    It stays connected, and can be switched off when it is drained.
    """
    orders = _give_orders(api, "drain", name, within)
    if wait:
        orders = [_drained(api, each) for each in orders]
    _print("drain", orders, as_json=as_json)


def _add_order(action: str, help_: str) -> None:
    @command.command(action, help=help_)
    @_order_parameters
    def give(api: CoordinatorApi, name: str, as_json: bool) -> None:
        _print(action, _give_orders(api, action, name), as_json=as_json)


_add_order(
    "approve",
    """Approve a new node, for a coordinator with --approve-nodes.

    A node gets no jobs until it is approved.  The approval is for the key that the node
    has proved, under any name, or else for its name.  `shoal nodes remove` ends it.
    """,
)
_add_order("pause", "Give a node no new jobs; it finishes the running ones.")
_add_order("resume", "End a pause, drain or removal.")
_add_order(
    "remove",
    """Disconnect a node, and give its jobs to other nodes.

    The node cannot join again until it is resumed.
    """,
)


def describe(action: str, order: Order) -> str:
    """Return the result of an action in one line."""
    count = order["running"]
    done = {
        "approve": "approved",
        "pause": "paused",
        "resume": "resumed",
        "remove": "removed",
    }
    verb = done.get(action, order["state"])
    remark = ""
    if action == "approve" and order["state"] in SUSPENDED_STATES:
        name = shlex.quote(order["name"])
        remark = f": it is {order['state']}; to resume: shoal nodes resume {name}"
    elif action == "approve" and (keys := _keys(order)):
        remark = f": the key {', '.join(keys)}"
        if order["state"] == "pending":
            remark += f"; {UNPROVEN}"
    elif not order["workers"]:
        remark = f": {ABSENT[action]}"
    elif count and action in ("pause", "drain"):
        remark = f": it still runs {'1 job' if count == 1 else f'{count} jobs'}"
    return f"{verb} {order['name']}{remark}"


def _keys(order: Order) -> Sequence[str]:
    return [each for each in order["approved"] if each != order["name"]]


def _give_orders(
    api: CoordinatorApi, action: str, name: str, within: int | None = None
) -> Sequence[Order]:
    """Order something of a node: for each of its names, if it is that of a machine.

    Raises ShoalError.
    """
    names = [name] if ":" in name else _names_of(api, action, name)
    query = {"within": within}
    return [
        api.request(f"{item_path(PATH, each)}/{action}", method="POST", query=query)
        for each in names
    ]


def _names_of(api: CoordinatorApi, action: str, name: str) -> Sequence[str]:
    """Return the names, with their wires, of a machine that an action is about.

    Raises NotFound if there is none, InvalidRequest if there are several.
    """
    known = machines(api.request("/admin/status"))
    found = [each for each in known if each.is_called(name)]
    if action == "resume" and found and all(each.is_away for each in found):
        # A machine that is away has proven no key that would join its wires.
        return [order for each in found for order in each.orders]
    if len(found) > 1:
        names = ", ".join(sorted(name for each in found for name in each.names))
        raise InvalidRequest(f"several nodes are called {name}: give one of {names}")
    if not found:
        names_known = {each for machine in known for each in machine.ids}
        suggestion = suggest_names(name, names_known, "`shoal nodes ls` lists all")
        raise NotFound(f"no node is called {name}; {suggestion or NO_NODES}")
    if action == "resume" and found[0].orders:
        return found[0].orders
    return found[0].names


def _drained(api: CoordinatorApi, order: Order) -> Order:
    """Wait until the jobs of a node have ended; return the order as it is then.

    Raises Unavailable if another operator ends the drain.
    """
    while order["running"]:
        time.sleep(POLL_INTERVAL)
        order = api.request(item_path(PATH, order["name"]))
        if order["state"] not in ENDING_STATES:
            raise Unavailable(
                f"{order['name']} is {order['state']} now: the drain was ended before "
                "its jobs were"
            )
    return order


def _print(action: str, orders: Iterable[Order], *, as_json: bool) -> None:
    for each in orders:
        terminal.show(each, as_json, terminal.printable(describe(action, each)))
