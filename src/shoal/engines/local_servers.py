"""Finds the model servers that run on this machine."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import msgspec

from shoal.engines.catalog import ServerModelList
from shoal.engines.openai_server import LIST_MAX, read_prefix
from shoal.engines.server_errors import DECODE_ERRORS

PROBE_LIMIT = 2.0  # seconds for all of them together
LOOPBACK = "127.0.0.1"
SHOAL = "shoal"  # the owner of a coordinator's models
OLLAMA_PORT = 11434


@dataclass(frozen=True, slots=True)
class ServerLocation:
    """A port, and the base path of the server with that default port."""

    port: int
    servers: str
    path: str = "/v1"


SERVER_LOCATIONS = (
    ServerLocation(1234, "LM Studio"),
    ServerLocation(8080, "llama-server, MLX, LocalAI"),
    ServerLocation(8000, "vLLM"),
    ServerLocation(30000, "SGLang"),
    ServerLocation(1337, "Jan"),
    ServerLocation(5001, "KoboldCpp"),
    ServerLocation(12434, "Docker Model Runner", "/engines/v1"),
)


def server_locations(
    environment: Mapping[str, str] = os.environ,
) -> tuple[ServerLocation, ...]:
    """Return the default locations of servers; Ollama's port is configurable."""
    return ServerLocation(
        ollama_port(environment.get("OLLAMA_HOST", "")), "Ollama"
    ), *SERVER_LOCATIONS


async def find_servers(locations: Sequence[ServerLocation]) -> list[str]:
    """Return the base URLs of the servers that have models, in the order of places."""
    return [*await served_models(locations)]


async def served_models(
    locations: Sequence[ServerLocation],
) -> dict[str, tuple[str, ...]]:
    """Return the models of the servers that have some, by the servers' base URLs.

    Queries only this machine, all ports at once.  A server must list models as OpenAI
    does, which excludes other web servers; coordinators are excluded as well.
    """
    timeout = aiohttp.ClientTimeout(total=PROBE_LIMIT)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        urls = [
            f"http://{LOOPBACK}:{location.port}{location.path}"
            for location in locations
        ]
        found = await asyncio.gather(*(_models(session, url) for url in urls))
    return {url: models for url, models in zip(urls, found, strict=True) if models}


def ollama_port(host: str) -> int:
    """Return the port in ``OLLAMA_HOST``: ``host``, ``host:port`` or a URL.

    Other machines are not queried: they require ``--engine``.
    """
    try:
        parts = urlsplit(host if "//" in host else f"//{host}")
        port = parts.port
    except ValueError:
        return OLLAMA_PORT
    if port is None:
        return 80 if parts.scheme == "http" else OLLAMA_PORT
    return port


async def _models(session: aiohttp.ClientSession, url: str) -> tuple[str, ...]:
    try:
        async with session.get(f"{url}/models", allow_redirects=False) as response:
            if response.status != 200:
                return ()
            body = await read_prefix(response, LIST_MAX)
        models = msgspec.json.decode(body, type=ServerModelList).data or ()
    except (aiohttp.ClientError, TimeoutError, *DECODE_ERRORS):
        return ()
    if all(model.owned_by == SHOAL for model in models):
        return ()
    return tuple(model.id for model in models)
