"""How long one request holds the event loop, by what its body is made of and its size.

A coordinator runs in this process; a thread sends one body at a time over a socket.
What runs in every turn of the loop reads the CPU clock of the loop's thread, and the
longest turn counts, in milliseconds: other load on the machine changes little.  Time in
other threads is not in it: bodies above 256 KiB are decoded in one, which holds the
interpreter for 30 ms at most.  Refused: the body is beyond a limit of values.
"""

import asyncio
import gzip
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

from load import run
from report import Goal, Results
from shoal.app.server import run_coordinator
from shoal.config import ServeConfig

ROUNDS = 5
MIB = 1 << 20
SIZES = (1, 4, 15)  # MiB
KEY = "sk-bench"
CHAT, COMMIT = "/v1/chat/completions", "/v1/jobs/commit/fast"
GZIPPED = ("Content-Encoding: gzip",)


def _chat(content: bytes, more: bytes = b"") -> bytes:
    message = b'{"role":"user","content":%b}' % content
    return b'{"model":"m","messages":[%b]%b}' % (message, more)


def _list(item: bytes, size: int) -> bytes:
    return b"[%b]" % b",".join([item] * (size // (len(item) + 1)))


def _part(size: int) -> bytes:
    return b'{"type":"image_url","image_url":{"url":"%b"}}' % (b"x" * size)


BODIES: Mapping[str, Callable[[int], bytes]] = {
    "a text": lambda size: _chat(b'"%b"' % (b"x" * size)),
    "a text of escapes": lambda size: _chat(b'"%b"' % (rb"\n" * (size // 2))),
    "a text of commas": lambda size: _chat(b'"%b"' % (b"," * size)),
    "12,000 images": lambda size: _chat(_list(_part(size // 12_000), size)),
    "images, refused": lambda size: _chat(_list(_part(1), size)),
    "an unknown field, refused": lambda size: _chat(
        b'"hi"', b',"more":%b' % _list(b"[]", size)
    ),
}
COMMITTED: Mapping[str, Callable[[int], bytes]] = {
    "a job": lambda size: (
        b'{"job_type":"TASK","user_id":"u","payload":"%b"}' % (b"x" * size)
    ),
}
ROWS = {
    f"{name}, {size} MiB": (path, make, size)
    for path, bodies in ((CHAT, BODIES), (COMMIT, COMMITTED))
    for name, make in bodies.items()
    for size in SIZES
}
BOMB = "4 MiB that become 1 GiB, refused"
GOALS = [Goal(f"{row}: ms", at_most=100) for row in (*ROWS, BOMB)]


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    for _ in range(rounds):
        run(_round(results))
    return results


async def _round(results: Results) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = ServeConfig(port=0, data_dir=Path(folder), api_key=KEY, drain=0.0)
        async with run_coordinator(config) as running:
            for row, (path, make, size) in ROWS.items():
                sent = _request(path, make(size * MIB - 200))
                results[f"{row}: ms"].append(await _held(running.port, sent))
            sent = _request(CHAT, gzip.compress(bytes(1024 * MIB), 1), *GZIPPED)
            results[f"{BOMB}: ms"].append(await _held(running.port, sent))


def _request(path: str, body: bytes, *headers: str) -> bytes:
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {KEY}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *headers,
    )
    return "\r\n".join((*lines, "", "")).encode() + body


async def _held(port: int, request: bytes) -> float:
    """Return the longest turn of the loop while a request is answered."""
    sending = asyncio.create_task(asyncio.to_thread(_exchange, port, request))
    longest, last = 0.0, time.thread_time()
    while not sending.done():
        await asyncio.sleep(0)
        now = time.thread_time()
        longest, last = max(longest, now - last), now
    await sending
    return 1e3 * longest


def _exchange(port: int, request: bytes) -> None:
    """Send a request, and wait for the beginning of the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(request)
        while connection.recv(1 << 16):
            pass
