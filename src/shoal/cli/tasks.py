"""List and call the functions of a pool's workers."""

import argparse
import json
import sys
from typing import Any

import msgspec

from shoal.cli import api
from shoal.cli.arguments import add_action
from shoal.cli.terminal import print_table, printable
from shoal.client.errors import remote_traceback
from shoal.client.pool import Pool
from shoal.domain.errors import ConfigError

HEAD = ("NAME", "WORKERS", "SLOTS")
NOTHING = (
    "no worker offers functions: decorate them with @shoal.task in a module, and "
    "start `shoal join --tasks MODULE`"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = add_action(actions, "ls", "list the functions of all workers")
    run = add_action(actions, "run", "call a function and print its result")
    run.add_argument("name", help="name of the function, from `shoal tasks ls`")
    run.add_argument(
        "args", nargs="*", metavar="ARG", help="positional argument: JSON, else text"
    )
    run.add_argument(
        "--kwarg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="keyword argument; repeatable",
    )
    run.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="limit of the running time"
    )
    for each in (listing, run):
        each.add_argument("--json", action="store_true", help="print JSON")
        api.add_arguments(each)


def run(args: argparse.Namespace) -> int:
    return {"ls": _list, "run": _run}[args.action](args)


def _list(args: argparse.Namespace) -> int:
    listing = api.request(args, "/v1/tasks")
    if args.json:
        print(json.dumps(listing))
        return 0
    if listing["tasks"]:
        print_table(HEAD, [_row(each) for each in listing["tasks"]])
    elif not listing["workers"]:
        print(NOTHING)
    if listing["code"]:
        print(
            f"{listing['code']} of {listing['workers']} workers run functions that "
            "clients send"
        )
    if listing["unnamed"]:
        print(f"{listing['unnamed']} workers do not list their functions")
    return 0


def _run(args: argparse.Namespace) -> int:
    kwargs = dict(map(_parse_keyword, args.kwarg))
    pool = Pool(args.url, args.api_key, data_dir=args.data_dir, cacert=args.cacert)
    with pool:
        options = pool.with_options(timeout=args.timeout)
        future = options.submit(args.name, *map(_value, args.args), **kwargs)
        try:
            value = future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise
        except Exception as error:
            if (remote := remote_traceback(error)) is None:
                raise
            print(printable(remote.args[0].rstrip()), file=sys.stderr)
            return 1
    print(_text(value, as_json=args.json))
    return 0


def _row(task: dict[str, Any]) -> tuple[str, ...]:
    return task["name"], str(task["workers"]), str(task["slots"])


def _parse_keyword(argument: str) -> tuple[str, Any]:
    name, equals, value = argument.partition("=")
    if not name or not equals:
        raise ConfigError(f"--kwarg {argument}: expected NAME=VALUE")
    return name, _value(value)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text(value: object, *, as_json: bool) -> str:
    """Return a value for printing: text unchanged, anything else as JSON.

    Values without a JSON form are printed as their ``repr``.
    """
    if isinstance(value, str) and not as_json:
        return printable(value)
    return msgspec.json.encode(value, enc_hook=_encode_unknown).decode()


def _encode_unknown(value: Any) -> object:
    """Convert an array to a list, and anything else to its ``repr``."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)
