"""Large arguments and results between nodes on real sockets."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from harness.speed import scaled
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import Completed, RunJob
from shoal.domain.work import Call
from shoal.protocols.macfleet.codec.hardware import HardwareProfile
from shoal.protocols.macfleet.codec.keys import fleet_key
from shoal.protocols.macfleet.local_node import (
    FleetConnectionInfo,
    FleetLocalNode,
    FleetRole,
)
from shoal.protocols.macfleet.member import FleetMember
from shoal.protocols.macfleet.membership import FleetRegistry
from shoal.protocols.macfleet.rate_limiter import FleetRateLimiter
from shoal.protocols.macfleet.session import FleetSession
from shoal.protocols.seam.admission import NoThrottle
from shoal.protocols.seam.peer_session import ALL_PEERS, PeerJoined, PeerMessage, ToPeer
from shoal.transports.clock import LoopClock
from shoal.transports.dialer import connect_tcp
from shoal.transports.driver import Driver
from shoal.transports.tcp import TcpLink
from shoal.transports.tcp_server import ACCEPT_ALL, ConnectionPolicy, tcp_listener
from shoal.transports.tls import self_signed_tls

TOKEN = "fleet-token-of-tests"
LEASE = LeaseNumber(1)
PATIENCE = scaled(60.0)  # seconds before a test gives up


def node(role: FleetRole, caller: FleetConnectionInfo, *, secure: bool) -> FleetSession:
    key = fleet_key(TOKEN, "") if secure else None
    own = FleetMember(role.value, key, HardwareProfile, os.urandom)
    return FleetSession(
        FleetLocalNode(
            *(role, own, 4, FleetRateLimiter(NoThrottle())),
            FleetRegistry(role.value, HardwareProfile),
        ),
        caller,
    )


@dataclass
class TwoNodes:
    """A coordinator and its worker, which returns its arguments."""

    coordinator: Driver[PeerMessage, ToPeer]
    met: asyncio.Event = field(default_factory=asyncio.Event)
    answers: asyncio.Queue[Completed] = field(default_factory=asyncio.Queue)

    def hear(self, said: PeerMessage) -> None:
        """Record the coordinator's events."""
        match said.message:
            case PeerJoined():
                self.met.set()
            case Completed() as done:
                self.answers.put_nowait(done)
            case _:
                pass

    async def call(self, number: int, size: int) -> Completed:
        """Call a function with so many bytes; return the result."""
        args = b"\x91\xc6" + size.to_bytes(4, "big") + bytes([number]) * size
        job = RunJob(JobId(str(number)), LEASE, Call("echo", args, b"\x80"))
        assert self.coordinator.send(ToPeer(ALL_PEERS, job))
        return await self.answers.get()


@asynccontextmanager
async def connected(*, secure: bool) -> AsyncIterator[TwoNodes]:
    entrance = ConnectionPolicy(tls=self_signed_tls("node")) if secure else ACCEPT_ALL
    nodes: TwoNodes

    async def serve(link: TcpLink) -> None:
        def hear(said: PeerMessage) -> None:
            match said.message:
                case RunJob(job_id, lease, Call(args=args)):
                    done = Completed(job_id, lease, value=args)
                    worker.send(ToPeer(said.peer, done))
                case _:
                    pass

        caller = FleetConnectionInfo(dialled=False, address=link.peer)
        session = node(FleetRole.WORKER, caller, secure=secure)
        worker = Driver[PeerMessage, ToPeer](session, link, LoopClock(), hear)
        await worker.run()

    async with tcp_listener("127.0.0.1", 0, serve, entrance) as bound:
        scheme = "tls-any" if secure else "tcp"
        async with connect_tcp(f"{scheme}://127.0.0.1:{bound.port}") as link:
            caller = FleetConnectionInfo(
                dialled=True, address=f"127.0.0.1:{bound.port}"
            )
            session = node(FleetRole.COORDINATOR, caller, secure=secure)
            driver = Driver[PeerMessage, ToPeer](
                session, link, LoopClock(), lambda said: nodes.hear(said)
            )
            nodes = TwoNodes(driver)
            async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
                running = tasks.create_task(driver.run())
                await nodes.met.wait()
                yield nodes
                driver.disconnect("done")
                assert (await running).reason == "done"


@pytest.mark.parametrize("secure", [False, True], ids=["clear", "secure"])
async def test_large_arguments_and_results_arrive_unchanged(secure: bool) -> None:
    sizes = (300_000, 0, 5_000_000, 262_144, 12_000_000, 70_000)

    async with connected(secure=secure) as nodes:
        returned = [await nodes.call(number, size) for number, size in enumerate(sizes)]

    for number, (done, size) in enumerate(zip(returned, sizes, strict=True)):
        assert done.value is not None
        assert done.value[6:] == bytes([number]) * size
