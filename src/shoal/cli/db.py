"""Check, back up and compact a coordinator's database, on its machine."""

import argparse
import os
import sys
from pathlib import Path

from shoal.cli.arguments import add_action
from shoal.config import USER_DATA
from shoal.store.sqlite import maintenance

DATABASE = "shoal.db"
FILES = "files"  # folder of what clients have uploaded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = add_action(actions, "check", "look for damage, also while it is in use")
    backup = add_action(actions, "backup", "copy it to a file, also while it is in use")
    backup.add_argument("file", type=Path, help="file to write; must not exist")
    compact = add_action(actions, "compact", "rewrite it without free space")
    for each in (check, backup, compact):
        each.add_argument(
            "--data-dir",
            type=Path,
            default=Path(os.environ.get("SHOAL_DATA_DIR") or USER_DATA),
            metavar="DIR",
            help=f"data folder of the coordinator (default: {USER_DATA}) "
            "[SHOAL_DATA_DIR]",
        )


def run(args: argparse.Namespace) -> int:
    path: Path = args.data_dir.expanduser() / DATABASE
    files = path.with_name(FILES)
    if args.action == "check":
        return _check(path)
    if args.action == "backup":
        maintenance.back_up(path, args.file)
        print(f"wrote {args.file}")
        if any(files.glob("*")):
            print(f"clients' files are not in it: copy {files} as well")
    else:
        before, after = maintenance.compact(path)
        print(f"{path}: {before / 1e6:,.1f} MB before, {after / 1e6:,.1f} MB now")
    return 0


def _check(path: Path) -> int:
    problems = maintenance.check(path)
    for each in problems:
        print(f"{path}: {each}", file=sys.stderr)
    if not problems:
        print(f"{path}: no damage found")
    return 1 if problems else 0
