"""What nodes without a credential may cost a coordinator whose relay is open."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import psutil
import pytest
from aiohttp import ClientSession, ClientWebSocketResponse

from attacks.test_relay import message, registration
from harness.speed import scaled
from live.programs import Programs
from shoal.peers.relay import GUESTS_SHARE

GUESTS = range(1, 13)
SPENT_AFTER = scaled(2.0)  # seconds until the guests have used up their burst
MEASURED = 4.0  # seconds
OTHER_WORK = scaled(0.15)  # of a core: to read bytes, and what is done when idle


@asynccontextmanager
async def joined(
    session: ClientSession, url: str, seed: int
) -> AsyncIterator[ClientWebSocketResponse]:
    async with session.ws_connect(f"{url}/ws?node=x", max_msg_size=0) as socket:
        await socket.send_str(json.dumps(registration(seed)))
        while "registerAck" not in await socket.receive_json():
            pass
        yield socket


async def visit(
    session: ClientSession,
    url: str,
    seed: int,
    everybody: asyncio.Barrier,
    *,
    floods: bool,
) -> None:
    """Send as much as possible to another guest, or nothing; read all that comes."""
    async with joined(session, url, seed) as socket, asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(drain(socket))
        other = seed % len(GUESTS) + 1
        opening = message("relayOpen", seed, other, sessionID=f"{seed}")
        flood = message("relayData", seed, other, sessionID=f"{seed}", data="A" * 400)
        await everybody.wait()
        await socket.send_str(json.dumps(opening))
        with suppress(ConnectionError):
            while floods and not reading.done():
                await socket.send_str(json.dumps(flood))


async def drain(socket: ClientWebSocketResponse) -> None:
    async for _ in socket:
        pass


@pytest.mark.parametrize("floods", [False, True], ids=["control", "attack"])
async def test_guests_of_a_relay_get_a_bounded_share_of_a_core(
    programs: Programs, floods: bool
) -> None:
    pool = programs.serve("--relay-open")
    process = psutil.Process(pool.program.process.pid)

    def cpu() -> float:
        times = process.cpu_times()
        return times.user + times.system

    everybody = asyncio.Barrier(len(GUESTS) + 1)
    async with ClientSession() as session:
        crowd = [
            asyncio.create_task(
                visit(session, pool.url, seed, everybody, floods=floods)
            )
            for seed in GUESTS
        ]
        await everybody.wait()
        await asyncio.sleep(SPENT_AFTER)
        before = cpu()
        await asyncio.sleep(MEASURED)
        used = (cpu() - before) / MEASURED
        ended = [each for each in crowd if each.done()]
        pool.program.kill()  # it would read all that they have sent
        await asyncio.gather(*crowd, return_exceptions=True)

    assert not ended  # nobody is disconnected
    assert used <= OTHER_WORK + (GUESTS_SHARE if floods else 0)
