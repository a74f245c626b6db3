"""``shoal receipts``: list and export receipts, and verify them offline."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

import click

from shoal.cli import options
from shoal.cli.terminal import Columns, format_day, show, show_page
from shoal.client.coordinator import CoordinatorApi
from shoal.domain.errors import ConfigError
from shoal.domain.money import dollars

if TYPE_CHECKING:
    from shoal.ledger.verification import StepResult

PATH = "/v1/receipts"
WORKER_MAX = 40  # characters of a worker's name in the table
COLUMNS: Columns = {
    "LOG": "index",
    "JOB": "job_id",
    "AT": lambda receipt: format_day(receipt["at"]),
    "WORKER": lambda receipt: receipt["worker"][:WORKER_MAX],
    "PRICE": lambda receipt: dollars(receipt["price"]),
    "WORKER'S RECEIPT": "verdict",
}

_output_option = click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File to write.  Default: standard output.",
)


@click.group("receipts")
def command() -> None:
    """List and export receipts, and verify them offline."""


@command.command("ls")
@options.limit_option("receipts")
@click.option("--before", type=int, metavar="N", help="Only receipts before this one.")
@options.pass_api_with_json
def list_(api: CoordinatorApi, limit: int, before: int | None, as_json: bool) -> None:
    """List the newest receipts."""
    found = api.request(PATH, query={"limit": limit, "before": before})
    show_page(found, as_json, COLUMNS, "no receipts yet")


@command.command("export")
@click.argument("id_", metavar="ID")
@click.option(
    "--request",
    "with_request",
    is_flag=True,
    help="Include the proof of the request: its text, if it is still stored, and the "
    "salt of its hash.  Requires the API key that submitted the job.",
)
@_output_option
@options.pass_api_with_json
def export(
    api: CoordinatorApi,
    id_: str,
    with_request: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Write a receipt with its proof, as JSON.

    ID is the id of the job.
    """
    query = "?request=true" if with_request else ""
    _write(api.fetch(f"{PATH}/{quote(id_, safe='')}{query}"), output, as_json=as_json)


@command.command("growth")
@click.argument("since", type=int)
@_output_option
@options.pass_api_with_json
def growth(api: CoordinatorApi, since: int, output: Path | None, as_json: bool) -> None:
    """Write a proof that the log has only grown since a checkpoint, as JSON.

    SINCE is the size of the checkpoint.
    """
    _write(
        api.fetch(f"/v1/log/growth?{urlencode({'since': since})}"),
        output,
        as_json=as_json,
    )


@command.command("key")
@options.pass_api_with_json
def key(api: CoordinatorApi, as_json: bool) -> None:
    """Show the coordinator's public key."""
    log = api.request("/v1/log")
    show(log, as_json, log["public_key"])


@command.command("verify")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--key",
    "given_key",
    metavar="HEX",
    help="Public key of the coordinator, from `shoal receipts key`.  Default: that of "
    "the coordinator on this machine.",
)
@click.option(
    "--request",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Request to compare with the receipt: the body sent to any of the "
    "coordinator's APIs, or a line of a batch.  Needs a file written by export "
    "--request.",
)
@options.json_option
@options.data_dir_option
def verify(
    file: Path,
    given_key: str | None,
    request: Path | None,
    as_json: bool,
    data_dir: Path,
) -> int:
    """Verify a file written by export or growth, offline.

    FILE is the file to verify; - reads it from standard input.
    """
    data, public_key = _read(file), _public_key(given_key, data_dir)
    steps = _verified_steps(data, public_key, request)
    verified = all(each.ok for each in steps)
    outcome = ["verified" if verified else "NOT verified"]
    for each in reversed(steps):
        problem = [f"        {each.problem}"] if each.problem else []
        outcome = [
            f"{'ok    ' if each.ok else 'FAILED'}  {each.step.value}",
            *problem,
            *outcome,
        ]
    found = [
        {"step": each.step.value, "ok": each.ok, "wrong": each.problem}
        for each in steps
    ]
    show({"verified": verified, "steps": found}, as_json, *outcome)
    return 0 if verified else 1


def _write(data: bytes, output: Path | None, *, as_json: bool) -> None:
    # Unchanged: the signature covers the bytes.
    if output is None:
        click.echo(data, nl=False)
        return
    try:
        output.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{output}: {error.strerror}") from error
    if as_json:
        show({"file": str(output)}, as_json)
    else:
        click.echo(f"wrote {output}: shoal receipts verify {output}", err=True)


def _verified_steps(
    data: bytes, public_key: bytes, request: Path | None
) -> "Sequence[StepResult]":
    from shoal.ledger import bundle, consistency  # late: with cryptography

    if b'"type":"shoal/growth"' in data:
        if request is not None:
            raise ConfigError("--request: only for a file written by export")
        return consistency.verify(data, public_key)
    readings = None if request is None else _readings(request)
    return bundle.verify(data, public_key, readings)


def _readings(file: Path) -> list[bytes]:
    """Return what a request may mean, in the form that receipts are about."""
    from shoal.gateway.receipts import works_of  # late: with the server
    from shoal.ledger.requests import request_of

    body = _read(file)
    # Or it is in that form already, as an export has it.
    return [body.strip(), *map(request_of, works_of(body))]


def _read(file: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error


def _public_key(given: str | None, folder: Path) -> bytes:
    """Return the key to verify with, never the one in the file itself."""
    from shoal.config.secret_files import SEED_FILE, signing_seed
    from shoal.ledger.keys import Signer, public_key_of

    if given is not None:
        if (found := public_key_of(given)) is None:
            raise ConfigError("--key: expected 64 hexadecimal digits")
        return found
    if not (folder / SEED_FILE).exists():
        raise ConfigError(
            "no public key: give --key, which `shoal receipts key` shows at the "
            "coordinator"
        )
    return Signer.from_seed(signing_seed(folder)).public_key
