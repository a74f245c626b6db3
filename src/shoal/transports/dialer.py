"""Opens connections, by the scheme of a URL."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from shoal.transports.link import Link
from shoal.transports.tcp_client import SCHEMES, connect_tcp
from shoal.transports.websocket import connect_websocket


@asynccontextmanager
async def dial(
    url: str,
    headers: Mapping[str, str],
    message_max: int,
    *,
    fingerprint: bytes | None = None,
) -> AsyncIterator[tuple[Link, Mapping[str, str]]]:
    """Connect to a URL; yield the link and the headers of the answer.

    A TCP link has no headers, and ignores ``message_max``.  ``fingerprint`` is as in
    ``connect_websocket``.

    Raises LinkClosed if the connection fails.
    """
    if url.partition(":")[0].lower() in SCHEMES:
        async with connect_tcp(url, fingerprint=fingerprint) as link:
            yield link, {}
    else:
        async with connect_websocket(
            url, headers, message_max, fingerprint=fingerprint
        ) as opened:
            yield opened
