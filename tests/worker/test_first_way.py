"""Connections by several ways, of which some never answer, fail, or come too late."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from shoal.domain.errors import PeerError, Unavailable
from shoal.worker.first_way import ConnectionWay, connect_first

NEVER = 1e6  # seconds


class Ways:
    """Ways whose connections are texts; it notes what is begun, given up and closed."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.given_up: list[str] = []
        self.closed: list[str] = []

    def way(
        self,
        name: str,
        connect: Callable[[], Awaitable[object]],
        after: float = NEVER,
        timeout: float = NEVER,
    ) -> ConnectionWay[str]:
        async def noted() -> str:
            self.begun.append(name)
            try:
                await connect()
            except asyncio.CancelledError:
                self.given_up.append(name)
                raise
            return name

        return ConnectionWay(name, after, timeout, noted)

    async def first(self, ways: Sequence[ConnectionWay[str]]) -> str:
        way, found = await connect_first(ways, self.closed.append)
        assert way.name == found
        return found


async def at_once() -> None:
    pass


async def fail() -> None:
    raise ConnectionRefusedError


async def another_program() -> None:
    raise PeerError("another program answers there")


async def swallowed() -> None:
    await asyncio.Event().wait()


async def test_ways_after_the_one_that_answers_are_not_tried() -> None:
    ways = Ways()

    found = await ways.first([ways.way("a", at_once), ways.way("b", at_once)])

    assert (found, ways.begun, ways.closed) == ("a", ["a"], [])


async def test_way_that_fails_makes_room_for_the_next_at_once() -> None:
    ways = Ways()

    found = await ways.first(
        [
            ways.way("a", fail),
            ways.way("b", another_program),
            ways.way("c", at_once),
        ]
    )

    assert (found, ways.begun) == ("c", ["a", "b", "c"])


async def test_way_without_an_answer_is_given_up_when_another_has_one() -> None:
    ways = Ways()

    found = await ways.first(
        [ways.way("a", swallowed), ways.way("b", at_once, after=0.0)]
    )

    assert (found, ways.given_up) == ("b", ["a"])


async def test_first_way_may_still_be_first() -> None:
    ways, tried = Ways(), asyncio.Event()

    async def try_in_vain() -> None:
        tried.set()
        await swallowed()

    found = await ways.first(
        [ways.way("a", tried.wait), ways.way("b", try_in_vain, after=0.0)]
    )

    assert (found, ways.given_up) == ("a", ["b"])


async def test_second_connection_of_the_same_moment_is_closed() -> None:
    ways, both = Ways(), asyncio.Event()

    async def last() -> None:
        both.set()

    found = await ways.first([ways.way("a", both.wait), ways.way("b", last, after=0.0)])

    assert {found, *ways.closed} == {"a", "b"}
    assert len(ways.closed) + len(ways.given_up) == 1


async def test_every_reason_is_told() -> None:
    ways = Ways()

    with pytest.raises(Unavailable) as failed:
        await ways.first(
            [
                ways.way("a", swallowed, timeout=0.0),
                ways.way("b", fail, after=0.0),
                ways.way("c", another_program),
            ]
        )

    assert str(failed.value) == (
        "a: no answer; b: connection refused; c: another program answers there"
    )
    with pytest.raises(Unavailable, match="it has no address"):
        await ways.first([])


async def test_nothing_is_left_of_what_is_cancelled() -> None:
    ways = Ways()
    connecting = asyncio.create_task(
        ways.first([ways.way("a", swallowed), ways.way("b", swallowed, after=0.0)])
    )
    while len(ways.begun) < 2:  # noqa: ASYNC110  # what is waited for has no event
        await asyncio.sleep(0)

    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting

    assert ways.given_up == ["a", "b"]
