"""Requests for Ollama's API that come to the root of the other port.

Its clients are configured with an address without a path.  An error names the right
one, in the form that they show.
"""

from collections.abc import Iterable

from aiohttp import web

from shoal.domain.errors import NotFound
from shoal.gateway.context import Gateway
from shoal.gateway.http.errors import PLAIN_ERRORS
from shoal.gateway.http.operation import Operation, Operations

OLLAMA_AGENT = "ollama"  # begins the user agent of Ollama's own clients

OLLAMA_FIELDS = frozenset(
    {"stream", "options", "keep_alive", "format", "think", "tools"}
)
"""Fields of Ollama's chats that are in no other body for the same path."""


class OllamaMisdirected(NotFound):
    """A request for Ollama's API lacks its prefix."""

    def __init__(self) -> None:
        super().__init__(
            "Ollama's API is not at the root of this port: add /ollama to the address "
            "(http://HOST:PORT/ollama), or use the port of `shoal serve --ollama-port`"
        )


def is_ollama_client(request: web.Request) -> bool:
    """Say whether a client of Ollama sends the request, by its own account."""
    return request.headers.get("User-Agent", "").lower().startswith(OLLAMA_AGENT)


async def refuse_misdirected(gateway: Gateway, request: web.Request) -> web.Response:
    raise OllamaMisdirected


def misdirected(
    operations: Iterable[Operation], others: Iterable[Operation]
) -> Operations:
    """Return operations that refuse requests for ``operations`` without the prefix.

    The paths of ``others`` are left out.
    """
    refused = Operations(PLAIN_ERRORS)
    taken = {each.path for each in others}
    for each in operations:
        if each.documented and each.path not in taken:
            refused.add(
                each.method,
                each.path,
                "Name the address of Ollama's API",
                documented=False,
            )(refuse_misdirected)
    return refused
