"""What ``shoal keys`` and ``shoal tokens`` have in common: listing and revocation."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias
from urllib.parse import quote

from shoal.cli import api
from shoal.cli.arguments import add_action
from shoal.cli.terminal import format_day, print_table

Credential: TypeAlias = dict[str, Any]
"""A key or a token, as the admin API describes it."""


def add_credential_actions(
    actions: Any, create: argparse.ArgumentParser, noun: str, revocation: str
) -> None:
    """Add the actions ``ls`` and ``revoke``, and the flags that all three share."""
    listing = add_action(actions, "ls", f"list {noun}s")
    listing.add_argument("--all", action="store_true", help=f"include revoked {noun}s")
    revoke = add_action(actions, "revoke", revocation)
    revoke.add_argument("name", metavar="NAME_OR_ID", help="name or id, from `ls`")
    revoke.add_argument(
        "--yes",
        action="store_true",
        help="no confirmation; without a terminal there is none in any case",
    )
    for each in (create, listing, revoke):
        each.add_argument("--json", action="store_true", help="print JSON")
        api.add_arguments(each)


def list_credentials(
    args: argparse.Namespace,
    path: str,
    head: Sequence[str],
    row: Callable[[Credential], Sequence[str]],
) -> int:
    """Print the credentials, without the revoked ones unless ``--all`` is given."""
    found = api.request_all(args, path)["data"]
    found = [each for each in found if args.all or each["revoked_at"] is None]
    if args.json:
        print(json.dumps({"data": found}))
        return 0
    if not found:
        noun = path.rpartition("/")[2]
        print(f"no {noun}; create one with: shoal {noun} create NAME")
        return 0
    print_table(head, [row(each) for each in found])
    return 0


def revoke_credential(args: argparse.Namespace, path: str, consequence: str) -> int:
    """Revoke a credential, after confirmation at a terminal."""
    if not confirm_revocation(args, consequence):
        return 1
    revoked = api.request(args, f"{path}/{quote(args.name, safe='')}", method="DELETE")
    if args.json:
        print(json.dumps(revoked))
    else:
        print(f"revoked {revoked['name']} ({revoked['id']})")
    return 0


def format_expiry(credential: Credential) -> str:
    """Return when a credential expires, or when it was revoked."""
    if credential["revoked_at"] is not None:
        return f"revoked {format_day(credential['revoked_at'])}"
    return format_day(credential["expires_at"]) or "never"


def confirm_revocation(args: argparse.Namespace, consequence: str) -> bool:
    """Ask at a terminal whether to revoke ``args.name``; without one, do not ask."""
    if args.yes or not sys.stdin.isatty():
        return True
    print(f"Revoke {args.name}?  {consequence}  [y/N] ", end="", file=sys.stderr)
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
