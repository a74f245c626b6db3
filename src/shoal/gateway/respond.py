"""Answers in JSON, in one piece."""

import msgspec
from aiohttp import web

NO_STORE = {"Cache-Control": "no-store"}
"""For what is told once: a key that is in a cache is a key that others have."""


def json_answer(
    value: msgspec.Struct, status: int = 200, *, secret: bool = False
) -> web.Response:
    """Return a value as an answer; a ``secret`` one is kept in no cache."""
    return json_bytes(msgspec.json.encode(value), status, secret=secret)


def json_bytes(data: bytes, status: int = 200, *, secret: bool = False) -> web.Response:
    """Return JSON that is written already as an answer."""
    return web.Response(
        status=status,
        body=data,
        content_type="application/json",
        headers=NO_STORE if secret else None,
    )
