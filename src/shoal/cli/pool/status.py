"""``shoal status``: a pool's machines and jobs, once or live.

Beneath each machine are its wires and models.
"""

import shlex
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from shoal.cli import terminal
from shoal.cli.options import pass_api_with_json
from shoal.cli.pool.machines import NOT_ADMITTED, PENDING, MachineRow, machines
from shoal.client.coordinator import CoordinatorApi
from shoal.client.errors import ConnectionLost

PATH = "/admin/status"
WATCH_INTERVAL = 2.0  # seconds
NAME_MAX = 24  # characters of a machine's name
STATE_MAX = 12
INDENT = "  "
NO_WORKERS = "no workers: `shoal join-line` prints the command that adds one"
PROTECTIONS = {
    "plain": "plaintext",
    "noise": "encrypted",
    "teale": "encrypted",
    "tls": "TLS",
}
"""Display names of connections' encryption."""

FULL_SPEED = 100  # percent
STATES = {
    "paused": "paused",
    "draining": "drained",
    "drained": "drained",
    "removed": "removed",
}
"""Descriptions of what operators did to workers."""

TROUBLES = frozenset({NOT_ADMITTED, "unfit", "leaving", "suspected", "failed"})
"""States of machines that no operator has ordered, in which jobs do not get there."""

NODES: terminal.Columns = {
    "NODE": lambda node: ":".join(filter(None, (node["wire"], node["name"]))),
    "ADDRESS": "address",
    "STATE": "state",
    "RANK": lambda node: "" if node["rank"] is None else node["rank"],
    "WEIGHT": lambda node: "" if node["rank"] is None else f"{node['weight']:.0%}",
    "": lambda node: "coordinator" if node["coordinator"] else node["remark"],
}
"""The nodes that a wire's membership protocol tracks."""


@click.command("status")
@click.option(
    "--watch",
    is_flag=True,
    help="Update the display until Ctrl-C; with --json, one line every two seconds.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Show at most N machines, those that need attention first.  Default: all.  "
    "--json always has all.",
)
@pass_api_with_json
def command(api: CoordinatorApi, watch: bool, limit: int | None, as_json: bool) -> None:
    """Show a pool's machines and jobs; what needs attention comes first."""
    if watch and not as_json and not terminal.console().is_terminal:
        raise click.UsageError("--watch needs a terminal, or --json")
    if not watch:
        _print(api, limit, as_json=as_json)
    elif as_json:
        while True:
            _print(api, limit, as_json=True)
            time.sleep(WATCH_INTERVAL)
    else:
        _watch(api, limit)


def _print(api: CoordinatorApi, limit: int | None, *, as_json: bool) -> None:
    status = api.request(PATH)
    lines = () if as_json else status_lines(status, api.base_url, time.time(), limit)
    terminal.show(status, as_json, *lines)


def _watch(api: CoordinatorApi, limit: int | None) -> None:
    """Show the status on the whole terminal, or that the coordinator is unreachable."""
    from rich.live import Live
    from rich.text import Text

    with Live(console=terminal.console(), screen=True, auto_refresh=False) as live:
        while True:
            try:
                status = api.at_once.request(PATH)
                lines = [*status_lines(status, api.base_url, time.time(), limit)]
            except ConnectionLost as error:
                lines = [terminal.printable(str(error)), "", "trying again …"]
            live.update(Text.from_ansi("\n".join(lines)), refresh=True)
            time.sleep(WATCH_INTERVAL)


def status_lines(
    status: Mapping[str, Any], url: str, now: float, limit: int | None = None
) -> Iterator[str]:
    """Yield the lines; ``now`` is the Unix time.

    ``limit``: as many machines are shown at most, those first that need attention.
    """
    found = sorted(machines(status), key=_urgency)
    yield _head(status, url, now)
    yield _counts(status, found)
    if status["unencrypted"]:
        plain = (f"{peers} ({wire})" for wire, peers in status["unencrypted"].items())
        yield terminal.printable(f"not encrypted, if any connect: {', '.join(plain)}")
    if not status["ready"]:
        yield terminal.printable(f"no jobs are accepted: {status['why_not']}")
    if degraded := status.get("degraded"):  # not of earlier coordinators
        yield terminal.printable(f"jobs are slow: {degraded}")
    yield ""
    if not status["workers"] and all(each["pending"] for each in status["peers"]):
        yield NO_WORKERS
    if found:
        listed = found[:limit]
        head, *rows = terminal.table(_columns(now), listed, wrap=False)
        yield head
        for row, machine in zip(rows, listed, strict=True):
            yield row
            yield from _beneath(machine)
            yield from _orders(machine, status)
        if others := len(found) - len(listed):
            yield f"and {_count(others, 'more machine')}"
    for relay in status["relays"]:
        if relay["open"] or relay["strangers"]:
            yield f"relay: {_relay(relay)}"
    if status["nodes"]:
        yield ""
        yield from terminal.table(NODES, status["nodes"])


def _urgency(machine: MachineRow) -> int:
    """Return how soon an operator has to look at a machine; the lowest is first.

    First those that wait for an operator, then those that others turn away or that are
    not well, then those of which operators know.
    """
    if PENDING in machine.states:
        return 0
    if TROUBLES.intersection(machine.states) or any(
        each["points"] for each in machine.workers
    ):
        return 1
    return 2 if machine.orders else 3


def _head(status: Mapping[str, Any], url: str, now: float) -> str:
    age = terminal.format_age(now - status["started_at"])
    return f"Shoal {status['version']} at {url}, up {age}"


def _counts(status: Mapping[str, Any], found: Sequence[MachineRow]) -> str:
    jobs = status["jobs"]
    admitted = [each for each in found if each.states != [NOT_ADMITTED]]
    return ", ".join(
        (
            _count(len(admitted), "machine"),
            _count(len(status["models"]), "model"),
            f"{_count(jobs['running'], 'job')} running",
            f"{jobs['queued']} waiting",
        )
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _columns(now: float) -> terminal.Columns:
    """Return the columns of machines."""
    return {
        "MACHINE": lambda machine: _cut(terminal.shortened(machine.name), NAME_MAX),
        "STATE": lambda machine: _cut(" ".join(machine.states), STATE_MAX),
        "BUSY": lambda machine: (
            f"{machine.running}/{machine.slots}" if machine.slots else ""
        ),
        "TOKENS/S": lambda machine: _highest(machine, "tokens_per_second", "{:.1f}"),
        "CPU": lambda machine: _highest(machine, "cpu", "{:.0f}%"),
        "MEM": lambda machine: _highest(machine, "memory", "{:.0f}%"),
        "TEMP": lambda machine: _highest(machine, "temperature", "{:.0f} °C"),
        "UP": lambda machine: (
            "" if machine.since is None else terminal.format_age(now - machine.since)
        ),
    }


def _beneath(machine: MachineRow) -> Iterator[str]:
    """Yield the machine's hardware, connections and models, and what is wrong."""
    connections = [
        " ".join(part for part in (wire, _protection(machine, wire)) if part)
        for wire in machine.wires
    ]
    peers = machine.peers
    hardware = _unique(_hardware(each["hardware"]) for each in peers)
    releases = _unique(f"Shoal {each['release']}" for each in peers if each["release"])
    yield from _indented("; ".join([*hardware, *connections, *releases]))
    offered = ", ".join(sorted(machine.models))
    functions = len(machine.functions)
    parts = [
        offered,
        _count(functions, "function") if functions else "",
        _continued(machine.workers),
    ]
    if any(parts):
        yield from _indented("; ".join(part for part in parts if part))
    workers = machine.workers
    remarks = [_remark(each, _jobs_of_others(each, workers)) for each in workers]
    reasons = [each.get("reason", "") or each["remark"] for each in machine.peers]
    reasons += [each.get("shared", "") for each in machine.peers]
    if machine.remark:
        yield from _indented(machine.remark, whole=True)
    for remark in _unique([*remarks, *reasons]):
        yield from _indented(remark)


def _continued(workers: Sequence[Mapping[str, Any]]) -> str:
    """Return whose answers the machine can continue when another is lost."""
    chatting = [each for each in workers if "chat" in each["kinds"]]
    able = [each for each in chatting if "continue" in each["features"]]
    names = sorted({name for each in able for name in each["models"]})
    if not names or len(able) == len(chatting):
        return "continues answers" if names else ""
    return f"continues answers of {', '.join(names)}"


def _orders(machine: MachineRow, status: Mapping[str, Any]) -> Iterator[str]:
    """Yield what operators ordered about a machine that is away."""
    for order in status["orders"]:
        if order["name"] in machine.orders and not order["workers"]:
            at = terminal.format_day(order["since"])
            name = shlex.quote(order["name"])
            yield from _indented(
                f"{STATES[order['state']]} with the key {order['by']}, {at}; "
                f"to resume: shoal nodes resume {name}",
                whole=True,
            )


def _indented(text: str, *, whole: bool = False) -> Iterator[str]:
    """Yield a text beneath a machine, wrapped to the terminal's width.

    Long ids are cut, unless it is ``whole``, as a command that people copy is.
    """
    line = terminal.printable(text if whole else terminal.shortened(text)).replace(
        "\n", "\\n"
    )
    width = max(terminal.console().width, 40)
    yield from textwrap.wrap(
        line, width, initial_indent=INDENT, subsequent_indent=INDENT * 2
    )


def _protection(machine: MachineRow, wire: str) -> str:
    found = {
        each["protection"]
        for each in (*machine.workers, *machine.peers)
        if each["id"].startswith(f"{wire}:") and each.get("protection")
    }
    named = ", ".join(sorted(PROTECTIONS.get(each, each) for each in found))
    return f"({named})" if named else ""


def _relay(relay: Mapping[str, Any]) -> str:
    """Return who may use a relay, and who does."""
    nodes = [f"{relay['guests']} nodes"]
    if relay["strangers"]:
        nodes.append(f"{relay['strangers']} not registered")
    audience = "for any node" if relay["open"] else "closed"
    return f"{audience}; connected: {', '.join(nodes)}"


def _hardware(hardware: Mapping[str, Any] | None) -> str:
    """Return the hardware of a machine, as far as it reports that."""
    if hardware is None:
        return ""
    vram = hardware["gpu_memory_gb"]
    parts = (
        "" if hardware["chip"] == "unknown" else hardware["chip"],
        f"{hardware['memory_gb']:g} GB" if hardware["memory_gb"] else "",
        f"{vram:g} GB VRAM" if vram else "",
    )
    return ", ".join(part for part in parts if part)


def _jobs_of_others(
    worker: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]
) -> int:
    """Return the jobs of other coordinators that a worker has.

    A worker counts all other jobs of its machine: those of this pool at the other
    models of its connection are among them.
    """
    peer = worker["id"].split("/")[0]
    beside: int = sum(
        each["busy"]
        for each in workers
        if each is not worker and each["id"].split("/")[0] == peer
    )
    return max(0, int(worker["queued"]) - beside)


def _remark(worker: Mapping[str, Any], others: int) -> str:
    """Return why a worker gets no jobs, else its load or a remark.

    ``others``: its jobs of other coordinators.
    """
    if worker["suspension"] in STATES:
        return f"{STATES[worker['suspension']]} by an operator"
    points = f"{worker['points']} penalty points" if worker["points"] else ""
    reason = worker["draining"] or points or worker["unfit"]
    return str(reason or _slowdown(worker, others) or worker["remark"])


def _slowdown(worker: Mapping[str, Any], others: int) -> str:
    """Return what slows a worker down."""
    parts = []
    if others:
        parts.append(f"jobs of other coordinators: {others}")
    lent = worker["throttle"] / FULL_SPEED
    if worker["speed"] < lent:
        parts.append(f"at {worker['speed']:.0%} of its speed")
    if worker["thermal"] != "nominal":
        parts.append(f"thermal level {worker['thermal']}")
    if lent < 1:
        parts.append(f"its owner lends {lent:.0%} of its speed")
    return ", ".join(parts)


def _highest(machine: MachineRow, field: str, form: str) -> str:
    """Return the highest value of a machine's workers; empty if none has one."""
    measured = [each[field] for each in machine.workers if each[field] is not None]
    return form.format(max(measured)) if measured else ""


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: size - 1]}…"


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(text for text in texts if text))
