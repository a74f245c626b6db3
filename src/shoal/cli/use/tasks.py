"""``shoal tasks``: list and call the functions of a pool's workers."""

import json
import re
from typing import Any

import click
import msgspec

from shoal.cli.options import parse_pair, pass_api_with_json
from shoal.cli.terminal import Columns, printable, show, table
from shoal.client.coordinator import CoordinatorApi
from shoal.client.errors import remote_traceback
from shoal.client.pool import Pool

COLUMNS: Columns = {"NAME": "name", "WORKERS": "workers", "SLOTS": "slots"}
NOTHING = (
    "no worker offers functions: decorate them with @shoal.task in a module, and "
    "start `shoal join --tasks MODULE`"
)

_NEGATIVE = re.compile(r"-(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)


class CallCommand(click.Command):
    """A command whose arguments may be negative numbers, as JSON writes them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # After a space, which JSON ignores, they are not taken for options.
        spaced = [f" {each}" if _NEGATIVE.fullmatch(each) else each for each in args]
        return super().parse_args(ctx, spaced)


@click.group("tasks")
def command() -> None:
    """List and call the functions of a pool's workers."""


@command.command("ls")
@pass_api_with_json
def list_(api: CoordinatorApi, as_json: bool) -> None:
    """List the functions of all workers."""
    listing = api.request("/v1/tasks")
    lines = [] if listing["workers"] else [NOTHING]
    if listing["tasks"]:
        lines = table(COLUMNS, listing["tasks"])
    if listing["code"]:
        lines.append(
            f"{listing['code']} of {listing['workers']} workers run functions that "
            "clients send"
        )
    if listing["unnamed"]:
        lines.append(f"{listing['unnamed']} workers do not list their functions")
    show(listing, as_json, *lines)


@command.command("run", cls=CallCommand)
@click.argument("name")
@click.argument("args", nargs=-1, metavar="[ARG]...")
@click.option(
    "--kwarg",
    "keywords",
    multiple=True,
    metavar="NAME=VALUE",
    help="Keyword argument; repeatable.",
)
@click.option(
    "--timeout", type=float, metavar="SECONDS", help="Limit of the running time."
)
@pass_api_with_json
def run(
    api: CoordinatorApi,
    name: str,
    args: tuple[str, ...],
    keywords: tuple[str, ...],
    timeout: float | None,
    as_json: bool,
) -> int:
    """Call a function and print its result.

    NAME is the name of the function, from `shoal tasks ls`; ARG is a positional
    argument: JSON, else text.
    """
    pairs = (parse_pair("--kwarg", each) for each in keywords)
    kwargs = {name: _value(value) for name, value in pairs}
    with Pool(**api.options) as pool:
        options = pool.with_options(timeout=timeout, exact=False)
        future = options.submit(name, *map(_value, args), **kwargs)
        try:
            value = future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise
        except Exception as error:
            if (remote := remote_traceback(error)) is None:
                raise
            click.echo(printable(remote.args[0].rstrip()), err=True)
            return 1
    click.echo(_text(value, as_json=as_json))
    return 0


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text(value: object, *, as_json: bool) -> str:
    """Return a value for printing: text unchanged, anything else as JSON.

    Values without a JSON form are printed as their ``repr``, and the numbers that JSON
    lacks as Python's ``json`` writes and reads them: NaN, Infinity.
    """
    if isinstance(value, str) and not as_json:
        return printable(value)
    plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_encode_unknown)
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def _encode_unknown(value: Any) -> object:
    """Convert an array to a list, and anything else to its ``repr``."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)
