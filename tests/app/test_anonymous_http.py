"""Who needs an API key, whatever is set: each flag of each wire, at each HTTP route."""

from collections.abc import AsyncIterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from gateway.providers import COMMIT
from shoal.app.server import run_coordinator
from shoal.config import ServeConfig
from shoal.gateway.operations import OPERATIONS
from shoal.protocols import discover

FACES = {"dispatch": ("/v1/quote", "/v1/jobs", "/v1/trust")}
"""The HTTP API of each wire that has one which may be used without a key."""

OPENED = {("dispatch", "open"): "dispatch"}
"""What each flag opens; all others open nothing."""

VALUES = {
    "digest": "00" * 32,
    "id": "none",
    "model": "m",
    "name": "none",
}
"""What stands in paths."""

BODIES: dict[str, object] = {
    "/v1/jobs/commit/fast": COMMIT,
    "/v1/jobs/commit/cheap": COMMIT,
    "/v1/trust/create": {"user_id": "ada"},
}
QUERIES = {"/v1/trust/list": {"user_id": "ada"}, "/v1/quote": {"job_type": "TASK"}}


FLAGS = [
    (wire, each.name)
    for wire, protocol in discover().items()
    for each in fields(protocol.config)
    if isinstance(each.default, bool)
]
"""All settings of wires that are on or off."""


def turned(wire: str, flag: str) -> Any:
    """Return a wire's configuration with a flag other than it is by default."""
    config = discover()[wire].config()
    ports = {each.name: 0 for each in fields(config) if each.name.endswith("_port")}
    return replace(config, **ports, **{flag: not getattr(config, flag)})


async def strangers(url: str) -> AsyncIterator[tuple[str, int]]:
    """Ask for everything that takes a key, without one; return paths and statuses."""
    async with ClientSession() as session:
        for each in OPERATIONS:
            if each.scope is None:
                continue
            async with session.request(
                each.method,
                url + each.path.format(**VALUES),
                params=QUERIES.get(each.path),
                json=BODIES.get(each.path, {}) if each.body else None,
            ) as response:
                yield each.path, response.status


@pytest.mark.parametrize(("wire", "flag"), FLAGS)
async def test_flag_opens_no_other_http_api_than_its_wire_s(
    wire: str, flag: str, tmp_path: Path
) -> None:
    own = FACES[OPENED[wire, flag]] if (wire, flag) in OPENED else ()
    config = ServeConfig(port=0, data_dir=tmp_path, drain=0.0, no_discovery=True)
    async with run_coordinator(config, {wire: turned(wire, flag)}) as running:
        tried = [each async for each in strangers(running.url)]
        async with (
            ClientSession() as session,
            session.post(f"{running.url}/api/chat", json={}) as chat,
        ):
            assert "unauthorized" in await chat.text()

    for path, status in tried:
        if path.startswith(own):
            assert status in (200, 201, 204, 404), path
        else:
            assert status == 401, path


def test_flags_that_open_something_are_there() -> None:
    assert OPENED.keys() <= {*FLAGS}
