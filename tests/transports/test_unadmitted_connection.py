"""The limits of a connection to the HTTP port before its peer is admitted."""

import asyncio
from collections.abc import Awaitable, Callable

from shoal.transports.strangers import (
    HELD_MAX,
    MESSAGE_MAX,
    MESSAGE_TIMEOUT,
    OVER_BUDGET,
    PIECE_OVERHEAD,
    Strangers,
)
from shoal.transports.unadmitted_connection import (
    LINGER,
    MESSAGE_TOO_BIG,
    PINGS_MAX,
    POLICY_VIOLATION,
    READ_OVERHEAD,
    UnadmittedConnection,
)
from simulation import virtual
from transports.test_strangers import FakeTransport, Recorder

HELD_AT_MOST = MESSAGE_MAX + READ_OVERHEAD  # bytes, with what each piece takes
HEAD = b"GET / HTTP/1.1\r\n\r\n"


class Calls(Recorder):
    """The protocol behind, which remembers its callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.calls.append("made")

    def connection_lost(self, exc: Exception | None) -> None:
        self.calls.append("lost")

    def eof_received(self) -> bool:
        self.calls.append("eof")
        return True

    def pause_writing(self) -> None:
        self.calls.append("pause")

    def resume_writing(self) -> None:
        self.calls.append("resume")


class Opened:
    """A connection, with what is before and behind it."""

    def __init__(self, strangers: Strangers, address: str = "192.0.2.1") -> None:
        self.transport, self.behind = FakeTransport(address), Calls()
        self.connection = UnadmittedConnection(strangers, self.behind)
        self.transport.set_protocol(self.connection)
        self.connection.connection_made(self.transport)

    def receive(self, size: int) -> None:
        self.connection.data_received(bytes(size))

    @property
    def close_code(self) -> int:
        """The code of the close frame that was sent."""
        frame = self.transport.written
        assert frame[0] == 0x88
        assert frame[1] == len(frame) - 2
        return int.from_bytes(frame[2:4], "big")


def run(script: Callable[[Strangers], Awaitable[None]]) -> None:
    """Run a script in virtual time."""

    async def scenario() -> None:
        await script(Strangers())

    virtual.run(scenario())


def test_a_head_has_a_limit_of_size() -> None:
    async def script(strangers: Strangers) -> None:
        fits, exceeds = Opened(strangers), Opened(strangers)

        fits.receive(HELD_AT_MOST - PIECE_OVERHEAD)
        exceeds.receive(HELD_AT_MOST - PIECE_OVERHEAD + 1)

        assert fits.transport.written == b""
        assert fits.connection.refusal == ""
        refusal = exceeds.transport.written
        assert refusal.startswith(b"HTTP/1.1 431 ")
        exceeds.receive(HELD_AT_MOST)
        assert exceeds.transport.written == refusal  # once
        assert exceeds.behind.received == b""
        assert not exceeds.transport.aborted  # until its peer has read that
        await asyncio.sleep(LINGER)
        assert exceeds.transport.aborted
        assert not fits.transport.aborted

    run(script)


def test_a_head_has_a_limit_of_time() -> None:
    async def script(strangers: Strangers) -> None:
        slow, quick = Opened(strangers), Opened(strangers)
        slow.connection.data_received(HEAD[:-1])
        quick.connection.data_received(HEAD)

        await asyncio.sleep(MESSAGE_TIMEOUT - 1.0)
        slow.receive(1)  # which is no new beginning
        await asyncio.sleep(1.0)

        assert slow.transport.written.startswith(b"HTTP/1.1 408 ")
        slow.receive(1)
        assert slow.behind.received == HEAD[:-1] + bytes(1)
        await asyncio.sleep(LINGER)
        assert slow.transport.aborted
        assert (quick.transport.written, quick.transport.aborted) == (b"", False)

    run(script)


def test_what_follows_a_head_counts_and_the_head_does_not() -> None:
    async def script(strangers: Strangers) -> None:
        opened = Opened(strangers)

        opened.connection.data_received(HEAD + bytes(100))

        assert strangers.held == 100 + PIECE_OVERHEAD

    run(script)


def test_data_that_is_under_way_when_the_peer_is_admitted_arrives() -> None:
    async def script(strangers: Strangers) -> None:
        opened = Opened(strangers)
        opened.connection.admit()

        opened.connection.data_received(HEAD[:3])
        opened.connection.data_received(HEAD[3:])
        opened.connection.charge(1.0)

        assert opened.behind.received == HEAD
        assert strangers.held == 0

    run(script)


def test_a_message_has_a_limit_of_size() -> None:
    async def script(strangers: Strangers) -> None:
        fits, exceeds = Opened(strangers), Opened(strangers)
        for each in (fits, exceeds):
            each.connection.data_received(HEAD)
            UnadmittedConnection.begin_messages(each.transport, strangers, "")
            each.connection.progressed()

        for _ in range(3):
            fits.receive(HELD_AT_MOST - PIECE_OVERHEAD)
            fits.connection.progressed()
        exceeds.receive(HELD_AT_MOST - PIECE_OVERHEAD + 1)

        assert fits.transport.written == b""
        assert exceeds.close_code == MESSAGE_TOO_BIG

    run(script)


def test_a_message_has_a_limit_of_time_and_pings_have_none() -> None:
    async def script(strangers: Strangers) -> None:
        pinging, slow = Opened(strangers), Opened(strangers)
        for each in (pinging, slow):
            each.connection.data_received(HEAD)
            UnadmittedConnection.begin_messages(each.transport, strangers, "")
            each.connection.progressed()

        pinging.receive(PINGS_MAX - PIECE_OVERHEAD)
        slow.receive(PINGS_MAX - PIECE_OVERHEAD + 1)
        await asyncio.sleep(MESSAGE_TIMEOUT)

        assert pinging.transport.written == b""
        assert slow.close_code == POLICY_VIOLATION

    run(script)


def test_a_message_that_was_taken_stops_the_clock() -> None:
    async def script(strangers: Strangers) -> None:
        opened = Opened(strangers)
        opened.connection.data_received(HEAD)
        UnadmittedConnection.begin_messages(opened.transport, strangers, "")
        opened.receive(2 * PINGS_MAX)

        opened.connection.progressed()
        await asyncio.sleep(MESSAGE_TIMEOUT)

        assert opened.transport.written == b""
        assert strangers.held == 0

    run(script)


def test_messages_of_an_admitted_peer_of_http_count_again() -> None:
    async def script(strangers: Strangers) -> None:
        opened = Opened(strangers)
        opened.connection.data_received(HEAD)
        opened.connection.admit()
        assert UnadmittedConnection.of(opened.transport) is None
        assert UnadmittedConnection.of(None) is None

        again = UnadmittedConnection.begin_messages(opened.transport, strangers, "")

        assert UnadmittedConnection.of(opened.transport) is again
        assert len(strangers) == 1
        again.data_received(bytes(HELD_AT_MOST))
        assert opened.close_code == MESSAGE_TOO_BIG

    run(script)


def test_what_is_held_during_a_block_counts() -> None:
    async def script(strangers: Strangers) -> None:
        opened = Opened(strangers)
        opened.connection.data_received(HEAD)
        opened.connection.progressed()

        with opened.connection.holding(1000):
            assert strangers.held == 1000
        assert strangers.held == 0
        opened.connection.admit()
        with opened.connection.holding(1000):
            assert strangers.held == 0

    run(script)


def test_another_budget_has_its_own_limit_of_a_message() -> None:
    async def script(strangers: Strangers) -> None:
        others = Strangers()
        limited, unlimited = Opened(strangers), Opened(strangers)
        for each in (limited, unlimited):
            each.connection.data_received(HEAD)
            UnadmittedConnection.begin_messages(each.transport, strangers, "")
            each.receive(2 * PINGS_MAX)  # the clock runs

        limited.connection.share_budget(others, 2 * MESSAGE_MAX)
        unlimited.connection.share_budget(others)
        assert (len(strangers), len(others)) == (0, 2)
        limited.connection.progressed()
        limited.receive(HELD_AT_MOST + 1)
        unlimited.receive(10 * HELD_AT_MOST)
        await asyncio.sleep(MESSAGE_TIMEOUT - 1.0)
        assert limited.transport.written == b""
        limited.receive(MESSAGE_MAX)
        assert limited.close_code == MESSAGE_TOO_BIG
        await asyncio.sleep(MESSAGE_TIMEOUT)

        assert unlimited.transport.written == b""

    run(script)


def test_who_holds_too_much_is_dropped_and_cannot_be_admitted() -> None:
    async def script(strangers: Strangers) -> None:
        opened = Opened(strangers)
        opened.connection.data_received(HEAD)  # a body follows

        opened.receive(HELD_MAX + 1)

        assert opened.transport.aborted
        assert opened.connection.refusal == OVER_BUDGET
        assert opened.behind.received == HEAD
        opened.connection.admit()
        assert opened.transport.protocol is opened.connection
        assert opened.connection.eof_received() is None

    run(script)


def test_the_first_reason_to_refuse_a_connection_counts() -> None:
    async def script(_: Strangers) -> None:
        few = Strangers(HELD_AT_MOST + 2 * PIECE_OVERHEAD + 100, None)
        opened, other = Opened(few), Opened(few)
        opened.receive(HELD_AT_MOST)
        refusal = opened.connection.refusal
        assert "before admission" in refusal

        other.receive(200)

        assert opened.transport.aborted
        assert opened.connection.refusal == refusal

    run(script)


def test_callbacks_reach_the_protocol_behind() -> None:
    async def script(strangers: Strangers) -> None:
        opened = Opened(strangers)

        opened.connection.pause_writing()
        opened.connection.resume_writing()
        assert opened.connection.eof_received() is True
        opened.connection.connection_lost(None)
        opened.connection.connection_lost(None)

        assert opened.behind.calls == ["made", "pause", "resume", "eof", "lost"]
        assert len(strangers) == 0

    run(script)
