"""Show a pool's workers and jobs."""

import argparse
import json
import shlex
from collections.abc import Sequence
from typing import Any

from shoal.cli import api
from shoal.cli.terminal import format_day, format_peer, print_table, printable

PROTECTIONS = {
    "plain": "plaintext",
    "noise": "Noise",
    "teale": "encrypted",
    "tls": "TLS",
}
"""Display names of connections' encryption."""

FULL_SPEED = 100  # percent
STATES = {"paused": "paused", "draining": "drained", "removed": "removed"}
"""Descriptions of what operators did to workers."""

NODE_COLUMNS = ("node", "address", "state", "since", "rank", "weight", "hardware", "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    api.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    status = api.request(args, "/admin/status")
    if args.json:
        print(json.dumps(status))
        return 0
    jobs = status["jobs"]
    print(
        f"{api.base_url(args)}: {jobs['running']} jobs running, {jobs['queued']} "
        "waiting"
    )
    if status["unencrypted"]:
        listed = (f"{peers} ({wire})" for wire, peers in status["unencrypted"].items())
        print(f"connections without encryption: {', '.join(listed)}")
    if not status["ready"]:
        print(f"no jobs are accepted: {printable(status['why_not'])}")
    peers = {each["id"]: each for each in status["peers"]}
    rows = [
        (
            format_peer(worker["peer_name"], worker["id"]),
            ", ".join(worker["models"]) or _count_functions(worker),
            f"{worker['busy']} of {worker['slots']} busy",
            _load(worker),
            PROTECTIONS.get(worker["protection"], worker["protection"] or ""),
            _machine(peers.get(worker["id"].partition("/")[0])),
            _remark(worker, peers.get(worker["id"].partition("/")[0])),
        )
        for worker in status["workers"]
    ]
    if not rows:
        print("no workers: run the `shoal join` line that `shoal serve` printed")
    widths = [max((len(row[at]) for row in rows), default=0) for at in range(6)]
    for row in rows:
        shown = zip(row, widths, strict=False)
        cells = [cell.ljust(width) for cell, width in shown if width]
        _print_line([*cells, row[6]])
    with_models = {worker["id"].partition("/")[0] for worker in status["workers"]}
    for peer in status["peers"]:
        if peer["id"] not in with_models:
            _print_line([*_peer(peer), peer["remark"] or "no models"])
    for order in status["orders"]:
        if not order["workers"]:  # else the lines of its workers show it
            at = format_day(order["since"])
            _print_line(
                [
                    order["name"],
                    f"{STATES[order['state']]} with the key {order['by']}, {at}; to "
                    f"resume: shoal workers resume {shlex.quote(order['name'])}",
                ]
            )
    for peer in status["refused"]:
        _print_line([*_peer(peer), f"not admitted: {peer['reason']}"])
    for relay in status["relays"]:
        if relay["open"] or relay["members"] or relay["strangers"]:
            print(f"relay: {_relay(relay)}")
    if status["nodes"]:
        print()
        print_table(NODE_COLUMNS, [_node(each) for each in status["nodes"]])
    return 0


def _relay(relay: dict[str, Any]) -> str:
    """Return who may use a relay, and who does."""
    nodes = [f"{relay['members']} of the pool"]
    if relay["open"]:
        nodes.append(f"{relay['guests']} other nodes")
    if relay["strangers"]:
        nodes.append(f"{relay['strangers']} not admitted")
    audience = "any node" if relay["open"] else "this pool's workers"
    return f"for {audience}; connected: {', '.join(nodes)}"


def _count_functions(worker: dict[str, Any]) -> str:
    """Return the number of functions of a worker; `shoal tasks ls` lists them."""
    count = len(worker["tasks"])
    return "" if not count else "1 function" if count == 1 else f"{count} functions"


def _print_line(cells: Sequence[str]) -> None:
    line = "  ".join(cells).replace("\n", "\\n")
    print(f"  {printable(line)}".rstrip())


def _peer(peer: dict[str, Any]) -> Sequence[str]:
    """Return the cells of a peer that is no worker."""
    cells = (format_peer(peer["name"], peer["id"]), _machine(peer))
    return [cell for cell in cells if cell]


def _machine(peer: dict[str, Any] | None) -> str:
    """Return the hardware of a peer, as far as it reports that."""
    if peer is None or (hardware := peer["hardware"]) is None:
        return ""
    vram = hardware["gpu_memory_gb"]
    parts = (
        _chip_and_memory(hardware),
        f"{vram:g} GB VRAM" if vram else "",
        f"tier {hardware['tier']}" if hardware["tier"] else "",
    )
    return ", ".join(part for part in parts if part)


def _chip_and_memory(hardware: dict[str, Any]) -> str:
    parts = (
        "" if hardware["chip"] == "unknown" else hardware["chip"],
        f"{hardware['memory_gb']:g} GB" if hardware["memory_gb"] else "",
    )
    return ", ".join(part for part in parts if part)


def _node(node: dict[str, Any]) -> Sequence[str]:
    """Return the row of a node that a wire's membership protocol tracks."""
    counts = node["rank"] is not None
    return (
        f"{node['wire']}:{node['name']}" if node["name"] else node["wire"],
        node["address"],
        node["state"],
        format_day(node["since"]),
        str(node["rank"]) if counts else "",
        f"{node['weight']:.0%}" if counts else "",
        "" if node["hardware"] is None else _chip_and_memory(node["hardware"]),
        "coordinator" if node["coordinator"] else node["remark"],
    )


def _remark(worker: dict[str, Any], peer: dict[str, Any] | None) -> str:
    """Return why a worker gets no jobs, else its load or a remark."""
    if worker["suspension"]:
        return f"{STATES[worker['suspension']]} by an operator"
    reason = worker["draining"] or _penalty(worker) or worker["unfit"]
    reason = reason or _slowdown(worker) or worker["remark"]
    return reason or ("" if peer is None else peer["remark"])


def _slowdown(worker: dict[str, Any]) -> str:
    """Return what slows a worker down."""
    parts = []
    if worker["queued"]:
        parts.append(f"jobs of other coordinators: {worker['queued']}")
    lent = worker["throttle"] / FULL_SPEED
    if worker["speed"] < lent:
        parts.append(f"at {worker['speed']:.0%} of its speed")
    if worker["thermal"] != "nominal":
        parts.append(f"thermal level {worker['thermal']}")
    if lent < 1:
        parts.append(f"its owner lends {lent:.0%} of its speed")
    return ", ".join(parts)


def _penalty(worker: dict[str, Any]) -> str:
    """Return the penalty of a worker, if it has any."""
    points = worker["points"]
    return f"{points} penalty points" if points else ""


def _load(worker: dict[str, Any]) -> str:
    """Return the load of a worker's machine, as far as it is reported."""
    parts = (("cpu", worker["cpu"]), ("memory", worker["memory"]))
    return ", ".join(
        f"{name} {value:.0f}%" for name, value in parts if value is not None
    )
