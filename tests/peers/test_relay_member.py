import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from peers.test_relay import Telephone
from shoal.peers.relay import RelayRunner, run_relay_member
from shoal.protocols.seam.endpoints import UpgradeRequest
from shoal.protocols.seam.peer_session import PeerSession
from shoal.protocols.seam.session import Close, Data, Send
from shoal.transports.clock import LoopClock
from shoal.transports.driver import ConnectionEnd, Driver
from shoal.transports.link import Link
from shoal.transports.local_link import local_links
from transports.memory_links import ScriptedSession


class House:
    """Serves the coordinator's own sessions, each of which is written down."""

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


async def test_the_coordinator_takes_part_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.peers.relay.RESTART_AFTER", 0.0)
    clock = LoopClock()
    switching, house = RelayRunner("test", Telephone(), clock), House(clock)
    residing = asyncio.create_task(
        run_relay_member(switching, "test", house.begin, house.serve, clock)
    )
    assert await house.heard.get() == "you are 1 of "
    assert await house.heard.get() == "hello"  # said to itself
    ours, theirs = local_links("switch", "a peer")
    other = asyncio.create_task(switching.serve(theirs, UpgradeRequest("/x")))
    assert await ours.receive() == ["you are 2 of /x"]

    ours.write(["1:a word", "1:stop"])

    assert await house.heard.get() == "a word"
    assert await house.heard.get() == "you are 3 of "
    assert len(house.began) == 2
    residing.cancel()
    await asyncio.gather(residing, return_exceptions=True)
    assert len(switching) == 1
    switching.disconnect_all("the end")
    await other
