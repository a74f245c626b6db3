"""``shoal quote``: the price of a job by its type and policy."""

import json
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlencode

import click

from shoal.cli.options import json_option, pass_api
from shoal.client.coordinator import CoordinatorApi

F = TypeVar("F", bound=Callable[..., Any])

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
    help="Which workers are preferred, and the price; AUTO: FAST for LLM_INFER, CHEAP "
    "for TASK.",
)


def price_options(function: F) -> F:
    """Add the options that decide the price of a job."""
    return _type_option(_policy_option(function))


@click.command("quote")
@price_options
@json_option
@pass_api
def command(api: CoordinatorApi, job_type: str, policy: str, as_json: bool) -> None:
    """Show the price of a job by its type and policy."""
    quoted = quote(api, job_type, policy)
    if as_json:
        click.echo(json.dumps(quoted))
    else:
        click.echo(f"{quoted['price']}  {job_type} {quoted['policy_resolved']}")


def quote(api: CoordinatorApi, job_type: str, policy: str) -> Any:
    """Return the coordinator's quote for a type of job.

    Raises ShoalError.
    """
    query = urlencode({"job_type": job_type, "policy": policy})
    return api.request(f"/v1/quote?{query}")
