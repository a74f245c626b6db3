"""Finds the model servers that run on this machine."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import msgspec

from shoal.engines.openai_server import LIST_MAX
from shoal.engines.reaching import read_some
from shoal.engines.refusals import UNREADABLE
from shoal.engines.server_lists import Models

PROBE_LIMIT = 2.0  # seconds for all of them together
LOOPBACK = "127.0.0.1"
SHOAL = "shoal"  # what a coordinator calls the owner of its models
OLLAMA_PORT = 11434


@dataclass(frozen=True, slots=True)
class Place:
    """A port, and the base path of what listens there as it is delivered."""

    port: int
    servers: str
    path: str = "/v1"


PLACES = (
    Place(1234, "LM Studio"),
    Place(8080, "llama-server, MLX, LocalAI"),
    Place(8000, "vLLM"),
    Place(30000, "SGLang"),
    Place(1337, "Jan"),
    Place(5001, "KoboldCpp"),
    Place(12434, "Docker Model Runner", "/engines/v1"),
)


def usual_places(environment: Mapping[str, str] = os.environ) -> tuple[Place, ...]:
    """Return where to look; Ollama's port can be set, and its servers know how."""
    return Place(ollama_port(environment.get("OLLAMA_HOST", "")), "Ollama"), *PLACES


async def find_servers(places: Sequence[Place]) -> list[str]:
    """Return the base URLs of the servers that have models, in the order of places.

    Only this machine is asked, all ports at once.  What answers must list models as
    OpenAI does, so that another web server is not taken for one; nor is a coordinator.
    """
    timeout = aiohttp.ClientTimeout(total=PROBE_LIMIT)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        urls = [f"http://{LOOPBACK}:{place.port}{place.path}" for place in places]
        found = await asyncio.gather(*(_has_models(session, url) for url in urls))
    return [url for url, has_models in zip(urls, found, strict=True) if has_models]


def ollama_port(host: str) -> int:
    """Return the port in ``OLLAMA_HOST``: ``host``, ``host:port`` or a URL.

    Another machine's address is not looked at: only ``--engine`` names those.
    """
    try:
        parts = urlsplit(host if "//" in host else f"//{host}")
        port = parts.port
    except ValueError:
        return OLLAMA_PORT
    if port is None:
        return 80 if parts.scheme == "http" else OLLAMA_PORT
    return port


async def _has_models(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/models", allow_redirects=False) as response:
            if response.status != 200:
                return False
            body = await read_some(response, LIST_MAX)
        models = msgspec.json.decode(body, type=Models).data or ()
    except (aiohttp.ClientError, TimeoutError, *UNREADABLE):
        return False
    return any(model.owned_by != SHOAL for model in models)
