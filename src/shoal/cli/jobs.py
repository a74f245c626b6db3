"""Submit, list, explain and cancel jobs."""

import argparse
import getpass
import json
import shlex
import sys
from typing import Any
from urllib.parse import quote, urlencode

from shoal.cli import api
from shoal.cli.arguments import add_action
from shoal.cli.quote import add_terms
from shoal.cli.terminal import format_day, print_table, printable
from shoal.domain.errors import ConfigError
from shoal.domain.job import Privacy
from shoal.pool.trust import NO_TRUSTED_WORKER

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
OPEN_STATUSES = ("pending", "assigned")
WAIT_STEP = 60.0  # seconds that one request waits for the end of a job
ERROR_MAX = 60  # characters of an error in the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    submit = add_action(actions, "submit", "submit a job, and print its id")
    _add_submission(submit)
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
    listing.add_argument("--before", metavar="ID", help="only jobs older than this one")
    show = add_action(actions, "show", "show a job and its result")
    explain = add_action(actions, "explain", "explain the course of a job")
    cancel = add_action(actions, "cancel", "cancel an open job")
    show.add_argument("id", help="id of the job, from a response or `shoal jobs ls`")
    for each in (explain, cancel):
        each.add_argument("id", help="id of the job, or of a run of `shoal train`")
    for each in (submit, listing, show, explain, cancel):
        each.add_argument("--json", action="store_true", help="print JSON")
        api.add_arguments(each)


def run(args: argparse.Namespace) -> int:
    actions = {
        "submit": _submit,
        "ls": _list,
        "show": _show,
        "explain": _explain,
        "cancel": _cancel,
    }
    return actions[args.action](args)


def _add_submission(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input",
        help="prompt, or input of the task; - reads it from standard input",
    )
    add_terms(parser)
    parser.add_argument(
        "--task",
        metavar="NAME",
        help="name of the task, which gets the input as `input`; required with --type "
        "TASK, unless --payload names it",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="model of an LLM_INFER job (default: any)"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="limit of an LLM_INFER job's answer, in tokens (default: 256)",
    )
    parser.add_argument(
        "--payload",
        action="store_true",
        help="the input is the whole payload, in JSON",
    )
    parser.add_argument(
        "--privacy",
        type=str.upper,
        choices=[each.name for each in Privacy],
        default=Privacy.PUBLIC.name,
        help="privacy class; PRIVATE: only for workers that are paired with the user "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--user",
        help="user of the job, a sub-account of the API key (default: the login name)",
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="wait for the end of the job, and print its result",
    )


def _submit(args: argparse.Namespace) -> int:
    query = urlencode({"job_type": args.type, "policy": args.policy})
    policy = args.policy
    if policy == "AUTO":
        policy = api.request(args, f"/v1/quote?{query}")["policy_resolved"]
    body = {
        "job_type": args.type,
        "payload": _payload(args),
        "user_id": args.user or _login_name(),
        "privacy_class": args.privacy,
    }
    try:
        committed = api.request(args, f"/v1/jobs/commit/{policy.lower()}", body)
    except api.ApiError as error:
        if not str(error).startswith(NO_TRUSTED_WORKER):
            raise
        user = shlex.quote(body["user_id"])
        advice = f"`shoal pair create {user}` makes a code that pairs one"
        raise api.ApiError(f"{error}; {advice}") from error
    if not args.wait:
        print(json.dumps(committed) if args.json else committed["job_id"])
        return 0
    path = f"/v1/jobs/{quote(committed['job_id'], safe='')}?wait={WAIT_STEP:g}"
    while (job := api.request(args, path))["status"] in OPEN_STATUSES:
        pass
    failed = job["status"] != "completed"
    if args.json:
        print(json.dumps(job))
    elif failed:
        raise api.ApiError(f"job {job['id']} failed: {job['detail']}")
    else:
        print(printable(_format_result(job["result"])))
    return int(failed)


def _login_name() -> str:
    """Return the name of this machine's user; raises ConfigError if it has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:  # as in some containers
        raise ConfigError("no login name: give the user with --user") from error


def _payload(args: argparse.Namespace) -> object:
    """Return the payload of a job; raises ConfigError if the flags do not fit."""
    _check_flags(args)
    text = sys.stdin.read() if args.input == "-" else args.input
    if args.payload:
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(f"--payload: expected JSON: {error}") from error
    if args.type == "TASK":
        if args.task is None:
            raise ConfigError("--type TASK: give the name of the task with --task")
        return {"task_type": args.task, "input": text}
    fields = {"prompt": text, "model": args.model, "max_tokens": args.max_tokens}
    return {name: value for name, value in fields.items() if value is not None}


def _check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for a flag that does not fit the others."""
    given = {
        "--task": args.task,
        "--model": args.model,
        "--max-tokens": args.max_tokens,
    }
    fitting = ("--task",) if args.type == "TASK" else ("--model", "--max-tokens")
    for flag, value in given.items():
        if value is not None and args.payload:
            raise ConfigError(f"{flag}: with --payload, give it in the payload")
        if value is not None and flag not in fitting:
            other = "LLM_INFER" if args.type == "TASK" else "TASK"
            raise ConfigError(f"{flag}: only for --type {other}")


def _format_result(result: Any) -> str:
    """Return the text of an answer, or the JSON of another output."""
    text = result.get("text") if isinstance(result, dict) else None
    if isinstance(text, str):
        return text
    return json.dumps(result, ensure_ascii=False)


def _list(args: argparse.Namespace) -> int:
    filters = {
        "limit": args.limit,
        "state": args.state,
        "owner": args.key,
        "before": args.before,
    }
    query = urlencode({k: v for k, v in filters.items() if v is not None})
    jobs = api.request(args, f"{PATH}?{query}")
    if args.json:
        print(json.dumps(jobs))
        return 0
    if jobs["data"]:
        print_table(HEAD, [_row(job) for job in jobs["data"]])
    elif jobs["next"] is None:
        print("no such jobs")
    if jobs["next"] is not None:
        print(f"older ones: --before {jobs['next']}", file=sys.stderr)
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
        if name == "gang" and value is not None:
            value = f"{value['id']}, rank {value['rank']} of {value['size']}"
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
