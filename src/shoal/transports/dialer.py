"""Opens connections, by the scheme of a URL."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from shoal.transports import tcp_client, websocket
from shoal.transports.link import Link


@asynccontextmanager
async def dial(
    url: str,
    headers: Mapping[str, str],
    message_max: int,
    *,
    fingerprint: bytes | None = None,
) -> AsyncIterator[tuple[Link, Mapping[str, str]]]:
    """Connect to a URL; yield the link and the headers of the answer.

    A byte stream has neither headers nor messages.  ``fingerprint`` is as in
    ``websocket.dial``.

    Raises LinkClosed if it does not come about.
    """
    if url.partition(":")[0].lower() in tcp_client.SCHEMES:
        async with tcp_client.dial(url, fingerprint=fingerprint) as link:
            yield link, {}
    else:
        async with websocket.dial(
            url, headers, message_max, fingerprint=fingerprint
        ) as opened:
            yield opened
