import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from runtime.test_switching import Telephone
from runtime.wires import ScriptedSession
from shoal.protocols.crowd import CrowdSession
from shoal.protocols.session import Close, Data, Hello, Send
from shoal.runtime.clock import LoopClock
from shoal.runtime.driver import Driver, End
from shoal.runtime.link import Link
from shoal.runtime.local_link import local_links
from shoal.runtime.residing import reside
from shoal.runtime.switching import Switching


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

    async def serve(self, wire: str, session: CrowdSession, link: Link) -> End:
        assert wire == "test"
        driver = Driver(session, link, self.clock, self.heard.put_nowait)
        return await driver.run()


async def test_the_coordinator_takes_part_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.runtime.residing.AGAIN", 0.0)
    clock = LoopClock()
    switching, house = Switching("test", Telephone(), clock), House(clock)
    residing = asyncio.create_task(
        reside(switching, "test", house.begin, house.serve, clock)
    )
    assert await house.heard.get() == "you are 1 of "
    assert await house.heard.get() == "hello"  # said to itself
    ours, theirs = local_links("switch", "a peer")
    other = asyncio.create_task(switching.serve(theirs, Hello("/x")))
    assert await ours.receive() == ["you are 2 of /x"]

    ours.write(["1:a word", "1:stop"])

    assert await house.heard.get() == "a word"
    assert await house.heard.get() == "you are 3 of "
    assert len(house.began) == 2
    residing.cancel()
    await asyncio.gather(residing, return_exceptions=True)
    assert len(switching) == 1
    switching.hang_up_all("the end")
    await other
