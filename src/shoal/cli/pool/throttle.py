"""``shoal throttle``: the share of its speed that this machine lends."""

from pathlib import Path
from typing import Any

import click

from shoal.cli.options import data_dir_option, json_option
from shoal.cli.terminal import show
from shoal.config.throttle_file import ThrottleFile
from shoal.domain.errors import ConfigError
from shoal.domain.worker import THROTTLE_MAX

NOT_SET = "no share was set: the workers of this machine lend 100% of their speed"
RESUME = "shoal throttle 100"


class Percentage(click.ParamType[int]):
    """A share, given as ``50`` or ``50%``."""

    name = "percent"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        number = str(value).removesuffix("%")
        whole = number.isascii() and number.isdigit()
        if not whole or int(number) > THROTTLE_MAX:
            self.fail(
                f"expected a whole number from 0 to {THROTTLE_MAX}, got {value!r}",
                param,
                ctx,
            )
        return int(number)


@click.command("throttle")
@click.argument("percent", type=Percentage(), required=False)
@data_dir_option
@json_option
def command(percent: int | None, data_dir: Path, as_json: bool) -> None:
    """Set the share of its speed that this machine lends, or pause its workers.

    PERCENT is the share to lend, from 0 to 100; 0 pauses: running jobs finish, and no
    new ones start.  Without it, print the share that was set last.
    """
    file = ThrottleFile(data_dir.expanduser())
    try:
        if percent is not None:
            file.write(percent)
    except OSError as error:
        raise ConfigError(f"the throttle cannot be stored: {error}") from error
    stored = file.read()
    if percent:
        text = f"the workers of this machine lend {percent}% of their speed"
    elif percent is not None:
        text = f"the workers of this machine are paused; to resume: {RESUME}"
    else:
        text = NOT_SET if stored is None else f"{stored}%"
    show({"throttle": THROTTLE_MAX if stored is None else stored}, as_json, text)
