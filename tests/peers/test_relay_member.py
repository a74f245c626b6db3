import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from peers.test_relay import NumberedRelay
from shoal.peers.relay import RelayRunner, run_relay_member
from shoal.protocols.seam.endpoints import UpgradeRequest
from shoal.protocols.seam.peer_session import PeerSession
from shoal.protocols.seam.session import Close, Data, Send
from shoal.transports.clock import LoopClock
from shoal.transports.driver import ConnectionEnd, Driver
from shoal.transports.link import Link
from shoal.transports.local_link import local_links
from shoal.transports.strangers import Strangers
from transports.memory_links import ScriptedSession


class RecordingServer:
    """Serves and records the coordinator's own sessions."""

    def __init__(self, clock: LoopClock) -> None:
        self.clock = clock
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.began: list[float] = []

    def begin(self, now: float) -> Any:
        self.began.append(now)
        return ScriptedSession(self.answer, [Send("1:hello")])

    def answer(self, data: Data) -> Sequence[Any]:
        return [Close("told to")] if data == "stop" else [data]

    async def serve(self, wire: str, session: PeerSession, link: Link) -> ConnectionEnd:
        assert wire == "test"
        driver = Driver(session, link, self.clock, self.heard.put_nowait)
        return await driver.run()


async def test_coordinator_joins_its_relay_and_rejoins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.peers.relay.RESTART_AFTER", 0.0)
    clock = LoopClock()
    runner, server = (
        RelayRunner("test", NumberedRelay(), clock, Strangers()),
        RecordingServer(clock),
    )
    membership = asyncio.create_task(
        run_relay_member(runner, "test", server.begin, server.serve, clock)
    )
    assert await server.heard.get() == "you are 1 of "
    assert await server.heard.get() == "hello"  # a message to itself
    ours, theirs = local_links("switch", "a peer")
    other = asyncio.create_task(runner.serve(theirs, UpgradeRequest("/x")))
    assert await ours.receive() == ["you are 2 of /x"]

    ours.write(["1:a word", "1:stop"])

    assert await server.heard.get() == "a word"
    assert await server.heard.get() == "you are 3 of "
    assert len(server.began) == 2
    membership.cancel()
    await asyncio.gather(membership, return_exceptions=True)
    assert len(runner) == 1
    runner.disconnect_all("the end")
    await other
