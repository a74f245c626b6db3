"""Opens the encryption of a TCP link, at either end: ``seam.encrypted_stream``."""

import secrets  # noqa: TID251  # keys of one connection

from shoal.domain.errors import PeerError
from shoal.protocols.seam.encrypted_stream import (
    FIRST_SIZE,
    PREFACE,
    SECOND_SIZE,
    may_be_preface,
)
from shoal.protocols.seam.noise import EphemeralInitiator, answer_ephemeral
from shoal.transports.tcp import TcpLink

ENCRYPTION_TIMEOUT = 10.0  # seconds for the handshake, or the first message without it


async def start_encryption(link: TcpLink) -> None:
    """Encrypt a link from now on; the other end must do so, too.

    Raises PeerError if it does not, and LinkClosed if it disconnects.
    """
    initiator = EphemeralInitiator(PREFACE, secrets.token_bytes)
    await link.send(PREFACE + initiator.write_first())
    received = bytearray()
    while len(received) < SECOND_SIZE:
        await _read_into(received, link)
    keys = initiator.read_second(bytes(received[:SECOND_SIZE]))
    link.encrypt(keys, bytes(received[SECOND_SIZE:]))


async def accept_encryption(link: TcpLink) -> bool:
    """Encrypt a link if the peer begins with that; return whether it does.

    Waits for the peer's first bytes.  Raises PeerError for an invalid handshake, and
    LinkClosed if the peer disconnects.
    """
    received = bytearray()
    while len(received) < FIRST_SIZE:
        await _read_into(received, link)
        if not may_be_preface(received):
            link.unread(bytes(received))
            return False
    first = bytes(received[len(PREFACE) : FIRST_SIZE])
    second, keys = answer_ephemeral(PREFACE, first, secrets.token_bytes)
    await link.send(second)
    link.encrypt(keys, bytes(received[FIRST_SIZE:]))
    return True


async def _read_into(received: bytearray, link: TcpLink) -> None:
    for piece in await link.receive():
        if isinstance(piece, str):
            raise PeerError("text on a byte stream")
        received += piece
