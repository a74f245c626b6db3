"""The GrandSage node's side of a connection, over bare bytes.

As a program: ``node.py PORT COUNT`` has so many nodes join, prints a line when all
have, and keeps them alive with nothing to do.
"""

import asyncio
import base64
import json
import os
import re
import struct
import sys

KEEPALIVE_EVERY = 10.0  # seconds, as real nodes do
JOINING_AT_ONCE = 100
TEXT, BINARY = 1, 2  # opcodes of RFC 6455

_BUSY = re.compile(
    rb"HTTP/1.1 503 .*\r\nretry-after: *(\d+)", re.IGNORECASE | re.DOTALL
)


async def join(
    port: int, name: str, slots: int = 1, token: str = "t"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a node's WebSocket.  Raises RuntimeError if it is refused."""
    return await upgrade(
        port, f"/ws?token={token}&model=m&max_concurrency={slots}&name={name}"
    )


async def upgrade(
    port: int, target: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a WebSocket once there is room.  Raises RuntimeError if it is refused."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    key = base64.b64encode(os.urandom(16)).decode()
    writer.write(
        f"GET {target} HTTP/1.1\r\n"
        f"Host: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
    )
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 101"):
        return reader, writer
    writer.close()
    if (busy := _BUSY.match(head)) is None:
        raise RuntimeError(f"no WebSocket: {head[:200]!r}")
    await asyncio.sleep(int(busy[1]))
    return await upgrade(port, target)


async def receive(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return the opcode and the payload of the next frame; those here are short."""
    opcode, size = await reader.readexactly(2)
    if size == 126:
        (size,) = struct.unpack("!H", await reader.readexactly(2))
    return opcode & 15, await reader.readexactly(size)


def frame(opcode: int, payload: bytes) -> bytes:
    """Return a whole frame of at most 65,535 bytes."""
    # Masked, as a client's must be, with a key of zeros, which changes nothing.
    size = len(payload)
    if size < 126:
        return bytes((0x80 | opcode, 0x80 | size, 0, 0, 0, 0)) + payload
    head = struct.pack("!BBH4x", 0x80 | opcode, 0x80 | 126, size)
    return head + payload


KEEPALIVE = frame(TEXT, b"")


async def _stay(port: int, count: int) -> None:
    few = asyncio.Semaphore(JOINING_AT_ONCE)

    async def joined(number: int) -> asyncio.StreamWriter:
        async with few:
            _, writer = await join(port, f"{os.getpid()}-{number}")
            return writer

    writers = await asyncio.gather(*map(joined, range(count)))
    print(json.dumps({"joined": count}), flush=True)
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        for writer in writers:
            writer.write(KEEPALIVE)
            due += KEEPALIVE_EVERY / count
            await asyncio.sleep(due - loop.time())


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_stay(int(sys.argv[1]), int(sys.argv[2])))
