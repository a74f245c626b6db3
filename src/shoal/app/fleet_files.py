"""Files with a fleet's credentials: Shoal's, and that of the fleet's other programs.

Shoal's file holds the pairing URL, which has the token and the name; the other one
holds the token alone.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from shoal.config import private_files
from shoal.domain.errors import ConfigError
from shoal.protocols import discover
from shoal.protocols.seam.protocol import FleetAccess

C = TypeVar("C")

FILE = "fleet"  # in the data folder
SIZE_MAX = 16 << 10  # bytes: no token is that long


def save_fleet(folder: Path, fleets: FleetAccess[Any], token: str, name: str) -> Path:
    """Store a fleet in the data folder, replacing another one; return the file.

    Raises ConfigError if the token is invalid, or the folder is not writable.
    """
    fleets.check(token)
    file = folder / FILE
    _write(file, fleets.invite(token, name))
    return file


def load_fleet(folder: Path, fleets: FleetAccess[Any]) -> tuple[str, str] | None:
    """Return the token and the name of the fleet in the data folder, or None.

    Raises ConfigError if the file is damaged.
    """
    file = folder / FILE
    if not (url := _read(file)):
        return None
    try:
        token, name = fleets.read(url)
        fleets.check(token)
    except ConfigError as error:
        raise ConfigError(
            f"{file}: {error}; delete it and pair this machine again"
        ) from error
    return token, name


def with_fleet(config: C, fleets: FleetAccess[C] | None, folder: Path) -> C:
    """Return a wire's configuration with the fleet in the data folder.

    Returns it unchanged if it names a fleet or is open, or the wire has no fleets.

    Raises ConfigError as ``load_fleet`` does.
    """
    if fleets is None:
        return config
    token, _ = fleets.credentials(config)
    if token or fleets.is_open(config):
        return config
    if (kept := load_fleet(folder, fleets)) is None:
        return config
    return fleets.with_credentials(config, *kept)


def with_fleets(wires: Mapping[str, object], folder: Path) -> dict[str, object]:
    """Return the wires' configurations by name, each as ``with_fleet`` returns it."""
    protocols = discover()
    return {
        wire: with_fleet(config, protocols[wire].fleets, folder)
        for wire, config in wires.items()
    }


def save_shared_token(home: Path, fleets: FleetAccess[Any], token: str) -> Path:
    """Store a token for the fleet's other programs; return the file.

    Raises ConfigError if the file is not writable.
    """
    file = home / fleets.file
    _write(file, token)
    private_files.restrict(file.parent)
    return file


def load_shared_token(home: Path, fleets: FleetAccess[Any]) -> str:
    """Return the token of the fleet's other programs; empty: none.

    Warns on stderr if other users can read it, as those programs do.

    Raises ConfigError if the file is not readable.
    """
    return _read(home / fleets.file)


def _read(file: Path) -> str:
    try:
        with open(file, encoding="utf-8") as kept:
            text = kept.read(SIZE_MAX).strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    if private_files.readable_by_others(file):
        print(
            f"warning: {file} holds a token and is readable by other users: "
            f"chmod 600 {file}",
            file=sys.stderr,
        )
    return text


def _write(file: Path, secret: str) -> None:
    try:
        file.parent.mkdir(mode=private_files.FOLDER_MODE, parents=True, exist_ok=True)
        private_files.write_private(file, secret + "\n")
    except OSError as error:
        raise ConfigError(f"{file}: {error}") from error
