"""List and export receipts, and verify them offline."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from shoal.cli import api
from shoal.cli.arguments import add_action
from shoal.cli.terminal import format_day, print_table
from shoal.domain.errors import ConfigError
from shoal.domain.money import dollars

PATH = "/v1/receipts"
HEAD = ("LOG", "JOB", "AT", "WORKER", "PRICE", "WORKER'S RECEIPT")
WORKER_MAX = 40  # characters of a worker's name in the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = add_action(actions, "ls", "list the newest receipts")
    listing.add_argument(
        "--limit",
        type=int,
        default=20,
        metavar="N",
        help="number of receipts (default: %(default)s)",
    )
    listing.add_argument(
        "--before", type=int, metavar="N", help="only receipts before this one"
    )
    export = add_action(actions, "export", "write a receipt with its proof")
    export.add_argument("id", help="id of the job")
    export.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="file to write (default: standard output)",
    )
    consistency = add_action(
        actions,
        "growth",
        "write a proof that the log is append-only since a checkpoint",
    )
    consistency.add_argument("since", type=int, help="size of the checkpoint")
    consistency.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="file to write (default: standard output)",
    )
    key = add_action(actions, "key", "show the coordinator's public key")
    verify = add_action(actions, "verify", "verify a file of export or growth, offline")
    verify.add_argument("file", type=Path, help="file to verify; -: standard input")
    verify.add_argument(
        "--key",
        metavar="HEX",
        help="public key of the coordinator, from `shoal receipts key` (default: that "
        "of the coordinator on this machine)",
    )
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="data folder of the coordinator on this machine",
    )
    for each in (listing, export, consistency, key):
        each.add_argument("--json", action="store_true", help="print JSON")
        api.add_arguments(each)


def run(args: argparse.Namespace) -> int:
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "ls": _list,
        "export": _export,
        "growth": _growth,
        "key": _key,
        "verify": _verify,
    }
    return actions[args.action](args)


def _list(args: argparse.Namespace) -> int:
    filters = {"limit": args.limit, "before": args.before}
    query = urlencode({k: v for k, v in filters.items() if v is not None})
    receipts = api.request(args, f"{PATH}?{query}")
    if args.json:
        print(json.dumps(receipts))
        return 0
    if receipts["data"]:
        print_table(HEAD, [_row(each) for each in receipts["data"]])
    else:
        print("no receipts yet")
    if receipts["next"] is not None:
        print(f"older ones: --before {receipts['next']}", file=sys.stderr)
    return 0


def _export(args: argparse.Namespace) -> int:
    return _write(args, f"{PATH}/{quote(args.id, safe='')}")


def _growth(args: argparse.Namespace) -> int:
    return _write(args, f"/v1/log/growth?{urlencode({'since': args.since})}")


def _write(args: argparse.Namespace, path: str) -> int:
    # Unchanged: the signature covers the bytes.
    data = api.fetch(args, path)
    if args.output is None:
        sys.stdout.buffer.write(data)
        return 0
    try:
        args.output.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{args.output}: {error.strerror}") from error
    print(f"wrote {args.output}: shoal receipts verify {args.output}", file=sys.stderr)
    return 0


def _key(args: argparse.Namespace) -> int:
    log = api.request(args, "/v1/log")
    print(json.dumps(log) if args.json else log["public_key"])
    return 0


def _verify(args: argparse.Namespace) -> int:
    from shoal.ledger import bundle, consistency
    from shoal.ledger.verification import StepResult

    data = _read(args.file)
    verify = consistency.verify if b'"type":"shoal/growth"' in data else bundle.verify
    checks: Sequence[StepResult] = verify(data, _public_key(args))
    verified = all(check.ok for check in checks)
    if args.json:
        steps = [
            {"step": check.step.value, "ok": check.ok, "wrong": check.problem}
            for check in checks
        ]
        print(json.dumps({"verified": verified, "steps": steps}))
        return 0 if verified else 1
    for check in checks:
        print(f"{'ok    ' if check.ok else 'FAILED'}  {check.step.value}")
        if check.problem:
            print(f"        {check.problem}")
    print("verified" if verified else "NOT verified")
    return 0 if verified else 1


def _read(file: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error


def _public_key(args: argparse.Namespace) -> bytes:
    """Return the key to verify with, never the one in the file itself."""
    from shoal.config import USER_DATA
    from shoal.config.secret_files import SEED_FILE, signing_seed
    from shoal.ledger.keys import Signer, public_key_of

    if args.key is not None:
        if (key := public_key_of(args.key)) is None:
            raise ConfigError("--key: expected 64 hexadecimal digits")
        return key
    folder = args.data_dir or USER_DATA
    if not (folder / SEED_FILE).exists():
        raise ConfigError(
            "no public key: give --key, which `shoal receipts key` shows at the "
            "coordinator"
        )
    return Signer.from_seed(signing_seed(folder)).public_key


def _row(receipt: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(receipt["index"]),
        receipt["job_id"],
        format_day(receipt["at"]),
        receipt["worker"][:WORKER_MAX],
        dollars(receipt["price"]),
        receipt["verdict"],
    )
