"""``shoal fleet``: pair machines into a fleet, by a URL or its QR code."""

import os
import socket
import sys
from pathlib import Path
from typing import Any

import click
import segno

from shoal.app import fleet_files
from shoal.cli.options import config_file_option, data_dir_option, json_option
from shoal.cli.terminal import printable, show
from shoal.config import secret_files
from shoal.config.loader import load
from shoal.domain.errors import ConfigError
from shoal.protocols import discover
from shoal.protocols.seam.protocol import AnyWireProtocol, FleetAccess

URL_SIZE_MAX = 16 << 10  # characters that are read from stdin
HALVES = " ▄▀█"  # indexed by two modules, the upper and the lower one
BORDER = 1  # modules; less than the standard's four, which readers accept on a terminal


@click.group("fleet")
def command() -> None:
    """Pair machines into a fleet, by a URL or its QR code."""


@command.command("pair")
@click.argument("url", required=False)
@click.option(
    "--stdin",
    is_flag=True,
    help="URL from standard input, which keeps it out of the list of processes.",
)
@click.option(
    "--theirs",
    is_flag=True,
    help="Token from the fleet's other programs on this machine.",
)
@click.option(
    "--share",
    is_flag=True,
    help="Store the token for the fleet's other programs on this machine too.",
)
@json_option
@data_dir_option
@config_file_option
def pair(
    url: str | None,
    stdin: bool,
    theirs: bool,
    share: bool,
    as_json: bool,
    data_dir: Path,
    config_file: Path | None,
) -> None:
    """Show the pairing URL of this machine's fleet and its QR code.

    With the URL of another machine, join the fleet of that one.
    """
    wire, fleets = _wire()
    folder = data_dir.expanduser()
    joined = _fleet_to_join(fleets, url, stdin=stdin, theirs=theirs)
    if joined is None:
        token, name = _own_fleet(wire, fleets, folder, config_file)
        if share:
            fleet_files.save_shared_token(Path.home(), fleets, token)
        _show(wire, fleets, token, name, as_json=as_json)
        return
    files = [fleet_files.save_fleet(folder, fleets, *joined)]
    if share:
        files.append(fleet_files.save_shared_token(Path.home(), fleets, joined[0]))
    fleet = f"the fleet {joined[1]!r}" if joined[1] else "the fleet"
    paths = [*map(str, files)]
    show(
        {"fleet": joined[1], "files": paths},
        as_json,
        printable(f"this machine joined {fleet}: {', '.join(paths)}"),
        "restart `shoal serve` to admit the fleet's nodes",
        f"to run functions for one of them:\n  {_join(wire, fleets, 'HOST')}",
    )


def qr_lines(content: str) -> list[str]:
    """Return a QR code as lines of text, each two modules high."""
    code = segno.make(content, error="l", boost_error=False, micro=False)
    rows = [[bool(each) for each in row] for row in code.matrix_iter(border=BORDER)]
    if len(rows) % 2:
        rows.append([False] * len(rows[0]))
    return [
        "".join(
            HALVES[2 * above + below] for above, below in zip(upper, lower, strict=True)
        )
        for upper, lower in zip(rows[::2], rows[1::2], strict=True)
    ]


def _show(
    wire: AnyWireProtocol,
    fleets: FleetAccess[Any],
    token: str,
    name: str,
    *,
    as_json: bool,
) -> None:
    url = fleets.invite(token, name)
    show(
        {"url": url, "fleet": name},
        as_json,
        f"{url}\n",
        *qr_lines(url),
        "\nThe URL contains the fleet's token: keep it secret.\n\n"
        "on the other machine:\n  shoal fleet pair --stdin\n"
        f"  {_join(wire, fleets, socket.gethostname() or 'HOST')}",
    )


def _join(wire: AnyWireProtocol, fleets: FleetAccess[Any], host: str) -> str:
    """Return the command that runs functions for a node."""
    return printable(
        f"shoal join --wire {wire.name} {host}:{fleets.port} --tasks MODULE"
    )


def _fleet_to_join(
    fleets: FleetAccess[Any], url: str | None, *, stdin: bool, theirs: bool
) -> tuple[str, str] | None:
    """Return the token and the name of the fleet to join; None: none was given."""
    if [url is not None, stdin, theirs].count(True) > 1:
        raise ConfigError("give only one of URL, --stdin and --theirs")
    if theirs:
        token = os.environ.get(fleets.variable) or fleet_files.load_shared_token(
            Path.home(), fleets
        )
        if not token:
            raise ConfigError(
                f"--theirs: neither {fleets.variable} nor ~/{fleets.file} exists"
            )
        return token, ""
    given = sys.stdin.read(URL_SIZE_MAX) if stdin else url
    return None if given is None else fleets.read(given.strip())


def _own_fleet(
    wire: AnyWireProtocol, fleets: FleetAccess[Any], folder: Path, file: Path | None
) -> tuple[str, str]:
    """Return the token and the name of this machine's fleet."""
    config = fleet_files.with_fleet(
        load(wire.config, wire.name, {}, file), fleets, folder
    )
    token, name = fleets.credentials(config)
    if not token and (folder / secret_files.TOKEN_FILE).exists():
        token = secret_files.first_token(folder, None)
    if not token:
        raise ConfigError(
            "this machine has no fleet: shoal serve creates one, and shoal fleet pair "
            "URL joins the fleet of another machine"
        )
    return token, name


def _wire() -> tuple[AnyWireProtocol, FleetAccess[Any]]:
    """Return the wire that has fleets."""
    found = [(each, each.fleets) for each in discover().values() if each.fleets]
    assert found, "one wire has fleets"
    return found[0]
