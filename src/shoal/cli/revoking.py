"""What commands that revoke something have in common."""

import argparse
import sys
from typing import Any

from shoal.cli.actions import add_action


def add_revoke(actions: Any, does: str) -> argparse.ArgumentParser:
    """Add the action to the parser's ``actions``, as ``add_action`` does."""
    revoke = add_action(actions, "revoke", does)
    revoke.add_argument("name", metavar="NAME_OR_ID", help="as `ls` shows it")
    revoke.add_argument(
        "--yes", action="store_true", help="do not ask, as is never done off a terminal"
    )
    return revoke


def confirmed(args: argparse.Namespace, consequence: str) -> bool:
    """Ask whether it is meant, if there is anybody to ask."""
    if args.yes or not sys.stdin.isatty():
        return True
    print(f"Revoke {args.name}?  {consequence}  [y/N] ", end="", file=sys.stderr)
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
