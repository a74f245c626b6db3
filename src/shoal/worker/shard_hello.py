"""How a machine shows at another's shard that it is the one that runs the model.

A connection begins with a line of JSON in each direction: a ``ShardHello``, which is
signed for the certificate that the listener has shown, so that no other listener can
use it, and a ``ShardAnswer``.
"""

import asyncio
import contextlib
from enum import Enum

import msgspec

from shoal.domain.errors import PeerError
from shoal.ledger.keys import Signer, public_key_of, verify
from shoal.transports.link import CLOSE_TIMEOUT
from shoal.transports.splice import Spliced

LINE_MAX = 4096  # bytes
HELLO_TIMEOUT = 5.0  # seconds from the connection to the whole line
HEARTBEAT = 1.0  # seconds between the questions of the machine that runs the model
SILENCE_MAX = 5.0  # seconds; either end gives up then
PREFIX = b"shoal shard hello v1\n"  # of what is signed


RELAY_PATH = "/v1/shards/relay"  # of the coordinator
PASS_PREFIX = b"shoal shard relay v1\n"  # of what is signed for it


class Purpose(Enum):
    """What a connection is for."""

    DATA = "data"  # of llama.cpp
    HEARTBEAT = "heartbeat"


class ShardHello(msgspec.Struct, frozen=True):
    """The machine that connects, and its purpose.

    ``key`` and ``signature`` are in hexadecimal; ``protocol`` is llama.cpp's.
    """

    group: str
    purpose: Purpose
    protocol: str
    key: str
    signature: str


class ShardAnswer(msgspec.Struct, frozen=True):
    """Why the connection is refused, or the shard does not work; empty: it does."""

    fault: str = ""


def write_hello(
    signer: Signer, group: str, purpose: Purpose, protocol: str, certificate: bytes
) -> bytes:
    """Return the line for a listener that has shown a certificate, by its SHA-256."""
    signed = _signed(group, purpose, protocol, certificate)
    return write_line(
        ShardHello(
            group,
            purpose,
            protocol,
            signer.public_key.hex(),
            signer.sign(signed).hex(),
        )
    )


def read_hello(
    line: bytes, group: str, runner: str, protocol: str, certificate: bytes
) -> Purpose:
    """Return what the machine that runs the model connects for.

    ``runner`` is its key in hexadecimal, and ``certificate`` the SHA-256 of this end's.

    Raises PeerError with the reason for anyone else, who learns nothing from it.
    """
    try:
        hello = msgspec.json.decode(line, type=ShardHello)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PeerError(f"no hello of a machine: {error}") from error
    key, signature = public_key_of(hello.key), _bytes_of(hello.signature)
    if key is None or key != public_key_of(runner):
        raise PeerError("this shard is lent to the holder of another key")
    signed = _signed(hello.group, hello.purpose, hello.protocol, certificate)
    if not verify(key, signature, signed):
        raise PeerError("the signature is invalid, or for another certificate")
    if hello.group != group:
        raise PeerError(f"this shard is of the group {group}, not {hello.group}")
    if hello.protocol != protocol:
        raise PeerError(
            f"its llama.cpp speaks {protocol}, the other one {hello.protocol}: install "
            "the same release on both machines"
        )
    return hello.purpose


def write_pass(signer: Signer, group: str) -> str:
    """Return the token with which a machine of a group uses the coordinator's relay."""
    return f"{signer.public_key.hex()}.{signer.sign(_pass(group)).hex()}"


def read_pass(shown: str, group: str) -> str:
    """Return the key that signed a token for a group; empty: it is invalid."""
    key, _, signature = shown.partition(".")
    public_key = public_key_of(key)
    if public_key is None or not verify(public_key, _bytes_of(signature), _pass(group)):
        return ""
    return public_key.hex()


def write_line(message: msgspec.Struct) -> bytes:
    """Return a message as a line of JSON."""
    return msgspec.json.encode(message) + b"\n"


def _signed(group: str, purpose: Purpose, protocol: str, certificate: bytes) -> bytes:
    """Return what is signed: unambiguous, since no part of it is free text alone."""
    parts = [group, purpose.value, protocol, certificate.hex()]
    return PREFIX + msgspec.json.encode(parts)


def _pass(group: str) -> bytes:
    return PASS_PREFIX + group.encode(errors="surrogatepass")


def _bytes_of(hex: str) -> bytes:
    try:
        return bytes.fromhex(hex)
    except ValueError:
        return b""


class LineConnection:
    """A connection that begins with lines, and may be spliced then."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self.spliced = Spliced(None, self._on_change, self._on_change)

    @property
    def is_open(self) -> bool:
        """Whether the connection is open."""
        return self.spliced.transport is not None

    async def line(self) -> bytes:
        """Wait for the next line; return it without its end.

        Raises PeerError if the connection ends before, or the line is too long.
        """
        while b"\n" not in self.spliced.early[:LINE_MAX]:
            if len(self.spliced.early) >= LINE_MAX:
                raise PeerError(f"a line of more than {LINE_MAX} bytes")
            if not self.is_open:
                raise PeerError("the connection was closed")
            self._changed.clear()
            await self._changed.wait()
        line, _, rest = self.spliced.early.partition(b"\n")
        self.spliced.early = bytearray(rest)
        return bytes(line)

    def send(self, answer: ShardAnswer) -> None:
        """Send a line, if it is open."""
        self.spliced.write(write_line(answer))

    async def send_last(self, answer: ShardAnswer) -> None:
        """Send a line, and close the connection."""
        self.send(answer)
        if self.spliced.transport is not None:
            self.spliced.transport.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await self.ended()
        self.spliced.abort()

    async def ended(self) -> None:
        """Wait for the end of the connection."""
        while self.is_open:
            self._changed.clear()
            await self._changed.wait()

    def _on_change(self, _: Spliced) -> None:
        self._changed.set()
