"""Pause, resume, drain and remove workers, by their names in `shoal status`."""

import argparse
import json
import time
from typing import Any
from urllib.parse import quote, urlencode

from shoal.cli import api
from shoal.cli.arguments import add_action, parse_duration
from shoal.cli.terminal import printable

PATH = "/admin/workers"
NAME_HELP = (
    "name of a worker in `shoal status`, such as WIRE:vm/qwen3-8b; the part before "
    "the slash stands for all its models"
)
NOT_CONNECTED = "no worker of this name is connected now"
ABSENT = {
    "pause": f"{NOT_CONNECTED}; the pause starts when it connects",
    "resume": f"{NOT_CONNECTED}; if its `shoal join` has ended, start that again",
    "drain": NOT_CONNECTED,
    "remove": NOT_CONNECTED,
}
POLL_INTERVAL = 1.0  # seconds
ENDING_STATES = ("draining", "removed")  # a drain that reaches its limit removes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    pause = add_action(
        actions, "pause", "give a worker no new jobs; it finishes those that it runs"
    )
    resume = add_action(actions, "resume", "end a pause, drain or removal")
    drain = add_action(
        actions,
        "drain",
        "disconnect a worker when its jobs have ended, and refuse it until a resume",
    )
    remove = add_action(
        actions,
        "remove",
        "give the jobs of a worker to others, disconnect it, and refuse it until a "
        "resume",
    )
    drain.add_argument(
        "--within",
        type=parse_duration,
        metavar="TIME",
        help="time until the jobs that still run are given to other workers, such as "
        "10m (default: unlimited)",
    )
    drain.add_argument(
        "--wait", action="store_true", help="return when its jobs have ended"
    )
    for each in (pause, resume, drain, remove):
        each.add_argument("name", type=_parse_name, help=NAME_HELP)
        each.add_argument("--json", action="store_true", help="print JSON")
        api.add_arguments(each)


def run(args: argparse.Namespace) -> int:
    path = f"{PATH}/{quote(args.name, safe='')}"
    limits = {"within": getattr(args, "within", None)}
    query = urlencode({name: each for name, each in limits.items() if each is not None})
    order = api.request(
        args, f"{path}/{args.action}" + (f"?{query}" if query else ""), method="POST"
    )
    while getattr(args, "wait", False) and order["running"]:
        time.sleep(POLL_INTERVAL)
        order = api.request(args, path)
        if order["state"] not in ENDING_STATES:
            raise api.ApiError(
                f"{order['name']} is {order['state']} now: its drain was ended before "
                "its jobs"
            )
    print(json.dumps(order) if args.json else printable(describe(args.action, order)))
    return 0


def _parse_name(text: str) -> str:
    """Return a name that is not empty; others are the coordinator's to check."""
    if not text:
        raise argparse.ArgumentTypeError("expected the name of a worker, got ''")
    return text


def describe(action: str, order: dict[str, Any]) -> str:
    """Return the result of an action in one line."""
    count = order["running"]
    done = {"pause": "paused", "resume": "resumed", "remove": "removed"}
    verb = done.get(action, "draining" if count else "drained")
    remark = ""
    if not order["workers"]:
        remark = f": {ABSENT[action]}"
    elif count and action in ("pause", "drain"):
        remark = f": it still runs {'1 job' if count == 1 else f'{count} jobs'}"
    return f"{verb} {order['name']}{remark}"
