"""Answers in JSON, in one piece."""

import msgspec
from aiohttp import web

NO_STORE = {"Cache-Control": "no-store"}
"""For what is told once: a key that is in a cache is a key that others have."""


def json_answer(value: msgspec.Struct, *, secret: bool = False) -> web.Response:
    """Return a value as an answer; a ``secret`` one is kept in no cache."""
    return json_bytes(msgspec.json.encode(value), secret=secret)


def json_bytes(data: bytes, *, secret: bool = False) -> web.Response:
    """Return JSON that is written already as an answer."""
    return web.Response(
        body=data,
        content_type="application/json",
        headers=NO_STORE if secret else None,
    )
