"""Set the share of its speed that this machine lends, or pause its workers."""

import argparse
import os
from pathlib import Path

from shoal.config import USER_DATA
from shoal.config.throttle_file import ThrottleFile
from shoal.domain.errors import ConfigError

RESUME = "shoal throttle 100"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "percent",
        nargs="?",
        type=int,
        metavar="PERCENT",
        help="share to lend, from 0 to 100; 0 pauses: running jobs finish, and no new "
        "ones start (default: print the share that was set last)",
    )


def run(args: argparse.Namespace) -> int:
    file = ThrottleFile(Path(os.environ.get("SHOAL_DATA_DIR") or USER_DATA))
    if args.percent is None:
        percent = file.read()
        print("no throttle was set" if percent is None else f"{percent}%")
        return 0
    try:
        file.write(args.percent)
    except OSError as error:
        raise ConfigError(f"the throttle cannot be stored: {error}") from error
    if args.percent:
        print(f"the workers of this machine lend {args.percent}% of their speed")
    else:
        print(f"the workers of this machine are paused; to resume: {RESUME}")
    return 0
