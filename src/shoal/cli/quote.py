"""Show the price of a job by its type and policy."""

import argparse
import json
from urllib.parse import urlencode

from shoal.cli import api

JOB_TYPES = ("LLM_INFER", "TASK")
POLICIES = ("AUTO", "FAST", "CHEAP")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_terms(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    api.add_arguments(parser)


def add_terms(parser: argparse.ArgumentParser) -> None:
    """Add the flags that decide the price of a job."""
    parser.add_argument(
        "--type",
        type=str.upper,
        choices=JOB_TYPES,
        default=JOB_TYPES[0],
        help="kind of the job: a prompt for a model, or a named task "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--policy",
        type=str.upper,
        choices=POLICIES,
        default=POLICIES[0],
        help="which workers are preferred, and the price; AUTO: FAST for LLM_INFER, "
        "CHEAP for TASK (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    quoted = api.request(
        args, f"/v1/quote?{urlencode({'job_type': args.type, 'policy': args.policy})}"
    )
    if args.json:
        print(json.dumps(quoted))
    else:
        print(f"{quoted['price']}  {args.type} {quoted['policy_resolved']}")
    return 0
