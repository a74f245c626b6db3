"""Pair machines into a fleet, by a URL or its QR code."""

import argparse
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import segno

from shoal.app.fleet_files import (
    load_shared_token,
    save_fleet,
    save_shared_token,
    with_fleet,
)
from shoal.cli.arguments import add_action, add_config_file
from shoal.cli.terminal import printable
from shoal.config import USER_DATA, secret_files
from shoal.config.loader import load
from shoal.domain.errors import ConfigError
from shoal.protocols import discover
from shoal.protocols.seam.protocol import AnyWireProtocol, FleetAccess

URL_SIZE_MAX = 16 << 10  # characters that are read from stdin
HALVES = " ▄▀█"  # indexed by two modules, the upper and the lower one
BORDER = 1  # modules; less than the standard's four, which readers accept on a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    pair = add_action(
        actions,
        "pair",
        "show the pairing URL of this machine's fleet and its QR code, or join the "
        "fleet of another machine by its URL",
    )
    pair.add_argument(
        "url", nargs="?", metavar="URL", help="pairing URL of the other machine"
    )
    pair.add_argument(
        "--stdin",
        action="store_true",
        help="URL from standard input, which keeps it out of the list of processes",
    )
    pair.add_argument(
        "--theirs",
        action="store_true",
        help="token from the fleet's other programs on this machine",
    )
    pair.add_argument(
        "--share",
        action="store_true",
        help="store the token for the fleet's other programs on this machine too",
    )
    pair.add_argument(
        "--json", action="store_true", help="print JSON, without a QR code"
    )
    pair.add_argument(
        "--data-dir",
        type=Path,
        default=Path(os.environ.get("SHOAL_DATA_DIR") or USER_DATA),
        metavar="DIR",
        help=f"data folder of this machine (default: {USER_DATA}) [SHOAL_DATA_DIR]",
    )
    add_config_file(pair)


def run(args: argparse.Namespace) -> int:
    wire, fleets = _wire()
    folder: Path = args.data_dir.expanduser()
    joined = _fleet_to_join(args, fleets)
    if joined is None:
        return _show(args, wire, fleets, *_own_fleet(wire, fleets, folder, args.config))
    files = [save_fleet(folder, fleets, *joined)]
    if args.share:
        files.append(save_shared_token(Path.home(), fleets, joined[0]))
    if args.json:
        print(json.dumps({"fleet": joined[1], "files": [*map(str, files)]}))
        return 0
    description = f"the fleet {joined[1]!r}" if joined[1] else "the fleet"
    print(printable(f"this machine joined {description}: {', '.join(map(str, files))}"))
    print("shoal serve admits the fleet's nodes from its next start on")
    print(f"to run functions for one of them:\n  {_join(wire, fleets, 'HOST')}")
    return 0


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
    args: argparse.Namespace,
    wire: AnyWireProtocol,
    fleets: FleetAccess[Any],
    token: str,
    name: str,
) -> int:
    url = fleets.invite(token, name)
    if args.share:
        save_shared_token(Path.home(), fleets, token)
    if args.json:
        print(json.dumps({"url": url, "fleet": name}))
        return 0
    print(f"{url}\n")
    print("\n".join(qr_lines(url)))
    print(
        "\nThe URL contains the fleet's token: keep it secret.\n\n"
        "on the other machine:\n  shoal fleet pair --stdin\n"
        f"  {_join(wire, fleets, socket.gethostname() or 'HOST')}"
    )
    return 0


def _join(wire: AnyWireProtocol, fleets: FleetAccess[Any], host: str) -> str:
    """Return the command that runs functions for a node."""
    return printable(
        f"shoal join --wire {wire.name} {host}:{fleets.port} --tasks MODULE"
    )


def _fleet_to_join(
    args: argparse.Namespace, fleets: FleetAccess[Any]
) -> tuple[str, str] | None:
    """Return the token and the name of the fleet to join; None: none was given."""
    if [args.url is not None, args.stdin, args.theirs].count(True) > 1:
        raise ConfigError("URL, --stdin and --theirs exclude each other")
    if args.theirs:
        token = os.environ.get(fleets.variable) or load_shared_token(
            Path.home(), fleets
        )
        if not token:
            raise ConfigError(
                f"--theirs: neither {fleets.variable} nor ~/{fleets.file} exists"
            )
        return token, ""
    url = sys.stdin.read(URL_SIZE_MAX) if args.stdin else args.url
    return None if url is None else fleets.read(url.strip())


def _own_fleet(
    wire: AnyWireProtocol, fleets: FleetAccess[Any], folder: Path, file: Path | None
) -> tuple[str, str]:
    """Return the token and the name of this machine's fleet."""
    config = with_fleet(load(wire.config, wire.name, {}, file), fleets, folder)
    token, name = fleets.credentials(config)
    if not token and (folder / secret_files.TOKEN_FILE).exists():
        token = secret_files.first_token(folder, None)
    if not token:
        raise ConfigError(
            "this machine has no fleet: shoal serve creates one, and shoal fleet pair "
            "URL joins that of another machine"
        )
    return token, name


def _wire() -> tuple[AnyWireProtocol, FleetAccess[Any]]:
    """Return the wire that has fleets."""
    found = [(each, each.fleets) for each in discover().values() if each.fleets]
    assert found, "one wire has fleets"
    return found[0]
