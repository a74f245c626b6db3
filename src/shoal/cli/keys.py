"""Create, list and revoke API keys."""

import argparse
import json
from typing import Any

from shoal.cli import api
from shoal.cli.arguments import add_action, parse_duration
from shoal.cli.credentials import (
    add_credential_actions,
    format_expiry,
    list_credentials,
    revoke_credential,
)
from shoal.cli.terminal import format_day

PATH = "/admin/keys"
LIMITS = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute",
    "tokens_per_day": "tokens a day",
    "budget": "tokens in all",
}
HEAD = ("NAME", "ID", "KEY", "SCOPE", "EXPIRES", "REQUESTS", "TOKENS", "LIMITS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = add_action(actions, "create", "create a key and print it, once")
    create.add_argument(
        "name",
        help="owner of the key; jobs and usage are recorded under it",
    )
    create.add_argument(
        "--scope",
        choices=("read", "use", "admin"),
        default="use",
        help="rights of the key: read only, jobs as well, or administration too "
        "(default: %(default)s)",
    )
    create.add_argument(
        "--expires",
        type=parse_duration,
        metavar="TIME",
        help="lifetime, such as 12h or 30d (default: unlimited)",
    )
    for limit, what in LIMITS.items():
        create.add_argument(
            f"--{limit.replace('_', '-')}",
            type=int,
            metavar="N",
            help=f"limit of {what} (default: none)",
        )
    create.add_argument(
        "--priority-max",
        choices=("low", "normal", "high"),
        default="high",
        help="highest priority of its jobs (default: %(default)s)",
    )
    add_credential_actions(
        actions, create, "key", "revoke a key, and cancel the requests that use it"
    )


def run(args: argparse.Namespace) -> int:
    match args.action:
        case "create":
            return _create(args)
        case "ls":
            return list_credentials(args, PATH, HEAD, _row)
        case _:
            return revoke_credential(args, PATH, "Requests that use it are cancelled.")


def _create(args: argparse.Namespace) -> int:
    body = {"name": args.name, "scope": args.scope, "expires_in": args.expires}
    body |= {limit: getattr(args, limit) for limit in LIMITS}
    body["priority_max"] = args.priority_max
    key = api.request(args, PATH, body)
    if args.json:
        print(json.dumps(key))
        return 0
    expires = f", until {format_day(key['expires_at'])}" if key["expires_at"] else ""
    print(f"{key['key']}\n")
    print(f"This is the key of {key['name']} (scope {key['scope']}{expires}).")
    print("It is shown only now: the coordinator stores nothing but its digest.")
    if "pinned_key" in key:
        print(
            "Shoal's programs on other machines also take it with the coordinator's "
            "fingerprint,\nand then trust this coordinator only:\n\n"
            + key["pinned_key"]
        )
    return 0


def _row(key: dict[str, Any]) -> tuple[str, ...]:
    tokens = key["prompt_tokens"] + key["completion_tokens"]
    limits = [f"{key[name]} {what}" for name, what in LIMITS.items() if key[name]]
    if key["priority_max"] != "high":
        limits.append(f"priority up to {key['priority_max']}")
    return (
        key["name"],
        key["id"],
        f"{key['start']}…",
        key["scope"],
        format_expiry(key),
        str(key["requests"]),
        str(tokens),
        ", ".join(limits),
    )
