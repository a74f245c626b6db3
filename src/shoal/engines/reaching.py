"""How a server is reached: by its URL, and by reads that have an end."""

from urllib.parse import urlsplit

import aiohttp

from shoal.domain.errors import ConfigError


def split_url(url: str) -> tuple[str, str]:
    """Return the base URL, and the user and password that stood in it.

    Raises ConfigError if it cannot be asked.
    """
    expected = "expected http://HOST:PORT/v1"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port  # the port raises if it is none
    except ValueError as error:
        raise ConfigError(f"engine URL: {error}; {expected}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"engine URL: {expected}")
    userinfo, _, place = parts.netloc.rpartition("@")
    return f"{parts.scheme}://{place}{parts.path.rstrip('/') or '/v1'}", userinfo


async def read_some(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return the body, or its first ``limit`` bytes."""
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) >= limit:
            break
    return bytes(body[:limit])


def reason_of(error: aiohttp.ClientError) -> str:
    """Return why a server could not be asked."""
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(
        error.os_error, ConnectionRefusedError
    ):
        return "connection refused"  # the commonest, which aiohttp makes a puzzle of
    return str(error)
