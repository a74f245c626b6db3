"""How messages are carried in a session once it is decided what protects it.

The first byte of what is carried tells what it is, but for the packets of TealeNet's
own channel, which begin with their counter.
"""

from struct import Struct
from typing import Final, TypeAlias

from shoal.domain.errors import PeerError
from shoal.protocols.crowd import Protection
from shoal.protocols.tealenet.encryption.noise import TAG_SIZE, Secrets
from shoal.protocols.tealenet.encryption.teale_channel import Packets

TEALE_FIRST: Final = 0x01
TEALE_SECOND: Final = 0x02
NOISE_FIRST: Final = 0x11
NOISE_SECOND: Final = 0x12
NOISE_MESSAGE: Final = 0x13
HANDSHAKES = frozenset(
    {TEALE_FIRST, TEALE_SECOND, NOISE_FIRST, NOISE_SECOND, NOISE_MESSAGE}
)
"""What no JSON begins with."""

HEAD: Final = Struct(">BQ")
"""What stands before a message that Noise sealed: NOISE_MESSAGE and its number."""


class Plain:
    """Nothing protects what is said."""

    protection = Protection.PLAIN

    def seal(self, message: bytes) -> bytes:
        return message

    def open(self, data: bytes) -> bytes | None:
        # The peer may still answer the offer of encryption.
        return None if data and data[0] in HANDSHAKES else data


class Teale:
    """TealeNet's own channel."""

    protection = Protection.TEALE

    def __init__(self, packets: Packets) -> None:
        self.seal, self.open = packets.seal, packets.open


class Numbered:
    """Noise's messages, numbered from 0: all of them have to come, in order."""

    protection = Protection.NOISE

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._next = 0

    def seal(self, message: bytes) -> bytes:
        number, sealed = self._secrets.sealer.seal(message)
        return HEAD.pack(NOISE_MESSAGE, number) + sealed

    def open(self, data: bytes) -> bytes | None:
        if len(data) < HEAD.size + TAG_SIZE or data[0] != NOISE_MESSAGE:
            return None
        _, number = HEAD.unpack_from(data)
        if number < self._next:
            return None  # sent again, by whoever saw it
        message = self._secrets.opener.open(number, data[HEAD.size :])
        if message is not None and number > self._next:
            lost = f"message {number} came after {self._next - 1}"
            raise PeerError(f"messages were lost on the way: {lost}")
        self._next += message is not None
        return message


Channel: TypeAlias = Plain | Teale | Numbered
