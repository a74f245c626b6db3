"""One session over one connection."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from shoal.domain.errors import PeerError
from shoal.protocols.seam.session import Close, Data, Notice, Output, Send
from shoal.transports.clock import LoopClock
from shoal.transports.driver import (
    FLUSH_TIMEOUT,
    NOTICES_MAX,
    READS_IN_A_ROW,
    ConnectionEnd,
    Driver,
)
from shoal.transports.link import LinkClosed
from shoal.transports.outbox import ISSUED_MAX, OUTBOX_FULL, OUTBOX_MAX
from simulation import virtual
from transports.memory_links import MemoryLink, ScriptedSession

CODE_INTERNAL = 1011
CODE_PROTOCOL = 1002


@dataclass
class Connection:
    """A driver at work and what came out of it."""

    driver: Driver[object, object]
    link: MemoryLink
    session: ScriptedSession
    heard: list[object]
    running: asyncio.Task[ConnectionEnd]


@asynccontextmanager
async def connection(
    session: ScriptedSession | None = None, link: MemoryLink | None = None
) -> AsyncIterator[Connection]:
    session, link = session or ScriptedSession(), link or MemoryLink()
    heard: list[object] = []
    driver: Driver[object, object] = Driver(session, link, LoopClock(), heard.append)
    running = asyncio.create_task(driver.run())
    await asyncio.sleep(0)
    try:
        yield Connection(driver, link, session, heard, running)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def parrot(data: Data) -> Sequence[object]:
    return (f"heard {data!r}", Send(f"re: {data!r}"))


def stumble(data: Data) -> Sequence[object]:
    raise ZeroDivisionError("a bug")


def complain(data: Data) -> Sequence[object]:
    raise PeerError("frame of 3 bytes, expected a task id of 4")


def test_messages_go_in_and_come_out_in_order() -> None:
    async def scenario() -> None:
        async with connection(ScriptedSession(parrot, opening=["hello"])) as its:
            its.link.deliver("a", b"b")
            assert its.driver.send("mine")
            await asyncio.sleep(1.0)
            its.link.cut()

            end = await its.running

        assert its.heard == ["hello", "heard 'a'", "heard b'b'"]
        assert its.link.sent == ["mine", "re: 'a'", "re: b'b'"]
        assert (end.reason, end.by_peer) == ("connection reset", True)

    virtual.run(scenario())


def test_session_is_ticked_once_when_the_connection_opens() -> None:
    async def scenario() -> None:
        async with connection() as its:
            await asyncio.sleep(3600.0)

        assert its.session.ticks == [0.0]

    virtual.run(scenario())


def test_session_is_ticked_at_each_deadline() -> None:
    async def scenario() -> None:
        async with connection(ScriptedSession(tick_interval=10.0)) as its:
            await asyncio.sleep(35.0)

        assert its.session.ticks == pytest.approx([0.0, 10.0, 20.0, 30.0], abs=0.1)

    virtual.run(scenario())


def test_deadline_that_moves_away_is_waited_for() -> None:
    async def scenario() -> None:
        session = ScriptedSession(tick_interval=10.0)
        async with connection(session) as its:
            await asyncio.sleep(9.0)
            session.deadline = 15.0
            await asyncio.sleep(3.0)
            assert len(its.session.ticks) == 1
            await asyncio.sleep(4.0)

        assert session.ticks == pytest.approx([0.0, 15.0], abs=0.1)

    virtual.run(scenario())


@pytest.mark.parametrize("first", [None, 60.0])
def test_deadline_that_comes_nearer_is_kept(first: float | None) -> None:
    async def scenario() -> None:
        session = ScriptedSession(deadline=first)

        def set_a_limit(data: Data) -> Sequence[object]:
            session.deadline = 5.0
            return ()

        session.answer = set_a_limit
        async with connection(session) as its:
            its.link.deliver("answer me within five seconds")
            await asyncio.sleep(4.0)
            assert len(session.ticks) == 1
            await asyncio.sleep(2.0)
            session.deadline = None

        assert session.ticks[1] == pytest.approx(5.0, abs=0.1)

    virtual.run(scenario())


def test_session_without_a_deadline_any_more_is_left_alone() -> None:
    async def scenario() -> None:
        session = ScriptedSession(tick_interval=10.0)
        async with connection(session):
            session.deadline = None
            await asyncio.sleep(60.0)

        assert session.ticks == [0.0]

    virtual.run(scenario())


def test_peer_that_breaks_its_protocol_is_told_so() -> None:
    async def scenario() -> None:
        async with connection(ScriptedSession(complain)) as its:
            its.link.deliver(b"abc")

            end = await its.running

        text = "frame of 3 bytes, expected a task id of 4"
        assert end == ConnectionEnd(f"protocol error: {text}", CODE_PROTOCOL, text)
        assert its.link.closed == [(CODE_PROTOCOL, text)]

    virtual.run(scenario())


def test_bug_of_the_session_ends_its_connection_and_is_raised() -> None:
    async def scenario() -> None:
        async with connection(ScriptedSession(stumble)) as its:
            its.link.deliver("boom")

            with pytest.raises(ZeroDivisionError):
                await its.running

        assert its.link.closed == [(CODE_INTERNAL, "internal error")]

    virtual.run(scenario())


def test_bug_in_issue_does_not_hit_the_one_who_issues() -> None:
    class Clumsy(ScriptedSession):
        def send(self, message: object, now: float) -> Sequence[Send]:
            raise ZeroDivisionError

    async def scenario() -> None:
        async with connection(Clumsy()) as its:
            assert its.driver.send("something")

            with pytest.raises(ZeroDivisionError):
                await its.running

    virtual.run(scenario())


@pytest.mark.parametrize("where", ["receiving", "sending"])
def test_bug_of_the_link_ends_the_connection_and_is_raised(where: str) -> None:
    async def scenario() -> None:
        async with connection() as its:
            if where == "sending":
                its.link.endless = "something"
                its.driver.send("x")
            waiting = asyncio.create_task(its.driver.wait_for_room())
            its.link.cut(ZeroDivisionError())

            with pytest.raises(ZeroDivisionError):
                await its.running
            await waiting

        assert its.link.closed == [(CODE_INTERNAL, "internal error")]

    virtual.run(scenario())


def test_last_words_are_sent_before_the_close() -> None:
    def part(data: Data) -> Sequence[object]:
        return (Send("sorry"), Close("done", 4000, "Bye"), Send("never"), "never")

    async def scenario() -> None:
        async with connection(ScriptedSession(part)) as its:
            its.link.deliver("x", "y")

            end = await its.running

        assert end == ConnectionEnd("done", 4000, "Bye")
        assert its.link.sent == ["sorry"]
        assert its.link.closed == [(4000, "Bye")]
        assert its.heard == []

    virtual.run(scenario())


def test_peer_that_does_not_read_our_last_words_is_left() -> None:
    async def scenario() -> None:
        async with connection() as its:
            its.link.writable.clear()
            its.driver.send("last words")
            its.driver.disconnect("stopping", 1001, "bye")

            async with asyncio.timeout(FLUSH_TIMEOUT + 1.0):
                end = await its.running

        assert end == ConnectionEnd("stopping", 1001, "bye")
        assert its.link.closed == [(1001, "bye")]

    virtual.run(scenario())


def test_nothing_is_issued_before_the_beginning_or_after_the_end() -> None:
    async def scenario() -> None:
        idle: Driver[object, object] = Driver(
            ScriptedSession(), MemoryLink(), LoopClock(), print
        )
        assert not idle.send("too early")
        async with connection() as its:
            its.driver.disconnect("enough")
            assert not its.driver.send("too late")
            await its.running

            assert not its.driver.send("much too late")
        assert its.link.sent == []

    virtual.run(scenario())


def test_what_arrives_after_the_end_is_not_read() -> None:
    async def scenario() -> None:
        async with connection(ScriptedSession(parrot)) as its:
            its.driver.disconnect("enough")
            its.link.deliver("late")
            await its.running

        assert its.heard == []

    virtual.run(scenario())


def test_first_reason_to_end_is_the_one_that_counts() -> None:
    async def scenario() -> None:
        async with connection() as its:
            its.driver.disconnect("first")
            its.driver.disconnect("second")
            its.link.cut()

            assert (await its.running).reason == "first"

    virtual.run(scenario())


def test_peer_that_stops_reading_is_hung_up_on() -> None:
    async def scenario() -> None:
        async with connection() as its:
            its.link.writable.clear()
            issued = 0
            while its.driver.send("x" * 100_000):
                issued += 100_000

            end = await its.running

        limit = OUTBOX_MAX * ISSUED_MAX
        assert limit - 200_000 < issued <= limit + 100_000
        assert (end.reason, end.code) == ("peer stopped reading", 1008)

    virtual.run(scenario())


def test_whoever_can_wait_waits_for_room() -> None:
    async def scenario() -> None:
        async with connection() as its:
            await its.driver.wait_for_room()
            its.link.writable.clear()
            its.driver.send("x" * (OUTBOX_FULL + 1))
            waiting = asyncio.create_task(its.driver.wait_for_room())
            await asyncio.sleep(60.0)
            assert not waiting.done()

            its.link.writable.set()

            await waiting

    virtual.run(scenario())


@pytest.mark.parametrize("how", ["hang up", "cut", "cancel"])
def test_nobody_waits_for_room_on_a_connection_that_has_ended(how: str) -> None:
    async def scenario() -> None:
        async with connection() as its:
            its.link.writable.clear()
            its.driver.send("x" * (OUTBOX_FULL + 1))
            waiting = asyncio.create_task(its.driver.wait_for_room())
            await asyncio.sleep(0)
            match how:
                case "hang up":
                    its.driver.disconnect("enough")
                case "cut":
                    its.link.cut()
                case _:
                    its.running.cancel()

            async with asyncio.timeout(FLUSH_TIMEOUT + 1.0):
                await waiting

    virtual.run(scenario())


def test_reader_with_endless_data_lets_others_have_their_turn() -> None:
    async def scenario() -> None:
        link = MemoryLink()
        link.endless = "again"
        read = 0

        def count(data: Data) -> Sequence[object]:
            nonlocal read
            read += 1
            return ()

        async with connection(ScriptedSession(count), link) as its:
            turns = 0
            for _ in range(10):
                await asyncio.sleep(0)
                turns += 1
            its.driver.disconnect("enough")
            await its.running

        assert turns == 10
        assert read <= 12 * READS_IN_A_ROW

    virtual.run(scenario())


def test_flood_of_notices_fills_no_disk(caplog: pytest.LogCaptureFixture) -> None:
    def grumble(data: Data) -> Sequence[object]:
        return (Notice("text of an unknown extension ignored"),)

    async def scenario() -> None:
        async with connection(ScriptedSession(grumble)) as its:
            its.link.deliver(*["?"] * (10 * NOTICES_MAX))
            its.link.cut()
            await its.running

    with caplog.at_level(logging.WARNING):
        virtual.run(scenario())

    assert len(caplog.records) == NOTICES_MAX + 1
    assert "no more of these" in caplog.records[-1].getMessage()


def test_farewell_of_the_peer_is_passed_on() -> None:
    async def scenario() -> None:
        async with connection() as its:
            its.link.cut(LinkClosed("closed by peer: 4002 Invalid token", 4002, "no"))

            end = await its.running

        assert end == ConnectionEnd(
            "closed by peer: 4002 Invalid token", 4002, "no", True
        )

    virtual.run(scenario())


def test_long_commands_that_come_at_once_are_no_reason_to_hang_up() -> None:
    async def scenario() -> None:
        async with connection() as its:
            for _ in range(4):  # slots, before the writer has had its turn
                assert its.driver.send("x" * (OUTBOX_MAX - 1))
            await asyncio.sleep(1.0)

            assert not its.running.done()

    virtual.run(scenario())


class Parted(ScriptedSession):
    """A session that still has something to say to who has hung up."""

    def connection_lost(self, now: float) -> Sequence[Output]:
        return (Send(b"too late?"), Close("half a message"))


def test_session_that_wants_to_know_is_told_that_its_peer_has_hung_up() -> None:
    async def scenario() -> None:
        async with connection(Parted()) as its:
            its.link.deliver("half")
            its.link.cut()

            end = await its.running

        assert end.reason == "half a message"
        assert not end.by_peer

    virtual.run(scenario())


@dataclass
class Noting(ScriptedSession):
    """A session that notes how often it was told that its peer has gone."""

    parted_times: int = 0

    def connection_lost(self, now: float) -> Sequence[Output]:
        self.parted_times += 1
        return (Send(b"farewell"),)


@pytest.mark.parametrize("way", ["stops reading", "breaks", "is refused"])
def test_session_is_told_once_of_whatever_the_peer_ends_it_by(way: str) -> None:
    async def scenario() -> None:
        session = Noting(complain if way == "is refused" else parrot)
        async with connection(session) as its:
            if way == "stops reading":
                its.link.writable.clear()
                its.link.deliver(*["x" * OUTBOX_MAX] * 3)
            elif way == "breaks":
                its.link.cut()
                its.driver.send("to nobody")
            else:
                its.link.deliver("nonsense")
            await its.running

        assert session.parted_times == 1

    virtual.run(scenario())


def test_session_is_not_told_that_we_hang_up() -> None:
    async def scenario() -> None:
        session = Noting()
        async with connection(session) as its:
            its.driver.disconnect("leaving")
            await its.running

        assert session.parted_times == 0

    virtual.run(scenario())
