"""GB/s of payloads of 1, 16 and 64 MB from one process to another on loopback.

Shoal's links, drivers and MacFleet's frames, whose checksum is computed and checked,
against blocking sockets of Python that check nothing and read into the same memory
again and again (bench/yardstick_transport.py); alternating, in the clear and with TLS.
Each payload waits until the one before is acknowledged.  It goes as one frame; a call
is the whole of what nodes do who have a function called with it as its argument.
"""

import asyncio
import os
import time
from collections import defaultdict
from contextlib import closing
from typing import Any

import uvloop

import yardstick_transport
from fleet_ends import DONE, WAYS
from processes import HERE, Program, program
from report import Goal, Results
from shoal.transports.clock import LoopClock
from shoal.transports.dialer import connect_tcp
from shoal.transports.driver import Driver

ROUNDS = 7
SIZES = (1, 16, 64)  # MB
AMOUNT = 512  # MB of a round
BLOCKING = "blocking"
SECURITIES = ("clear", "secure")

RATE = "{way}, {security}, {size} MB: GB/s"
COST = "{way}, {security}, {size} MB: CPU s/GB"
GOALS = [
    Goal(
        RATE.format(way=way, security=security, size=size),
        RATE.format(way=BLOCKING, security=security, size=size),
        at_least=least,
    )
    for security, least in (("clear", 0.6), ("secure", 0.8))
    for way in ("a frame",)
    for size in SIZES
]


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    ways = [BLOCKING, *WAYS]
    with program(str(HERE / "transport_peer.py")) as peer:
        for _ in range(rounds):
            for security in SECURITIES:
                for size in SIZES:
                    for way in ways:
                        _measure(peer, way, security, size, results)
            ways.reverse()
    return dict(sorted(results.items(), key=lambda row: _place(row[0])))


def _measure(
    peer: Program, way: str, security: str, size: int, results: Results
) -> None:
    port = peer.report[f"{way}, {security}"]
    payload = os.urandom(size * 1_000_000)
    count = AMOUNT // size
    cpu = peer.cpu()
    if way == BLOCKING:
        seconds, used = _blocking(port, security == "secure", payload, count)
    else:
        seconds, used = uvloop.run(
            _driven(port, way, security == "secure", payload, count)
        )
    used += peer.cpu() - cpu
    gigabytes = count * len(payload) / 1e9
    row = {"way": way, "security": security, "size": size}
    results[RATE.format(**row)].append(gigabytes / seconds)
    results[COST.format(**row)].append(used / gigabytes)


def _blocking(
    port: int, secure: bool, payload: bytes, count: int
) -> tuple[float, float]:
    """Return the seconds that it took, and those of our CPU."""
    with closing(yardstick_transport.connect(port, secure=secure)) as sock:
        began, used = time.perf_counter(), time.process_time()
        for _ in range(count):
            yardstick_transport.send(sock, payload)
        return time.perf_counter() - began, time.process_time() - used


async def _driven(
    port: int, way: str, secure: bool, payload: bytes, count: int
) -> tuple[float, float]:
    received: asyncio.Queue[object] = asyncio.Queue()
    scheme = "tls-any" if secure else "tcp"
    async with connect_tcp(f"{scheme}://127.0.0.1:{port}") as link:
        session = WAYS[way](link.peer, True, secure)
        driver = Driver[Any, Any](session, link, LoopClock(), received.put_nowait)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(_run(driver))
            await received.get()
            began, used = time.perf_counter(), time.process_time()
            for _ in range(count):
                driver.send(payload)
                await received.get()
            taken = time.perf_counter() - began, time.process_time() - used
            driver.disconnect(DONE)
    return taken


async def _run(driver: Driver[Any, Any]) -> None:
    end = await driver.run()
    if end.reason != DONE:
        raise RuntimeError(f"the connection ended: {end.reason}")


def _place(row: str) -> tuple[int, ...]:
    way, security, size = row.partition(":")[0].removesuffix(" MB").split(", ")
    of = (SECURITIES.index(security), int(size), [BLOCKING, *WAYS].index(way))
    return ("CPU" in row, *of)
