"""Make, list and revoke API keys."""

import argparse
import json
from typing import Any
from urllib.parse import quote

from shoal.cli import api
from shoal.cli.arguments import add_action, add_revoke, confirm_revoke, parse_duration
from shoal.cli.terminal import format_day, print_table

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
    create = add_action(actions, "create", "make a key, and show it this once")
    create.add_argument("name", help="whose it is; jobs and usage stand under it")
    create.add_argument(
        "--scope",
        choices=("read", "use", "admin"),
        default="use",
        help="what it is for: to look, to have jobs done, or everything "
        "(default: %(default)s)",
    )
    create.add_argument(
        "--expires",
        type=parse_duration,
        metavar="TIME",
        help="after 12h, 30d (default: never)",
    )
    for limit, what in LIMITS.items():
        create.add_argument(
            f"--{limit.replace('_', '-')}",
            type=int,
            metavar="N",
            help=f"{what}, at most",
        )
    listing = add_action(actions, "ls", "show the keys that were made")
    listing.add_argument("--all", action="store_true", help="also those revoked")
    revoke = add_revoke(actions, "end a key, and all that is done under it")
    for each in (create, listing, revoke):
        each.add_argument("--json", action="store_true", help="print JSON")
        api.add_arguments(each)


def run(args: argparse.Namespace) -> int:
    return {"create": _create, "ls": _list, "revoke": _revoke}[args.action](args)


def _create(args: argparse.Namespace) -> int:
    wanted = {"name": args.name, "scope": args.scope, "expires_in": args.expires}
    wanted |= {limit: getattr(args, limit) for limit in LIMITS}
    made = api.request(args, PATH, wanted)
    if args.json:
        print(json.dumps(made))
        return 0
    expires = f", until {format_day(made['expires_at'])}" if made["expires_at"] else ""
    print(f"{made['key']}\n")
    print(f"This is the key of {made['name']} (scope {made['scope']}{expires}).")
    print("It is shown only now: nothing but its digest is kept.")
    return 0


def _list(args: argparse.Namespace) -> int:
    keys = api.request(args, PATH)["data"]
    keys = [key for key in keys if args.all or key["revoked_at"] is None]
    if args.json:
        print(json.dumps({"data": keys}))
        return 0
    if not keys:
        print("no keys were made yet: shoal keys create NAME")
        return 0
    print_table(HEAD, [_row(key) for key in keys])
    return 0


def _revoke(args: argparse.Namespace) -> int:
    if not confirm_revoke(args, "All that is being done under it ends."):
        return 1
    ended = api.request(args, f"{PATH}/{quote(args.name, safe='')}", method="DELETE")
    if args.json:
        print(json.dumps(ended))
    else:
        print(f"revoked {ended['name']} ({ended['id']})")
    return 0


def _row(key: dict[str, Any]) -> tuple[str, ...]:
    expires = format_day(key["expires_at"]) or "never"
    if key["revoked_at"] is not None:
        expires = f"revoked {format_day(key['revoked_at'])}"
    tokens = key["prompt_tokens"] + key["completion_tokens"]
    limits = [f"{key[name]} {what}" for name, what in LIMITS.items() if key[name]]
    return (
        key["name"],
        key["id"],
        f"{key['start']}…",
        key["scope"],
        expires,
        str(key["requests"]),
        str(tokens),
        ", ".join(limits),
    )
