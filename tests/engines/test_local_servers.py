"""Detection of local servers, on ports that the tests choose."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from engines.conftest import Fakes
from shoal.engines import local_servers
from shoal.engines.local_servers import (
    ServerLocation,
    find_servers,
    ollama_port,
    server_locations,
)


def place_of(url: str) -> ServerLocation:
    port = urlsplit(url).port
    assert port is not None
    return ServerLocation(port, "some")


@asynccontextmanager
async def listening(answer: bytes) -> AsyncIterator[ServerLocation]:
    """Accept connections, answer each with some bytes, and leave them open."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(answer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield ServerLocation(server.sockets[0].getsockname()[1], "odd")
    finally:
        for writer in writers:
            writer.close()
        server.close()
        await server.wait_closed()


async def test_servers_with_models_are_found_in_order(
    fake: Fakes,
) -> None:
    models = {"object": "list", "data": [{"id": "a"}]}
    urls = [await fake({"GET /v1/models": models}) for _ in range(3)]

    assert await find_servers([place_of(url) for url in reversed(urls)]) == urls[::-1]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "<h1>It works!</h1>",
        {"data": []},
        {"data": None},
        {"models": ["a"]},
        [],
        {"data": [{"id": "a", "owned_by": "shoal"}]},
    ],
    ids=["404", "text", "none", "null", "other", "list", "coordinator"],
)
async def test_other_web_servers_are_ignored(fake: Fakes, answer: object) -> None:
    url = await fake({"GET /v1/models": answer})

    assert await find_servers([place_of(url)]) == []


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\n", bytes(range(256))]
)
async def test_malformed_responses_are_ignored(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_servers, "PROBE_LIMIT", 0.05)
    async with listening(answer) as location:
        assert await find_servers([location]) == []


async def test_closed_port_is_ignored() -> None:
    async with listening(b"") as location:
        pass

    assert await find_servers([location]) == []


async def test_redirect_to_another_machine_is_not_followed(fake: Fakes) -> None:
    elsewhere = b"Location: http://192.0.2.1/\r\nContent-Length: 0\r\n\r\n"
    async with listening(b"HTTP/1.1 302 Found\r\n" + elsewhere) as location:
        assert await find_servers([location]) == []


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("", 11434),
        ("0.0.0.0", 11434),
        ("127.0.0.1:5000", 5000),
        (":5001", 5001),
        ("http://localhost:5002/", 5002),
        ("http://localhost", 80),
        ("[::1]:5003", 5003),
        ("x:99999", 11434),
        ("a:b:c", 11434),
    ],
)
def test_ollama_port_is_configurable(host: str, port: int) -> None:
    assert ollama_port(host) == port
    assert server_locations({"OLLAMA_HOST": host})[0].port == port


def test_coordinators_own_port_is_not_probed() -> None:
    assert 4010 not in {location.port for location in server_locations({})}
