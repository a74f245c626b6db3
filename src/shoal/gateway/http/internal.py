"""Requests that a front of this coordinator passes on, and whose they are.

They come over a socket that only this user's processes reach.
"""

from aiohttp import web

CLIENT = "x-shoal-client"
"""The first header of a request from a front: its client's scheme and address."""

ADMITTED = "x-shoal-admitted"
"""The header of a response to a client that is no stranger; it stays here."""


def client_header(address: str, scheme: str) -> str:
    """Return what ``CLIENT`` says."""
    return f"{scheme} {address}"


def with_front_client(request: web.Request) -> web.Request:
    """Return the request of a front as that of its client."""
    # The first one: a client can send the header, too.
    scheme, _, address = request.headers.get(CLIENT, "http ").partition(" ")
    return request.clone(scheme=scheme, remote=address)
