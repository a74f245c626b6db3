"""Set the share of its speed that this machine lends, or pause its workers."""

import argparse
import os
from pathlib import Path

from shoal.config import USER_DATA
from shoal.config.throttle_file import ThrottleFile
from shoal.domain.errors import ConfigError
from shoal.domain.worker import THROTTLE_MAX

NOT_SET = "no share was set: the workers of this machine lend 100% of their speed"
RESUME = "shoal throttle 100"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "percent",
        nargs="?",
        type=_parse_percent,
        metavar="PERCENT",
        help="share to lend, from 0 to 100; 0 pauses: running jobs finish, and no new "
        "ones start (default: print the share that was set last)",
    )


def _parse_percent(text: str) -> int:
    """Return a percentage, given as ``50`` or ``50%``."""
    number = text.removesuffix("%")
    if not (number.isascii() and number.isdigit() and int(number) <= THROTTLE_MAX):
        raise argparse.ArgumentTypeError(
            f"expected a whole number from 0 to {THROTTLE_MAX}, got {text!r}"
        )
    return int(number)


def run(args: argparse.Namespace) -> int:
    file = ThrottleFile(Path(os.environ.get("SHOAL_DATA_DIR") or USER_DATA))
    if args.percent is None:
        percent = file.read()
        print(NOT_SET if percent is None else f"{percent}%")
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
