"""Anonymous access to each HTTP route under each flag of each wire."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from gateway.providers import COMMIT
from protocols.contexts import SIGNER
from shoal.app.server import run_coordinator
from shoal.config import ServeConfig
from shoal.gateway.all_operations import OLLAMA_PORT, OPERATIONS
from shoal.gateway.http.operation import Operation
from shoal.protocols import discover

HTTP_APIS = {"dispatch": ("/v1/quote", "/v1/jobs", "/v1/trust")}
"""The HTTP APIs of wires that allow anonymous access."""

OPENED = {("dispatch", "open"): "dispatch"}
"""The API that each flag opens; all other flags open none."""

VALUES = {
    "run": "none",
    "digest": "00" * 32,
    "provider_pubkey": SIGNER.public_key.hex(),
    "id": "none",
    "file_id": "none",
    "batch_id": "none",
    "model": "m",
    "name": "none",
}
"""Values of path parameters."""

BODIES: dict[str, object] = {
    "/v1/jobs/commit/fast": COMMIT,
    "/v1/jobs/commit/cheap": COMMIT,
    "/v1/trust/create": {"user_id": "ada"},
}
QUERIES = {
    "/v1/trust/list": {"user_id": "ada"},
    "/v1/trust/{provider_pubkey}": {"user_id": "ada"},
    "/v1/quote": {"job_type": "TASK"},
}


PASSCODE = "reef-passcode-4f61"  # without one, no pools are looked for
FLAGS = [
    (wire, each.name)
    for wire, protocol in discover().items()
    for each in fields(protocol.config)
    if isinstance(each.default, bool)
]
"""All boolean settings of wires."""


def toggled(wire: str, flag: str) -> Any:
    """Return a wire's configuration with one flag toggled."""
    config = discover()[wire].config()
    ports = {each.name: 0 for each in fields(config) if each.name.endswith("_port")}
    passcode = {"passcode": PASSCODE} if flag == "browse" and wire == "shoal" else {}
    return replace(config, **ports, **passcode, **{flag: not getattr(config, flag)})


async def anonymous_statuses(
    url: str, operations: Sequence[Operation] = OPERATIONS
) -> AsyncIterator[tuple[str, int]]:
    """Request every route that needs a key without one; return statuses by path."""
    async with ClientSession() as session:
        for each in operations:
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
async def test_flag_opens_only_the_http_api_of_its_wire(
    wire: str, flag: str, tmp_path: Path
) -> None:
    own = HTTP_APIS[OPENED[wire, flag]] if (wire, flag) in OPENED else ()
    config = ServeConfig(port=0, data_dir=tmp_path, drain=0.0, no_discovery=True)
    async with run_coordinator(config, {wire: toggled(wire, flag)}) as running:
        tried = [each async for each in anonymous_statuses(running.url)]
        async with (
            ClientSession() as session,
            session.post(f"{running.url}/api/chat", json={}) as chat,
        ):
            assert "unauthorized" in await chat.text()

    for path, status in tried:
        if path.startswith(own):
            assert status in (200, 201, 204, 400, 404), path
        else:
            assert status == 401, path


async def test_ollama_open_opens_only_the_api_of_ollama(tmp_path: Path) -> None:
    config = ServeConfig(
        port=0,
        data_dir=tmp_path,
        drain=0.0,
        no_discovery=True,
        ollama_port=0,
        ollama_open=True,
    )
    async with run_coordinator(config) as running:
        tried = [each async for each in anonymous_statuses(running.url)]
        at_port = [
            each
            async for each in anonymous_statuses(
                f"http://127.0.0.1:{running.ollama_port}", OLLAMA_PORT
            )
        ]
        page = {"Origin": "https://elsewhere.example"}
        url = f"{running.url}/ollama/api/tags"
        async with (
            ClientSession() as session,
            session.get(url, headers=page) as refused,
        ):
            assert refused.status == 403
            assert "https://elsewhere.example" in (await refused.json())["error"]

    for path, status in tried:
        opened = path.startswith("/ollama/")
        assert (status != 401) is opened, path
    assert at_port
    assert [path for path, status in at_port if status == 401] == []


def test_flags_that_open_an_api_exist() -> None:
    assert OPENED.keys() <= {*FLAGS}
