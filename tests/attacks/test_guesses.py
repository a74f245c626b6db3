"""Secrets under attack: weak ones, and guesses by the thousand."""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from shoal.app.server import run_coordinator
from shoal.config import ServeConfig
from shoal.config.secret_files import KEY_FILE
from shoal.domain.errors import ConfigError
from shoal.protocols import discover

WEAK = "hunter2"
EVERYWHERE = "0.0.0.0"

WEAK_SETTINGS = [
    ("serve", "api_key"),
    ("serve", "join_token"),
    ("grandsage", "token"),
    ("macfleet", "token"),
    ("tealenet", "token"),
    ("tealenet", "passcode"),
    ("dispatch", "token"),
]


async def serve(folder: Path, host: str, section: str, **secret: str) -> int:
    """Start a coordinator with a secret; return the status for its first key."""
    mine: dict[str, Any] = secret if section == "serve" else {}
    config = ServeConfig(
        host=host, port=0, data_dir=folder, drain=0.0, no_discovery=True, **mine
    )
    wires = {
        name: protocol.config(**(secret if name == section else {}))
        for name, protocol in discover().items()
    }
    async with run_coordinator(config, wires) as running, ClientSession() as session:
        headers = {"Authorization": f"Bearer {running.api_key}"}
        url = f"http://127.0.0.1:{running.port}/v1/models"
        async with session.get(url, headers=headers) as response:
            return response.status


@pytest.mark.parametrize(("section", "name"), WEAK_SETTINGS)
async def test_weak_secret_is_refused_where_others_could_guess_it(
    tmp_path: Path, section: str, name: str
) -> None:
    weak = {name: WEAK + "!"}  # a fleet's token has 8 characters
    flag = f"--{name}" if section == "serve" else f"--{section}-{name}"

    assert await serve(tmp_path / "control", "127.0.0.1", section, **weak) == 200
    with pytest.raises(ConfigError, match=f"{flag.replace('_', '-')}: .*openssl"):
        await serve(tmp_path / "attacked", EVERYWHERE, section, **weak)

    assert not (tmp_path / "attacked").exists()


async def test_weak_secret_of_an_earlier_start_is_refused(tmp_path: Path) -> None:
    assert await serve(tmp_path, "127.0.0.1", "serve", api_key=WEAK) == 200

    with pytest.raises(ConfigError, match=f"{KEY_FILE} .*could guess this secret"):
        await serve(tmp_path, EVERYWHERE, "serve")
