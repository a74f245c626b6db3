"""Create, list and revoke join tokens of workers."""

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

PATH = "/admin/tokens"
HEAD = ("NAME", "ID", "EXPIRES", "USES", "CONNECTED", "MODELS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = add_action(actions, "create", "create a token and print it, once")
    create.add_argument("name", help="name of the token")
    create.add_argument(
        "--uses",
        type=int,
        metavar="N",
        help="number of workers that may join with it; they may reconnect, even after "
        "it has expired (default: unlimited)",
    )
    create.add_argument(
        "--expires",
        type=parse_duration,
        metavar="TIME",
        help="lifetime, such as 1h or 7d (default: unlimited)",
    )
    create.add_argument(
        "--models",
        default="",
        metavar="PATTERNS",
        help="models that the workers may offer, such as 'llama*,qwen3-8b' "
        "(default: any)",
    )
    add_credential_actions(
        actions,
        create,
        "token",
        "revoke a token, and disconnect the workers that joined with it",
    )


def run(args: argparse.Namespace) -> int:
    match args.action:
        case "create":
            return _create(args)
        case "ls":
            return list_credentials(args, PATH, HEAD, _row)
        case _:
            return revoke_credential(
                args, PATH, "Workers that joined with it are disconnected."
            )


def _create(args: argparse.Namespace) -> int:
    patterns = [each.strip() for each in args.models.split(",") if each.strip()]
    body = {
        "name": args.name,
        "uses": args.uses,
        "expires_in": args.expires,
        "models": patterns,
    }
    token = api.request(args, PATH, body)
    if args.json:
        print(json.dumps(token))
        return 0
    print(f"{token['join']}\n")
    print(f"This command joins with the token {token['name']}.  It is shown only now.")
    if token["uses"] is not None:
        advice = "Keep" if "--name" in token["join"] else "Add a"
        print(
            f"{advice} --name: a worker that reconnects under another name counts as "
            "another one."
        )
    return 0


def _row(token: dict[str, Any]) -> tuple[str, ...]:
    uses = "any"
    if token["uses"] is not None:
        uses = f"{len(token['workers'])} of {token['uses']}"
    return (
        token["name"],
        token["id"],
        format_expiry(token),
        uses,
        str(token["present"]),
        ", ".join(token["models"]) or "any",
    )
