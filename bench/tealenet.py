"""Messages from TealeNet's nodes to each other through the relay of a coordinator.

Shoal checks signatures, senders and sessions, and counts against limits; beside it runs
a bare aiohttp relay that passes on whatever comes (bench/yardstick_relay.py), both on
uvloop, alternating.  All nodes are one process that writes prepared bytes.
*messages/s*: every pair sends as fast as it is read from, a burst that is within what
all guests of a relay may send at once (10,000 messages and 64 MiB; in the long run
2,000 and 8 MiB a second).  *600 joining*: so many nodes connect and register at once,
while two others of another process talk; *all have* is until each of them is
registered, *standstill* the longest that a message of those two, sent every ms, takes.
The original relay was measured apart, on another day: 61,000 to 96,000 messages/s up to
1 KiB, and 3.4 to 5.1 s of standstill.
*chat*: from an HTTP client through Shoal and its relay to a node that answers at once,
and back, one after the other, with keys and durable records; the original took 88 ms.
Then what ``bench/tealenet_streams.py`` measures of long answers, on all carriers.
"""

import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from itertools import count

import tealenet_streams
from load import run
from node import upgrade
from processes import HERE, Program, program
from relayed import (
    RelayNode,
    data,
    frame,
    opened,
    registered,
    registration,
    serve,
)
from report import Goal, Results

ROUNDS = 5
SIZES = {64: 4_000, 1024: 4_000, 65_536: 256}  # messages of a round, by bytes
REFILL = 2.5  # seconds until a relay takes so many at once again
PAIRS = (1, 8, 64)  # of nodes, that talk at once
WRITE = 64 << 10  # bytes of one write, about
JOINING = 600  # nodes at once
TALK_FOR = 10.0  # seconds, while the others come
NEWS_FOR = 2.0  # seconds, for what is announced to reach all

RATE = "{size} B, {pairs} pairs: messages/s"
COST = "{size} B, {pairs} pairs: CPU µs a message"
ALL = f"{JOINING} joining: s until all have"
STANDSTILL = f"{JOINING} joining: s of standstill"
CHAT = "chat: ms"
CHATS = 200  # of a round
PATIENCE = 120.0  # seconds for anything
BODY = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
).encode()

GOALS = [
    *(
        Goal(f"shoal, {RATE.format(size=size, pairs=pairs)}", at_least=30_000)
        for size in SIZES
        if size <= 1024
        for pairs in PAIRS
    ),
    Goal(f"shoal, {STANDSTILL}", at_most=0.2),
    Goal(f"shoal, {CHAT}", at_most=5),
    # For comparing days: the yardstick is the same on each.
    *(
        Goal(f"shoal, {row}", f"yardstick, {row}")
        for row in (
            *(COST.format(size=size, pairs=pairs) for size in SIZES for pairs in PAIRS),
            STANDSTILL,
        )
    ),
    *tealenet_streams.GOALS,
]

seeds = count(1)


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "-m",
            "shoal",
            "serve",
            "--port",
            "0",
            "--data-dir",
            folder,
            "--json",
        ]
        open_to_all = ["--tealenet-open", "--relay-open"]
        secrets = ["--api-key", "k", *open_to_all, "--log-level", "error"]
        yardstick = str(HERE / "yardstick_relay.py")
        with program(*command, *secrets) as shoal, program(yardstick) as bare:
            servers = [("shoal", shoal), ("yardstick", bare)]
            for _ in range(rounds):
                for size in SIZES:
                    for pairs in PAIRS:
                        for name, server in servers:
                            row = {"size": size, "pairs": pairs}
                            rate, cost = run(_relayed(server, size, pairs))
                            results[f"{name}, {RATE.format(**row)}"].append(rate)
                            results[f"{name}, {COST.format(**row)}"].append(cost)
                for name, server in servers:
                    joined_at, standstill = _joined(server)
                    results[f"{name}, {ALL}"].append(joined_at)
                    results[f"{name}, {STANDSTILL}"].append(standstill)
                results[f"shoal, {CHAT}"] += run(_chats(_port(shoal)))
                servers.reverse()
    results.update(tealenet_streams.measure(rounds))
    return results


async def _relayed(server: Program, size: int, pairs: int) -> tuple[float, float]:
    """Return messages a second, and the server's CPU time for each in microseconds."""
    each = SIZES[size] // pairs
    await asyncio.sleep(REFILL)
    talks = [await _pair(_port(server)) for _ in range(pairs)]
    cpu, began = server.cpu(), time.perf_counter()
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*(_talk(*talk, size, each) for talk in talks))
    seconds, used = time.perf_counter() - began, server.cpu() - cpu
    for sender, receiver, _ in talks:
        sender.writer.close()
        receiver.writer.close()
    messages = each * pairs
    return messages / seconds, used / messages * 1e6


async def _pair(port: int) -> tuple[RelayNode, RelayNode, str]:
    receiver = await registered(port, next(seeds))
    sender = await registered(port, next(seeds))
    return sender, receiver, await opened(sender, receiver)


async def _talk(
    sender: RelayNode, receiver: RelayNode, session: str, size: int, messages: int
) -> None:
    text = data(sender, receiver, session, size)
    together = max(1, WRITE // len(text))
    expected = messages * len(frame(text, masked=False))

    async def send() -> None:
        whole, rest = divmod(messages, together)
        block = frame(text) * together
        for _ in range(whole):
            sender.writer.write(block)
            await sender.writer.drain()
        sender.writer.write(frame(text) * rest)

    # News of who came before may be counted too: a few bytes too many in the end.
    await asyncio.gather(send(), receiver.count(expected))


def _joined(server: Program) -> tuple[float, float]:
    """Return seconds until all have registered, and those of the longest standstill."""
    port = str(_port(server))
    talk = [str(HERE / "relayed.py"), port, str(next(seeds)), str(TALK_FOR)]
    next(seeds)
    with program(*talk) as talking:
        joined_at = run(_register(int(port)))
        assert talking.process.stdout is not None
        longest: float = json.loads(talking.process.stdout.readline())["longest"]
    return joined_at, longest


async def _register(port: int) -> float:
    """Connect and register many at once; return the seconds until all are."""
    registrations = [registration(next(seeds)) for _ in range(JOINING)]
    began = time.perf_counter()

    async def join(node_id: str, text: bytes) -> RelayNode:
        reader, writer = await upgrade(port, f"/ws?node={node_id}")
        node = RelayNode(node_id, reader, writer)
        writer.write(text)
        await node.until(b'"registerAck"')
        return node

    newcomers = await asyncio.gather(*(join(*each) for each in registrations))
    joined_at = time.perf_counter() - began
    reading = [asyncio.create_task(node.count(1 << 40)) for node in newcomers]
    await asyncio.sleep(NEWS_FOR)
    for each in reading:
        each.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    for node in newcomers:
        node.writer.close()
    return joined_at


async def _chats(port: int) -> list[float]:
    """Return how long a chat takes, in ms: the median of a round."""
    async with asyncio.timeout(PATIENCE):
        node = await registered(port, next(seeds), "m")
        serving = asyncio.create_task(serve(node))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        # Until the node is known, which nothing tells.
        while await chat(reader, writer) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        took = [await chat(reader, writer) for _ in range(CHATS)]
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        node.writer.close()
        writer.close()
    return [statistics.median(each for each in took if each is not None) * 1e3]


async def chat(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> float | None:
    """Return how long it took; None if nobody has the model yet."""
    began = time.perf_counter()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (len(BODY), BODY)
    )
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    _, _, length = head.partition(b"content-length: ")
    body = await reader.readexactly(int(length.split(b"\r\n")[0]))
    return time.perf_counter() - began if b"token" in body else None


def _port(server: Program) -> int:
    port: int = server.report.get("port") or server.report["ports"]["http"]
    return port
