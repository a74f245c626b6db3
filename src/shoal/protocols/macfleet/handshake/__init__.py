"""How two nodes come to know each other: open, by a fleet's token, or as our own."""

from shoal.protocols.macfleet.handshake.client import Client, rejected
from shoal.protocols.macfleet.handshake.outstanding import Outstanding
from shoal.protocols.macfleet.handshake.server import Server
from shoal.protocols.macfleet.handshake.steps import (
    USUAL,
    Agreed,
    Continue,
    Handshake,
    Own,
    Refusal,
    Step,
    Strength,
    StrongPeer,
)
from shoal.protocols.macfleet.peer import Caller

__all__ = [
    "USUAL",
    "Agreed",
    "Client",
    "Continue",
    "Handshake",
    "Outstanding",
    "Own",
    "Refusal",
    "Server",
    "Step",
    "Strength",
    "StrongPeer",
    "client",
    "rejected",
    "server",
]


def client(own: Own, caller: Caller) -> Handshake:
    """Return the part of who dialled."""
    where = caller.address or "the other end"
    return Client(own, caller.expected, require_strong=caller.ours, where=where)


def server(own: Own, caller: Caller) -> Handshake:
    """Return the part of who was dialled."""
    return Server(own, caller.address)
