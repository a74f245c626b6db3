"""Token frames from a GrandSage node through to HTTP clients: 200 frames an answer.

Shoal with keys, queue and durable records, against a bare aiohttp relay of the same
messages (bench/yardstick.py), alternating.  Node and clients are one process that
writes prepared bytes; the figure that counts is the server's CPU time for each frame.
"""

import asyncio
import base64
import json
import os
import struct
import tempfile
import time
from pathlib import Path

from processes import Program, program

ROUNDS = 5
FRAMES = 200
STREAMS = (1, 64, 256)  # at once
ANSWERS = 512  # of each round
TEXT = b" token"
BODY = json.dumps(
    {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_new_tokens": 999,
    }
).encode()


def measure() -> dict[str, list[float]]:
    results: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        serve = ["-m", "shoal", "serve", "--port", "0", "--data-dir", folder, "--json"]
        secrets = ["--api-key", "k", "--join-token", "t", "--log-level", "warning"]
        yardstick = str(Path(__file__).parent / "yardstick.py")
        with program(*serve, *secrets) as shoal, program(yardstick) as bare:
            for _ in range(ROUNDS):
                for streams in STREAMS:
                    for name, server, port in (
                        ("shoal", shoal, shoal.said.get("ports", {}).get("http")),
                        ("yardstick", bare, bare.said.get("port")),
                    ):
                        rate, cpu = asyncio.run(_round(server, int(port), streams))
                        key = f"{name}, {streams} streams"
                        results.setdefault(f"{key}: frames/s", []).append(rate)
                        results.setdefault(f"{key}: CPU µs a frame", []).append(cpu)
    return results


async def _round(server: Program, port: int, streams: int) -> tuple[float, float]:
    """Return frames per second, and microseconds of server CPU for each."""
    node = asyncio.create_task(_node(port))
    await asyncio.sleep(0.3)  # for the node to be known
    answers = max(streams, min(ANSWERS, 8 * streams))
    cpu, began = server.cpu(), time.perf_counter()
    todo = iter(range(answers))
    await asyncio.gather(*(_client(port, todo) for _ in range(streams)))
    seconds, used = time.perf_counter() - began, server.cpu() - cpu
    node.cancel()
    await asyncio.gather(node, return_exceptions=True)
    frames = answers * FRAMES
    return frames / seconds, used / frames * 1e6


async def _node(port: int) -> None:
    """Answer every task with FRAMES frames and an end, in one write."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    key = base64.b64encode(os.urandom(16)).decode()
    writer.write(
        f"GET /ws?token=t&model=m&max_concurrency=999&name=n HTTP/1.1\r\nHost: x\r\n"
        f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: {key}\r\n\r\n".encode()
    )
    await reader.readuntil(b"\r\n\r\n")
    try:
        while True:
            head = await reader.readexactly(2)
            size = head[1]
            if size == 126:
                (size,) = struct.unpack("!H", await reader.readexactly(2))
            payload = await reader.readexactly(size)
            if head[0] & 15 == 1:
                task = struct.pack("!I", json.loads(payload)["id"])
                writer.write(_frame(task + TEXT) * FRAMES + _frame(task))
                await writer.drain()
    finally:
        writer.close()


def _frame(payload: bytes) -> bytes:
    # Masked, as a client's must be, with a key of zeros, which changes nothing.
    return bytes((0x82, 0x80 | len(payload), 0, 0, 0, 0)) + payload


async def _client(port: int, todo: object) -> None:
    for _ in todo:  # type: ignore[attr-defined]  # an iterator shared by all clients
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /api/chat HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\n"
            b"Connection: close\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
        )
        answer = await reader.read(-1)
        writer.close()
        if answer.count(b'{"o"') != FRAMES or b'{"done":true}' not in answer:
            raise RuntimeError(f"not the whole answer: {answer[-200:]!r}")
