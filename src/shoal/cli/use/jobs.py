"""``shoal jobs`` and ``shoal quote``: submit, list, explain, cancel and price jobs."""

import getpass
import json
import shlex
import sys
import uuid
from contextlib import suppress
from typing import Any

import click

from shoal.cli.options import limit_option, pass_api_with_json
from shoal.cli.terminal import Columns, format_day, printable, show, show_page
from shoal.client.coordinator import CoordinatorApi, item_path
from shoal.client.reconnection import IDEMPOTENCY_KEY
from shoal.domain.errors import ConfigError, InvalidRequest, JobError, ShoalError
from shoal.domain.job import Privacy
from shoal.pool.explanation import last_line
from shoal.pool.trust import NO_TRUSTED_WORKER

PATH = "/admin/jobs"
COLUMNS: Columns = {
    "ID": "id",
    "STATE": "state",
    "KIND": "kind",
    "MODEL/FUNCTION": "model",
    "KEY": "owner",
    "SUBMITTED": lambda job: format_day(job["submitted_at"]),
    "ATTEMPTS": "attempts",
    "ERROR": lambda job: last_line(job["error"] or "")[:ERROR_MAX],
}
STATES = (
    *("queued", "leased", "streaming"),
    *("done", "failed", "cancelled", "expired"),
)
PRIVACY = [each.name for each in Privacy]
OPEN_STATUSES = ("pending", "assigned")
WAIT_STEP = 60.0  # seconds that one request waits for the end of a job
ERROR_MAX = 60  # characters of an error in the table

JOB_TYPES = ("LLM_INFER", "TASK")
POLICIES = ("AUTO", "FAST", "CHEAP")

_type_option = click.option(
    "--type",
    "job_type",
    type=click.Choice(JOB_TYPES, case_sensitive=False),
    default=JOB_TYPES[0],
    show_default=True,
    metavar="|".join(JOB_TYPES),
    help="Kind of the job: a prompt for a model, or a named task.",
)
_policy_option = click.option(
    "--policy",
    type=click.Choice(POLICIES, case_sensitive=False),
    default=POLICIES[0],
    show_default=True,
    metavar="|".join(POLICIES),
    help="Preferred workers, and the price.  FAST: desktops; CHEAP: those that ask the "
    "lowest price; AUTO: FAST for LLM_INFER, CHEAP "
    "for TASK.",
)


@click.group("jobs")
def command() -> None:
    """Submit, list, explain and cancel jobs."""


@command.command("submit")
@click.argument("text", metavar="INPUT")
@_type_option
@_policy_option
@click.option(
    "--task",
    metavar="NAME",
    help="Name of the task, which gets the input as `input`; required with --type "
    "TASK, unless --payload names it.",
)
@click.option(
    "--model", metavar="NAME", help="Model of an LLM_INFER job.  Default: any."
)
@click.option(
    "--max-tokens",
    type=int,
    metavar="N",
    help="Limit of an LLM_INFER job's answer, in tokens.  Default: 256.",
)
@click.option(
    "--payload", is_flag=True, help="The input is the whole payload, in JSON."
)
@click.option(
    "--privacy",
    type=click.Choice(PRIVACY, case_sensitive=False),
    default=Privacy.PUBLIC.name,
    show_default=True,
    metavar="|".join(PRIVACY),
    help="Privacy class; PRIVATE: only for workers that are paired with the user.",
)
@click.option(
    "--user",
    help="User of the job, a sub-account of the API key.  Default: the login name.",
)
@click.option(
    "--wait", is_flag=True, help="Wait until the job ends, and print its result."
)
@pass_api_with_json
def submit(
    api: CoordinatorApi,
    text: str,
    job_type: str,
    policy: str,
    task: str | None,
    model: str | None,
    max_tokens: int | None,
    payload: bool,
    privacy: str,
    user: str | None,
    wait: bool,
    as_json: bool,
) -> int:
    """Submit a job, and print its id.

    INPUT is the prompt, or the input of the task; - reads it from standard input.
    """
    fields = {"--task": task, "--model": model, "--max-tokens": max_tokens}
    _check_fields(job_type, fields, whole=payload)
    if policy == "AUTO":
        policy = _quote(api, job_type, policy)["policy_resolved"]
    body = {
        "job_type": job_type,
        "payload": _payload(job_type, _input(text), fields, whole=payload),
        "user_id": user or _login_name(),
        "privacy_class": privacy,
    }
    committed = _commit(api, policy, body)
    if wait:
        return _await_result(api, committed["job_id"], as_json=as_json)
    show(committed, as_json, committed["job_id"])
    return 0


@command.command("ls")
@click.option("--state", type=click.Choice(STATES), help="Filter by state.")
@click.option("--key", metavar="NAME", help="Filter by API key.")
@limit_option("jobs")
@click.option("--before", metavar="ID", help="Only jobs older than this one.")
@pass_api_with_json
def list_(
    api: CoordinatorApi,
    state: str | None,
    key: str | None,
    limit: int,
    before: str | None,
    as_json: bool,
) -> None:
    """List the newest jobs."""
    filters = {"limit": limit, "state": state, "owner": key, "before": before}
    show_page(api.request(PATH, query=filters), as_json, COLUMNS, "no such jobs")


@command.command("show")
@click.argument("id_", metavar="ID")
@pass_api_with_json
def show_job(api: CoordinatorApi, id_: str, as_json: bool) -> None:
    """Show a job and its result.

    ID is the id of the job, from a response or `shoal jobs ls`.
    """
    job = api.request(item_path(PATH, id_))
    if as_json:
        click.echo(json.dumps(job))
        return
    outcome = job.pop("outcome")
    for name, value in job.items():
        if name.endswith("_at"):
            value = format_day(value)
        if name == "model" and job["kind"] == "call":
            name = "function"
        if name == "gang" and value is not None:
            value = f"{value['id']}, rank {value['rank']} of {value['size']}"
        if value not in (None, ""):
            click.echo(f"{name:14}{printable(str(value))}")
    if outcome is not None:
        click.echo()
        click.echo(printable(_format_outcome(job["kind"], outcome)))


@command.command("explain")
@click.argument("id_", metavar="ID")
@pass_api_with_json
def explain(api: CoordinatorApi, id_: str, as_json: bool) -> None:
    """Show a job's history, and why workers got it or did not.

    ID is the id of the job, or of a run of `shoal train`.
    """
    explanation = api.request(f"{item_path(PATH, id_)}/explain")
    show(explanation, as_json, *map(printable, explanation["lines"]))


@command.command("cancel")
@click.argument("id_", metavar="ID")
@pass_api_with_json
def cancel(api: CoordinatorApi, id_: str, as_json: bool) -> None:
    """Cancel an open job.

    ID is the id of the job, or of a run of `shoal train`.
    """
    cancelled = api.request(item_path(PATH, id_), method="DELETE")
    show(cancelled, as_json, f"cancelled {cancelled['id']}")


@click.command("quote")
@_type_option
@_policy_option
@pass_api_with_json
def quote_command(
    api: CoordinatorApi, job_type: str, policy: str, as_json: bool
) -> None:
    """Show the price of a job by its type and policy."""
    quoted = _quote(api, job_type, policy)
    show(quoted, as_json, f"{quoted['price']}  {job_type} {quoted['policy_resolved']}")


def _quote(api: CoordinatorApi, job_type: str, policy: str) -> Any:
    """Return the coordinator's quote for a type of job.  Raises ShoalError."""
    return api.request("/v1/quote", query={"job_type": job_type, "policy": policy})


def _check_fields(job_type: str, fields: dict[str, Any], *, whole: bool) -> None:
    """Raise ConfigError for an option of the payload that does not fit the others."""
    fitting = ("--task",) if job_type == "TASK" else ("--model", "--max-tokens")
    for option, value in fields.items():
        if value is not None and whole:
            raise ConfigError(f"{option}: with --payload, give it in the payload")
        if value is not None and option not in fitting:
            other = "LLM_INFER" if job_type == "TASK" else "TASK"
            raise ConfigError(f"{option}: only for --type {other}")
    if job_type == "TASK" and fields["--task"] is None and not whole:
        raise ConfigError("--type TASK: give the name of the task with --task")


def _input(text: str) -> str:
    return sys.stdin.read() if text == "-" else text


def _payload(
    job_type: str, text: str, fields: dict[str, Any], *, whole: bool
) -> object:
    """Return the payload of a job.

    Raises ConfigError if it is to be JSON, and is not.
    """
    if whole:
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(f"--payload: expected JSON: {error}") from error
    if job_type == "TASK":
        return {"task_type": fields["--task"], "input": text}
    payload = {
        "prompt": text,
        "model": fields["--model"],
        "max_tokens": fields["--max-tokens"],
    }
    return {name: value for name, value in payload.items() if value is not None}


def _login_name() -> str:
    """Return the name of this machine's user; raises ConfigError if it has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:  # as in some containers
        raise ConfigError("no login name: give the user with --user") from error


def _commit(api: CoordinatorApi, policy: str, body: dict[str, Any]) -> Any:
    """Submit a job.  Raises InvalidRequest, with advice if no worker is paired."""
    try:
        # With a key the request can be sent again, when its answer is lost.
        key = {IDEMPOTENCY_KEY: uuid.uuid4().hex}
        return api.request(f"/v1/jobs/commit/{policy.lower()}", body, headers=key)
    except InvalidRequest as error:
        if not str(error).startswith(NO_TRUSTED_WORKER):
            raise
        user = shlex.quote(body["user_id"])
        advice = f"`shoal pair create {user}` creates a code that pairs one"
        raise InvalidRequest(f"{error}; {advice}") from error


def _await_result(api: CoordinatorApi, id_: str, *, as_json: bool) -> int:
    """Wait for the end of a job, and print its result; return the exit status."""
    path = f"{item_path('/v1/jobs', id_)}?wait={WAIT_STEP:g}"
    try:
        while (job := api.request(path))["status"] in OPEN_STATUSES:
            pass
    except KeyboardInterrupt:
        with suppress(ShoalError):  # it has just ended
            cancel = api.at_once.request
            cancel(item_path("/v1/jobs", id_), method="DELETE")
        raise
    failed = job["status"] != "completed"
    if as_json:
        click.echo(json.dumps(job))
    elif failed:
        raise JobError(f"job {job['id']} failed: {job['detail']}")
    else:
        click.echo(printable(_format_result(job["result"])))
    return int(failed)


def _format_result(result: Any) -> str:
    """Return the text of an answer, or the JSON of another output."""
    text = result.get("text") if isinstance(result, dict) else None
    if isinstance(text, str):
        return text
    return json.dumps(result, ensure_ascii=False)


def _format_outcome(kind: str, outcome: dict[str, Any]) -> str:
    """Return the result of a job: text, or the JSON of a function's value."""
    if kind == "call":
        return json.dumps(outcome["value"], ensure_ascii=False)
    text: str = outcome["text"]
    return json.dumps(outcome) if outcome["choices"] else text
