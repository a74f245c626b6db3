"""Opens the encryption of a link, at either end: ``seam.encrypted_stream``.

On a WebSocket each message has the records of one message.
"""

import asyncio
import secrets  # noqa: TID251  # keys of one connection
from typing import Protocol

from shoal.domain.errors import PeerError
from shoal.protocols.seam.encrypted_stream import (
    FIRST_SIZE,
    PREFACE,
    SECOND_SIZE,
    may_be_preface,
)
from shoal.protocols.seam.noise import (
    EphemeralInitiator,
    TransportKeys,
    answer_ephemeral,
)
from shoal.transports.link import Link, LinkClosed

ENCRYPTION_TIMEOUT = 10.0  # seconds for the handshake, or the first message without it


class EncryptableLink(Link, Protocol):
    """A link that can encrypt what it carries."""

    def put_back(self, data: bytes) -> None:
        """Put back what was received last, to be received again."""

    def encrypt(self, keys: TransportKeys, received: bytes = b"") -> None:
        """Encrypt what is sent and received from now on.

        ``received`` is what the peer has sent encrypted already.
        """


async def encrypt_dialled(link: EncryptableLink, url: str) -> None:
    """Encrypt a link that was dialled.  ``url`` is as its user wrote it.

    Raises LinkClosed if the other end does not, because nothing is sent in the clear.
    """
    try:
        async with asyncio.timeout(ENCRYPTION_TIMEOUT):
            await start_encryption(link)
    except (LinkClosed, PeerError, TimeoutError) as error:
        reason = str(error) or f"no answer within {ENCRYPTION_TIMEOUT:g} s"
        raise LinkClosed(
            f"the server at {url} does not encrypt the connection ({reason}): it is "
            "another program, a coordinator with --plain (give --plain here, too), or "
            "a release of Shoal that has to be upgraded"
        ) from error


async def start_encryption(link: EncryptableLink) -> None:
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


async def encrypt_accepted(link: EncryptableLink) -> None:
    """Encrypt a link that was accepted, if the peer begins with that in time.

    Raises PeerError with the reason why it is of no use.
    """
    try:
        async with asyncio.timeout(ENCRYPTION_TIMEOUT):
            await accept_encryption(link)
    except (LinkClosed, PeerError, TimeoutError) as error:
        silent = f"sent nothing for {ENCRYPTION_TIMEOUT:g} s"
        raise PeerError(str(error) or silent) from error


async def accept_encryption(link: EncryptableLink) -> bool:
    """Encrypt a link if the peer begins with that; return whether it does.

    Waits for the peer's first bytes.  Raises PeerError for an invalid handshake, and
    LinkClosed if the peer disconnects.
    """
    received = bytearray()
    while len(received) < FIRST_SIZE:
        await _read_into(received, link)
        if not may_be_preface(received):
            link.put_back(bytes(received))
            return False
    first = bytes(received[len(PREFACE) : FIRST_SIZE])
    second, keys = answer_ephemeral(PREFACE, first, secrets.token_bytes)
    await link.send(second)
    link.encrypt(keys, bytes(received[FIRST_SIZE:]))
    return True


async def _read_into(received: bytearray, link: EncryptableLink) -> None:
    for piece in await link.receive():
        if isinstance(piece, str):
            raise PeerError("text on a byte stream")
        received += piece
