"""Make, list and revoke the tokens that workers join by."""

import argparse
import json
from typing import Any
from urllib.parse import quote

from shoal.cli import api
from shoal.cli.arguments import add_action, add_revoke, confirm_revoke, parse_duration
from shoal.cli.terminal import format_day, print_table

PATH = "/admin/tokens"
HEAD = ("NAME", "ID", "EXPIRES", "USES", "THERE", "MODELS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = add_action(actions, "create", "make a token, and show it this once")
    create.add_argument("name", help="what it is for")
    create.add_argument(
        "--uses",
        type=int,
        metavar="N",
        help="workers that may join by it; they may come back, also after it has "
        "expired (default: any number)",
    )
    create.add_argument(
        "--expires",
        type=parse_duration,
        metavar="TIME",
        help="after 1h, 7d (default: never)",
    )
    create.add_argument(
        "--models",
        default="",
        metavar="PATTERNS",
        help="what they may offer, such as 'llama*,qwen3-8b' (default: any model)",
    )
    listing = add_action(actions, "ls", "show the tokens that were made")
    listing.add_argument("--all", action="store_true", help="also those revoked")
    revoke = add_revoke(actions, "end a token, and hang up on those who joined by it")
    for each in (create, listing, revoke):
        each.add_argument("--json", action="store_true", help="print JSON")
        api.add_arguments(each)


def run(args: argparse.Namespace) -> int:
    return {"create": _create, "ls": _list, "revoke": _revoke}[args.action](args)


def _create(args: argparse.Namespace) -> int:
    patterns = [each.strip() for each in args.models.split(",") if each.strip()]
    wanted = {
        "name": args.name,
        "uses": args.uses,
        "expires_in": args.expires,
        "models": patterns,
    }
    made = api.request(args, PATH, wanted)
    if args.json:
        print(json.dumps(made))
        return 0
    print(f"{made['join']}\n")
    print(f"This is how to join by the token {made['name']}.  It is shown only now.")
    if made["uses"] is not None:
        advice = "Keep" if "--name" in made["join"] else "Add a"
        print(
            f"{advice} --name: a worker that comes back under another name is another "
            "one."
        )
    return 0


def _list(args: argparse.Namespace) -> int:
    tokens = api.request(args, PATH)["data"]
    tokens = [token for token in tokens if args.all or token["revoked_at"] is None]
    if args.json:
        print(json.dumps({"data": tokens}))
        return 0
    if not tokens:
        print("no tokens were made yet: shoal tokens create NAME")
        return 0
    print_table(HEAD, [_row(token) for token in tokens])
    return 0


def _revoke(args: argparse.Namespace) -> int:
    if not confirm_revoke(args, "Workers that joined by it are hung up on."):
        return 1
    ended = api.request(args, f"{PATH}/{quote(args.name, safe='')}", method="DELETE")
    if args.json:
        print(json.dumps(ended))
    else:
        print(f"revoked {ended['name']} ({ended['id']})")
    return 0


def _row(token: dict[str, Any]) -> tuple[str, ...]:
    expires = format_day(token["expires_at"]) or "never"
    if token["revoked_at"] is not None:
        expires = f"revoked {format_day(token['revoked_at'])}"
    uses = "any"
    if token["uses"] is not None:
        uses = f"{len(token['workers'])} of {token['uses']}"
    return (
        token["name"],
        token["id"],
        expires,
        uses,
        str(token["present"]),
        ", ".join(token["models"]) or "any",
    )
