"""One session over one connection."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from shoal.domain.errors import PeerError
from shoal.protocols.seam.session import Bulk, Close, Data, Notice, Output, Send
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
    """A running driver and its results."""

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


def echo(data: Data) -> Sequence[object]:
    return (f"heard {data!r}", Send(f"re: {data!r}"))


def raise_bug(data: Data) -> Sequence[object]:
    raise ZeroDivisionError("a bug")


def raise_peer_error(data: Data) -> Sequence[object]:
    raise PeerError("frame of 3 bytes, expected a task id of 4")


def test_messages_pass_in_order() -> None:
    async def scenario() -> None:
        async with connection(ScriptedSession(echo, opening=["hello"])) as run:
            run.link.deliver("a", b"b")
            assert run.driver.send("mine")
            await asyncio.sleep(1.0)
            run.link.cut()

            end = await run.running

        assert run.heard == ["hello", "heard 'a'", "heard b'b'"]
        assert run.link.sent == ["mine", "re: 'a'", "re: b'b'"]
        assert (end.reason, end.by_peer) == ("connection reset", True)

    virtual.run(scenario())


def test_session_is_ticked_once_when_the_connection_opens() -> None:
    async def scenario() -> None:
        async with connection() as run:
            await asyncio.sleep(3600.0)

        assert run.session.ticks == [0.0]

    virtual.run(scenario())


def test_session_is_ticked_at_each_deadline() -> None:
    async def scenario() -> None:
        async with connection(ScriptedSession(tick_interval=10.0)) as run:
            await asyncio.sleep(35.0)

        assert run.session.ticks == pytest.approx([0.0, 10.0, 20.0, 30.0], abs=0.1)

    virtual.run(scenario())


def test_postponed_deadline_is_met() -> None:
    async def scenario() -> None:
        session = ScriptedSession(tick_interval=10.0)
        async with connection(session) as run:
            await asyncio.sleep(9.0)
            session.deadline = 15.0
            await asyncio.sleep(3.0)
            assert len(run.session.ticks) == 1
            await asyncio.sleep(4.0)

        assert session.ticks == pytest.approx([0.0, 15.0], abs=0.1)

    virtual.run(scenario())


@pytest.mark.parametrize("first", [None, 60.0])
def test_earlier_deadline_is_met(first: float | None) -> None:
    async def scenario() -> None:
        session = ScriptedSession(deadline=first)

        def set_a_limit(data: Data) -> Sequence[object]:
            session.deadline = 5.0
            return ()

        session.answer = set_a_limit
        async with connection(session) as run:
            run.link.deliver("answer me within five seconds")
            await asyncio.sleep(4.0)
            assert len(session.ticks) == 1
            await asyncio.sleep(2.0)
            session.deadline = None

        assert session.ticks[1] == pytest.approx(5.0, abs=0.1)

    virtual.run(scenario())


def test_session_without_a_deadline_is_not_ticked() -> None:
    async def scenario() -> None:
        session = ScriptedSession(tick_interval=10.0)
        async with connection(session):
            session.deadline = None
            await asyncio.sleep(60.0)

        assert session.ticks == [0.0]

    virtual.run(scenario())


def test_protocol_error_closes_with_its_code() -> None:
    async def scenario() -> None:
        async with connection(ScriptedSession(raise_peer_error)) as run:
            run.link.deliver(b"abc")

            end = await run.running

        text = "frame of 3 bytes, expected a task id of 4"
        assert end == ConnectionEnd(f"protocol error: {text}", CODE_PROTOCOL, text)
        assert run.link.closed == [(CODE_PROTOCOL, text)]

    virtual.run(scenario())


def test_session_bug_closes_the_connection_and_is_raised() -> None:
    async def scenario() -> None:
        async with connection(ScriptedSession(raise_bug)) as run:
            run.link.deliver("boom")

            with pytest.raises(ZeroDivisionError):
                await run.running

        assert run.link.closed == [(CODE_INTERNAL, "internal error")]

    virtual.run(scenario())


def test_bug_in_send_does_not_reach_the_sender() -> None:
    class Clumsy(ScriptedSession):
        def send(self, message: object, now: float) -> Sequence[Send]:
            raise ZeroDivisionError

    async def scenario() -> None:
        async with connection(Clumsy()) as run:
            assert run.driver.send("something")

            with pytest.raises(ZeroDivisionError):
                await run.running

    virtual.run(scenario())


@pytest.mark.parametrize("where", ["receiving", "sending"])
def test_link_bug_closes_the_connection_and_is_raised(where: str) -> None:
    async def scenario() -> None:
        async with connection() as run:
            if where == "sending":
                run.link.endless = "something"
                run.driver.send("x")
            waiting = asyncio.create_task(run.driver.wait_for_room())
            run.link.cut(ZeroDivisionError())

            with pytest.raises(ZeroDivisionError):
                await run.running
            await waiting

        assert run.link.closed == [(CODE_INTERNAL, "internal error")]

    virtual.run(scenario())


def test_pending_messages_are_sent_before_the_close() -> None:
    def part(data: Data) -> Sequence[object]:
        return (Send("sorry"), Close("done", 4000, "Bye"), Send("never"), "never")

    async def scenario() -> None:
        async with connection(ScriptedSession(part)) as run:
            run.link.deliver("x", "y")

            end = await run.running

        assert end == ConnectionEnd("done", 4000, "Bye")
        assert run.link.sent == ["sorry"]
        assert run.link.closed == [(4000, "Bye")]
        assert run.heard == []

    virtual.run(scenario())


def test_close_does_not_wait_for_an_unread_peer() -> None:
    async def scenario() -> None:
        async with connection() as run:
            run.link.writable.clear()
            run.driver.send("last words")
            run.driver.disconnect("stopping", 1001, "bye")

            async with asyncio.timeout(FLUSH_TIMEOUT + 1.0):
                end = await run.running

        assert end == ConnectionEnd("stopping", 1001, "bye")
        assert run.link.closed == [(1001, "bye")]

    virtual.run(scenario())


def test_nothing_is_sent_before_start_or_after_end() -> None:
    async def scenario() -> None:
        idle: Driver[object, object] = Driver(
            ScriptedSession(), MemoryLink(), LoopClock(), print
        )
        assert not idle.send("too early")
        async with connection() as run:
            run.driver.disconnect("enough")
            assert not run.driver.send("too late")
            await run.running

            assert not run.driver.send("much too late")
        assert run.link.sent == []

    virtual.run(scenario())


def test_data_after_the_end_is_not_read() -> None:
    async def scenario() -> None:
        async with connection(ScriptedSession(echo)) as run:
            run.driver.disconnect("enough")
            run.link.deliver("late")
            await run.running

        assert run.heard == []

    virtual.run(scenario())


def test_first_end_reason_wins() -> None:
    async def scenario() -> None:
        async with connection() as run:
            run.driver.disconnect("first")
            run.driver.disconnect("second")
            run.link.cut()

            assert (await run.running).reason == "first"

    virtual.run(scenario())


def test_peer_that_stops_reading_is_disconnected() -> None:
    async def scenario() -> None:
        async with connection() as run:
            run.link.writable.clear()
            issued = 0
            while run.driver.send("x" * 100_000):
                issued += 100_000

            end = await run.running

        limit = OUTBOX_MAX * ISSUED_MAX
        assert limit - 200_000 < issued <= limit + 100_000
        assert (end.reason, end.code) == ("peer stopped reading", 1008)

    virtual.run(scenario())


def test_sender_that_can_wait_waits_for_room() -> None:
    async def scenario() -> None:
        async with connection() as run:
            await run.driver.wait_for_room()
            run.link.writable.clear()
            run.driver.send("x" * (OUTBOX_FULL + 1))
            waiting = asyncio.create_task(run.driver.wait_for_room())
            await asyncio.sleep(60.0)
            assert not waiting.done()

            run.link.writable.set()

            await waiting

    virtual.run(scenario())


@pytest.mark.parametrize("how", ["hang up", "cut", "cancel"])
def test_end_releases_waiting_senders(how: str) -> None:
    async def scenario() -> None:
        async with connection() as run:
            run.link.writable.clear()
            run.driver.send("x" * (OUTBOX_FULL + 1))
            waiting = asyncio.create_task(run.driver.wait_for_room())
            await asyncio.sleep(0)
            match how:
                case "hang up":
                    run.driver.disconnect("enough")
                case "cut":
                    run.link.cut()
                case _:
                    run.running.cancel()

            async with asyncio.timeout(FLUSH_TIMEOUT + 1.0):
                await waiting

    virtual.run(scenario())


def test_endless_data_does_not_starve_other_tasks() -> None:
    async def scenario() -> None:
        link = MemoryLink()
        link.endless = "again"
        read = 0

        def count(data: Data) -> Sequence[object]:
            nonlocal read
            read += 1
            return ()

        async with connection(ScriptedSession(count), link) as run:
            turns = 0
            for _ in range(10):
                await asyncio.sleep(0)
                turns += 1
            run.driver.disconnect("enough")
            await run.running

        assert turns == 10
        assert read <= 12 * READS_IN_A_ROW

    virtual.run(scenario())


def test_flood_of_notices_is_rate_limited(caplog: pytest.LogCaptureFixture) -> None:
    def grumble(data: Data) -> Sequence[object]:
        return (Notice("text of an unknown extension ignored"),)

    async def scenario() -> None:
        async with connection(ScriptedSession(grumble)) as run:
            run.link.deliver(*["?"] * (10 * NOTICES_MAX))
            run.link.cut()
            await run.running

    with caplog.at_level(logging.WARNING):
        virtual.run(scenario())

    assert len(caplog.records) == NOTICES_MAX + 1
    assert "no more of these" in caplog.records[-1].getMessage()


def test_close_reason_of_the_peer_is_reported() -> None:
    async def scenario() -> None:
        async with connection() as run:
            run.link.cut(LinkClosed("closed by peer: 4002 Invalid token", 4002, "no"))

            end = await run.running

        assert end == ConnectionEnd(
            "closed by peer: 4002 Invalid token", 4002, "no", True
        )

    virtual.run(scenario())


def test_long_commands_at_once_do_not_disconnect() -> None:
    async def scenario() -> None:
        async with connection() as run:
            for _ in range(4):  # slots, before the writer runs
                assert run.driver.send("x" * (OUTBOX_MAX - 1))
            await asyncio.sleep(1.0)

            assert not run.running.done()

    virtual.run(scenario())


class LastWordsSession(ScriptedSession):
    """A session that sends a message when its connection is lost."""

    def connection_lost(self, now: float) -> Sequence[Output]:
        return (Send(b"too late?"), Close("half a message"))


def test_session_may_handle_the_loss_of_its_connection() -> None:
    async def scenario() -> None:
        async with connection(LastWordsSession()) as run:
            run.link.deliver("half")
            run.link.cut()

            end = await run.running

        assert end.reason == "half a message"
        assert not end.by_peer

    virtual.run(scenario())


@dataclass
class LossCountingSession(ScriptedSession):
    """A session that counts the losses of its connection."""

    parted_times: int = 0

    def connection_lost(self, now: float) -> Sequence[Output]:
        self.parted_times += 1
        return (Send(b"farewell"),)


@pytest.mark.parametrize("way", ["stops reading", "breaks", "is refused"])
def test_session_learns_once_of_any_end_by_the_peer(way: str) -> None:
    async def scenario() -> None:
        session = LossCountingSession(raise_peer_error if way == "is refused" else echo)
        async with connection(session) as run:
            if way == "stops reading":
                run.link.writable.clear()
                run.link.deliver(*["x" * OUTBOX_MAX] * 3)
            elif way == "breaks":
                run.link.cut()
                run.driver.send("to nobody")
            else:
                run.link.deliver("nonsense")
            await run.running

        assert session.parted_times == 1

    virtual.run(scenario())


def test_session_is_not_notified_of_a_local_close() -> None:
    async def scenario() -> None:
        session = LossCountingSession()
        async with connection(session) as run:
            run.driver.disconnect("leaving")
            await run.running

        assert session.parted_times == 0

    virtual.run(scenario())


@pytest.mark.parametrize("grants", [True, False])
def test_disconnect_waits_for_bulk_data_that_the_peer_has_room_for(
    grants: bool,
) -> None:
    ready = False

    def grant(data: Data) -> Sequence[object]:
        nonlocal ready
        ready = grants
        return ("too late for anything else",)

    async def scenario() -> None:
        result = Bulk((b"result",), 6, lambda: ready)
        async with connection(ScriptedSession(grant, opening=[result])) as run:
            await asyncio.sleep(1.0)
            run.driver.disconnect("leaving", text="bye")
            assert not run.driver.send("more")
            await asyncio.sleep(1.0)
            assert not run.running.done()
            run.link.deliver("credit")

            end = await run.running

        assert end == ConnectionEnd("leaving", text="bye")
        assert run.link.sent == ([b"result"] if grants else [])
        assert run.heard == []

    virtual.run(scenario())
