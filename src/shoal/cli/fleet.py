"""Let machines into a fleet, by a URL that they can scan."""

import argparse
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import segno

from shoal.cli.arguments import add_action, add_config_file
from shoal.cli.fleet_files import (
    load_shared_token,
    save_fleet,
    save_shared_token,
    with_fleet,
)
from shoal.cli.terminal import printable
from shoal.config import USER_DATA, secret_files
from shoal.config.loader import load
from shoal.domain.errors import ConfigError
from shoal.protocols import discover
from shoal.protocols.seam.protocol import AnyWireProtocol, FleetAccess

URL_SIZE_MAX = 16 << 10  # characters that are read from stdin
HALVES = " ▄▀█"  # by the upper module of two, and the lower
BORDER = 1  # modules: readers cope, and a terminal is dark or light around it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    pair = add_action(
        actions,
        "pair",
        "show the URL that lets a machine into this one's fleet, and its QR code; or "
        "take such a URL from another machine, and be of its fleet from now on",
    )
    pair.add_argument(
        "url", nargs="?", metavar="URL", help="what the other machine shows"
    )
    pair.add_argument(
        "--stdin",
        action="store_true",
        help="read the URL from standard input, so that no list of processes shows it",
    )
    pair.add_argument(
        "--theirs",
        action="store_true",
        help="take the token that the fleet's other programs have on this machine",
    )
    pair.add_argument(
        "--share",
        action="store_true",
        help="also keep the token where the fleet's other programs look for it",
    )
    pair.add_argument("--json", action="store_true", help="print JSON, and no QR code")
    pair.add_argument(
        "--data-dir",
        type=Path,
        default=Path(os.environ.get("SHOAL_DATA_DIR") or USER_DATA),
        metavar="DIR",
        help=f"where this machine keeps its fleet [SHOAL_DATA_DIR] ({USER_DATA})",
    )
    add_config_file(pair)


def run(args: argparse.Namespace) -> int:
    wire, fleets = _wire()
    folder: Path = args.data_dir.expanduser()
    taken = _taken(args, fleets)
    if taken is None:
        return _show(args, wire, fleets, *_own(wire, fleets, folder, args.config))
    files = [save_fleet(folder, fleets, *taken)]
    if args.share:
        files.append(save_shared_token(Path.home(), fleets, taken[0]))
    if args.json:
        print(json.dumps({"fleet": taken[1], "files": [*map(str, files)]}))
        return 0
    called = f"the fleet {taken[1]!r}" if taken[1] else "the fleet"
    print(printable(f"this machine is of {called} now: {', '.join(map(str, files))}"))
    print("from its next start on, shoal serve takes its nodes in")
    print(f"to call functions for one of them:\n  {_join(wire, fleets, 'HOST')}")
    return 0


def qr_lines(content: str) -> list[str]:
    """Return a QR code as lines of text, two modules of its height in each."""
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
        "\nit holds the fleet's secret: who sees it may serve and ask, until the fleet "
        "has another token\n\n"
        "on the other machine:\n  shoal fleet pair --stdin\n"
        f"  {_join(wire, fleets, socket.gethostname() or 'HOST')}"
    )
    return 0


def _join(wire: AnyWireProtocol, fleets: FleetAccess[Any], host: str) -> str:
    """Return the command by which a machine calls functions for a node."""
    return printable(
        f"shoal join --wire {wire.name} {host}:{fleets.port} --tasks MODULE"
    )


def _taken(
    args: argparse.Namespace, fleets: FleetAccess[Any]
) -> tuple[str, str] | None:
    """Return the token and the name of a fleet to be of from now on; None: stay."""
    if [args.url is not None, args.stdin, args.theirs].count(True) > 1:
        raise ConfigError("take one of URL, --stdin and --theirs")
    if args.theirs:
        token = os.environ.get(fleets.variable) or load_shared_token(
            Path.home(), fleets
        )
        if not token:
            raise ConfigError(
                f"--theirs: there is no {fleets.variable}, and no ~/{fleets.file}"
            )
        return token, ""
    url = sys.stdin.read(URL_SIZE_MAX) if args.stdin else args.url
    return None if url is None else fleets.read(url.strip())


def _own(
    wire: AnyWireProtocol, fleets: FleetAccess[Any], folder: Path, file: Path | None
) -> tuple[str, str]:
    """Return the token and the name of the fleet that ``shoal serve`` has here."""
    config = with_fleet(load(wire.config, wire.name, {}, file), fleets, folder)
    token, name = fleets.credentials(config)
    if not token and (folder / secret_files.TOKEN_FILE).exists():
        token = secret_files.first_token(folder, None)
    if not token:
        raise ConfigError(
            "this machine is of no fleet: shoal serve begins one, and shoal fleet pair "
            "URL joins that of another machine"
        )
    return token, name


def _wire() -> tuple[AnyWireProtocol, FleetAccess[Any]]:
    """Return the wire that has fleets."""
    found = [(each, each.fleets) for each in discover().values() if each.fleets]
    assert found, "there is one"
    return found[0]
