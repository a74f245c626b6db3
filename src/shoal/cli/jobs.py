"""List, explain and cancel jobs."""

import argparse
import json
from typing import Any
from urllib.parse import quote, urlencode

from shoal.cli import api
from shoal.cli.arguments import add_action
from shoal.cli.terminal import format_day, print_table, printable

PATH = "/admin/jobs"
HEAD = (
    "ID",
    "STATE",
    "KIND",
    "MODEL/FUNCTION",
    "KEY",
    "SUBMITTED",
    "ATTEMPTS",
    "ERROR",
)
STATES = (
    *("queued", "leased", "streaming"),
    *("done", "failed", "cancelled", "expired"),
)
ERROR_MAX = 60  # characters of an error in the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = add_action(actions, "ls", "list the newest jobs")
    listing.add_argument("--state", choices=STATES, help="filter by state")
    listing.add_argument("--key", metavar="NAME", help="filter by API key")
    listing.add_argument(
        "--limit",
        type=int,
        default=20,
        metavar="N",
        help="number of jobs (default: %(default)s)",
    )
    show = add_action(actions, "show", "show a job and its result")
    explain = add_action(actions, "explain", "explain the course of a job")
    cancel = add_action(actions, "cancel", "cancel an open job")
    for each in (show, explain, cancel):
        each.add_argument(
            "id", help="id of the job, from a response or `shoal jobs ls`"
        )
    for each in (listing, show, explain, cancel):
        each.add_argument("--json", action="store_true", help="print JSON")
        api.add_arguments(each)


def run(args: argparse.Namespace) -> int:
    return {"ls": _list, "show": _show, "explain": _explain, "cancel": _cancel}[
        args.action
    ](args)


def _list(args: argparse.Namespace) -> int:
    filters = {"limit": args.limit, "state": args.state, "owner": args.key}
    query = urlencode({k: v for k, v in filters.items() if v is not None})
    jobs = api.request(args, f"{PATH}?{query}")
    if args.json:
        print(json.dumps(jobs))
    elif jobs["data"]:
        print_table(HEAD, [_row(job) for job in jobs["data"]])
    else:
        print("no such jobs")
    return 0


def _show(args: argparse.Namespace) -> int:
    job = api.request(args, _path(args))
    if args.json:
        print(json.dumps(job))
        return 0
    outcome = job.pop("outcome")
    for name, value in job.items():
        if name.endswith("_at"):
            value = format_day(value)
        if name == "model" and job["kind"] == "call":
            name = "function"
        if value not in (None, ""):
            print(f"{name:14}{printable(str(value))}")
    if outcome is not None:
        print()
        print(printable(_format_outcome(job["kind"], outcome)))
    return 0


def _format_outcome(kind: str, outcome: dict[str, Any]) -> str:
    """Return the result of a job: text, or the JSON of a function's value."""
    if kind == "call":
        return json.dumps(outcome["value"], ensure_ascii=False)
    text: str = outcome["text"]
    return json.dumps(outcome) if outcome["choices"] else text


def _explain(args: argparse.Namespace) -> int:
    explanation = api.request(args, f"{_path(args)}/explain")
    if args.json:
        print(json.dumps(explanation))
        return 0
    for line in explanation["lines"]:
        print(printable(line))
    return 0


def _cancel(args: argparse.Namespace) -> int:
    cancelled = api.request(args, _path(args), method="DELETE")
    print(json.dumps(cancelled) if args.json else f"cancelled {cancelled['id']}")
    return 0


def _path(args: argparse.Namespace) -> str:
    return f"{PATH}/{quote(args.id, safe='')}"


def _row(job: dict[str, Any]) -> tuple[str, ...]:
    return (
        job["id"],
        job["state"],
        job["kind"],
        job["model"],
        job["owner"],
        format_day(job["submitted_at"]),
        str(job["attempts"]),
        _last_line(job["error"] or "")[:ERROR_MAX],
    )


def _last_line(error: str) -> str:
    """Return the last line of an error, which of a traceback is the message."""
    return error.rstrip().rpartition("\n")[2]
