"""The ports of workers that coordinators dial."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack

import aiohttp
import pytest

from ledger.builders import WORKER
from protocols.calling import TOKEN, fleet_context
from shoal.app.worker_ports import WorkerPorts, fleet_wires, listening_wires
from shoal.domain.errors import ConfigError
from shoal.domain.worker import UNKNOWN_HARDWARE
from shoal.protocols.seam.endpoints import OutgoingConnection
from shoal.protocols.seam.peer_session import PeerJoined, PeerMessage, PeerSession
from shoal.protocols.shoal import PROTOCOL, Config
from shoal.transports.clock import LoopClock
from shoal.transports.dialer import dial
from shoal.transports.driver import ConnectionEnd, Driver
from shoal.transports.link import Link

STRANGERS = 20


def ports(host: str, token: str) -> WorkerPorts:
    (protocol,) = fleet_wires().values()
    settings = protocol.config()
    return WorkerPorts(
        protocol, settings, host, token, "", "w", UNKNOWN_HARDWARE, WORKER
    )


async def test_fleet_with_a_weak_token_is_refused_beyond_loopback() -> None:
    with pytest.raises(ConfigError, match=r"the fleet's token: .*openssl rand"):
        ports("0.0.0.0", "a-fleet-token")

    assert ports("127.0.0.1", "a-fleet-token").token
    assert ports("0.0.0.0", "5d0e93b7a1c84f26d9e1").token


async def test_coordinator_is_served_over_http_beside_strangers() -> None:
    """Strangers connect, and say nothing or something else; each has its session."""

    async def serve(wire: str, session: PeerSession, link: Link) -> ConnectionEnd:
        return await Driver(session, link, LoopClock(), lambda _: None).run()

    heard: asyncio.Queue[object] = asyncio.Queue()
    worker = WorkerPorts(
        *(listening_wires()["shoal"], Config(), "127.0.0.1", TOKEN, "", "w"),
        *(UNKNOWN_HARDWARE, WORKER),
    )
    async with AsyncExitStack() as stack:
        opened: Mapping[str, int] = await stack.enter_async_context(worker.open(serve))
        address = f"127.0.0.1:{opened['http']}"
        client = await stack.enter_async_context(aiohttp.ClientSession())
        for number in range(STRANGERS):
            stranger = await client.ws_connect(f"ws://{address}/shoal")
            if number % 2:
                await stranger.send_bytes(b"no handshake")
        async with client.get(f"http://{address}/v1/models") as response:
            assert response.status == 404

        config = Config(workers=(address,))
        *_, outgoing = PROTOCOL.endpoints(config, fleet_context())
        assert isinstance(outgoing, OutgoingConnection)
        link, _ = await stack.enter_async_context(
            dial(outgoing.url, {}, outgoing.message_max)
        )
        session = outgoing.new_session(0.0)
        driver = Driver(session, link, LoopClock(), heard.put_nowait)
        running = asyncio.create_task(driver.run())
        joined = await heard.get()
        driver.disconnect("seen")
        await running

    assert isinstance(joined, PeerMessage)
    assert isinstance(joined.message, PeerJoined)
    assert joined.message.name == "w"
