import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, count, pairwise
from typing import TypeVar

import pytest

from shoal.peers.relay import (
    GUESTS_BURST,
    GUESTS_SHARE,
    HOST_COSTS,
    RelayRunner,
)
from shoal.protocols.seam.endpoints import UpgradeRequest
from shoal.protocols.seam.relay import RelayBroadcast, RelaySend, RelayStanding
from shoal.protocols.seam.session import Batch, Data
from shoal.transports.clock import LoopClock
from shoal.transports.driver import READS_IN_A_ROW, ConnectionEnd
from shoal.transports.link import LinkClosed
from shoal.transports.local_link import LocalLink, local_links
from shoal.transports.loop_share import LoopShare
from shoal.transports.outbox import OUTBOX_MAX
from shoal.transports.strangers import Strangers
from simulation.virtual import in_virtual_time
from transports.manual_clock import ManualClock, settle

T = TypeVar("T")

Outputs = Sequence[RelaySend | RelayBroadcast]


class NumberedRelay:
    """A relay machine on which ``NUMBER:TEXT`` goes to the link of that number.

    ``all:A,B`` is broadcast, to the first link only from ``B`` on, ``pause`` stops
    reading for a while, ``close`` closes the link, and ``bug`` raises an error.
    """

    def __init__(self) -> None:
        self.there: list[int] = []
        self.left: list[int] = []
        self.paused: float = 0.0
        self.deadline: float | None = None
        self.is_open = False
        self.ticks: list[float] = []

    def link_opened(self, link: int, hello: UpgradeRequest, now: float) -> Outputs:
        self.there.append(link)
        return [RelaySend(link, f"you are {link} of {hello.path}")]

    def standing(self, link: int) -> RelayStanding:
        return RelayStanding.GUEST if link in self.there else RelayStanding.STRANGER

    def count_peers(self) -> Counter[RelayStanding]:
        return Counter(map(self.standing, self.there))

    def receive(self, link: int, batch: Sequence[Data], now: float) -> Outputs:
        outputs: list[RelaySend | RelayBroadcast] = []
        for data in batch:
            to, _, text = str(data).partition(":")
            match to:
                case "all":
                    firsts = [(each, int(each == 1)) for each in [*self.there, 99]]
                    outputs.append(RelayBroadcast(tuple(text.split(",")), firsts))
                case "pause":
                    self.paused = 0.01
                case "close":
                    outputs += [RelaySend(link, "last"), RelaySend(link, text, 4000)]
                case "tick":
                    self.deadline = now + 0.01
                case "bug":
                    raise ZeroDivisionError
                case number:
                    outputs.append(RelaySend(int(number), text))
        return outputs

    def read_delay(self, link: int, now: float) -> float:
        paused, self.paused = self.paused, 0.0
        return paused

    def link_closed(self, link: int, now: float) -> Outputs:
        if link in self.there:
            self.there.remove(link)
        self.left.append(link)
        return [RelaySend(each, f"{link} left") for each in self.there]

    def tick(self, now: float) -> Outputs:
        self.ticks.append(now)
        self.deadline = None
        return [RelaySend(each, "tick") for each in self.there]


class FailingCloseRelay(NumberedRelay):
    """A relay machine that fails when a link closes."""

    def link_closed(self, link: int, now: float) -> Outputs:
        raise LookupError


class RelayRun:
    """A running relay with links in memory."""

    def __init__(self, make: Callable[[], NumberedRelay] = NumberedRelay) -> None:
        self.switch = make()
        self.switching = RelayRunner(
            "test", self.switch, LoopClock(), Strangers(), lambda: 0.0
        )
        self.serving: list[asyncio.Task[ConnectionEnd]] = []

    async def connect(self, *, is_host: bool = False) -> LocalLink:
        """Return the end of a new link that the relay has opened."""
        ours, theirs = local_links("switch", f"peer {len(self.serving) + 1}")
        serving = self.switching.serve(theirs, UpgradeRequest("/x"), is_host=is_host)
        self.serving.append(asyncio.create_task(serving))
        (greeting,) = await ours.receive()
        assert greeting == f"you are {len(self.serving)} of /x"
        return ours

    async def close(self) -> None:
        self.switching.disconnect_all("the end")
        await asyncio.gather(*self.serving)


async def close_reason(link: LocalLink) -> str:
    """Return the code and reason with which a link was closed."""
    try:
        while True:
            await link.receive()
    except LinkClosed as closed:
        return closed.text


async def test_messages_reach_their_links_in_order() -> None:
    exchange = RelayRun()
    first, second = await exchange.connect(), await exchange.connect()

    first.write(["2:a", "2:b", "1:c"])

    assert await second.receive() == ["a", "b"]
    assert await first.receive() == ["c"]
    await exchange.close()


async def test_link_that_closes_while_others_send_to_it_has_left() -> None:
    exchange = RelayRun()
    first, second = await exchange.connect(), await exchange.connect()

    first.write(["2:late"])
    second.abort()

    assert await first.receive() == ["2 left"]
    assert exchange.switch.left == [2]
    await exchange.close()


async def test_what_arrives_when_the_relay_has_ended_a_link_goes_nowhere() -> None:
    exchange = RelayRun()
    first, second = await exchange.connect(), await exchange.connect()

    first.write(["2:late"])
    exchange.switching.disconnect_all("the end")

    received: list[Data] = []
    with suppress(LinkClosed):
        while True:
            received += await second.receive()
    assert "late" not in received
    await exchange.close()


async def test_link_that_ends_when_its_turn_has_come_says_no_more() -> None:
    clock = ManualClock()
    share = LoopShare(clock, 0.1, 1.0, clock.cpu)
    exchange = RelayRun()
    exchange.switching = RelayRunner(
        "test", exchange.switch, clock, Strangers(share=share), clock.cpu
    )
    first, second = await exchange.connect(), await exchange.connect()
    share.charge("192.0.2.9", 2.0)
    first.write(["2:late"])
    await settle()

    ((clock.time, give_turn),) = clock.calls
    give_turn()
    exchange.switching.disconnect_all("the end")

    received: list[Data] = []
    with suppress(LinkClosed):
        while True:
            received += await second.receive()
    assert "late" not in received
    await exchange.close()


class UnwritableLink(LocalLink):
    """A link on which nothing can be sent after the first message."""

    def __init__(self) -> None:
        super().__init__("peer")
        self.greeted = asyncio.Event()

    def write(self, packs: Sequence[Data]) -> None:
        if self.greeted.is_set():
            raise LinkClosed("broken pipe")
        self.greeted.set()


async def test_link_that_cannot_be_written_has_left() -> None:
    exchange = RelayRun()
    first, link = await exchange.connect(), UnwritableLink()
    serving = exchange.switching.serve(link, UpgradeRequest("/x"))
    exchange.serving.append(asyncio.create_task(serving))
    await link.greeted.wait()

    first.write(["2:late", "1:here"])

    assert await first.receive() == ["here", "2 left"]
    await exchange.close()
    assert exchange.serving[1].result().reason == "broken pipe"


class TalkativeLink(LocalLink):
    """A link from which the next message has always arrived, until it ends."""

    read = 0

    async def receive(self) -> Batch:
        self.read += 1
        if self.read > 4 * READS_IN_A_ROW:
            raise LinkClosed("at last")
        return ["99:more"]


async def test_others_have_their_turn_while_a_link_never_waits() -> None:
    exchange, link = RelayRun(), TalkativeLink("peer")
    serving = exchange.switching.serve(link, UpgradeRequest("/x"))
    exchange.serving.append(asyncio.create_task(serving))

    read = [0]
    while not exchange.serving[0].done():
        await asyncio.sleep(0)
        read.append(link.read)

    assert read[-1] > READS_IN_A_ROW
    assert max(later - before for before, later in pairwise(read)) <= READS_IN_A_ROW


async def test_coordinators_own_link_is_no_news(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    for is_host in (True, False):
        ours, theirs = local_links("switch", "peer")
        runner = RelayRunner("test", NumberedRelay(), LoopClock(), Strangers())
        serving = runner.serve(theirs, UpgradeRequest("/x"), is_host=is_host)
        served = asyncio.create_task(serving)
        await ours.receive()
        runner.disconnect_all("the end")
        await served

        lines = [each.getMessage().split()[0] for each in caplog.records]
        assert lines == ([] if is_host else ["connected", "disconnected"])


async def test_message_for_an_unknown_link_is_dropped() -> None:
    exchange = RelayRun()
    first = await exchange.connect()

    first.write(["77:lost", "1:here"])

    assert await first.receive() == ["here"]
    await exchange.close()


async def test_broadcast_reaches_each_link_from_its_offset() -> None:
    exchange = RelayRun()
    first, second = await exchange.connect(), await exchange.connect()

    second.write(["all:a,b,c", "2:d"])

    assert await first.receive() == ["b", "c"]
    assert await second.receive() == ["a", "b", "c", "d"]
    await exchange.close()


async def test_ended_link_leaves_the_relay() -> None:
    exchange = RelayRun()
    first, second = await exchange.connect(), await exchange.connect()

    await second.close(1000, "bye")
    end = await exchange.serving[1]

    assert end == ConnectionEnd("closed by peer: 1000 bye", 1000, "bye", by_peer=True)
    assert await first.receive() == ["2 left"]
    assert exchange.switch.left == [2]
    assert len(exchange.switching) == 1
    await exchange.close()


async def test_closed_link_gets_pending_messages_and_the_reason() -> None:
    exchange = RelayRun()
    first, second = await exchange.connect(), await exchange.connect()

    second.write(["1:before", "close:enough"])

    assert await second.receive() == ["last"]
    with pytest.raises(LinkClosed) as raised:
        await second.receive()
    assert (raised.value.code, raised.value.text) == (4000, "enough")
    assert await first.receive() == ["before", "2 left"]
    await exchange.close()


async def test_slow_link_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.peers.relay.OUTBOX_MAX", 1 << 16)
    exchange = RelayRun()
    first, deaf, third = [await exchange.connect() for _ in range(3)]

    first.write([f"2:{'x' * 1000}"] * 100)
    end = await exchange.serving[1]

    assert end.reason == "peer stopped reading"
    with pytest.raises(LinkClosed):
        await deaf.receive()
    for other in (first, third):
        assert await other.receive() == ["2 left"]
    first.write(["2:to nobody", "3:to somebody"])
    assert await third.receive() == ["to somebody"]
    await exchange.close()


def test_unread_data_per_link_is_limited() -> None:
    assert OUTBOX_MAX == 16 << 20


async def test_bug_ends_only_the_link_that_triggers_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exchange = RelayRun()
    first, second = await exchange.connect(), await exchange.connect()

    with caplog.at_level(logging.ERROR):
        second.write(["bug"])
        end = await exchange.serving[1]

    assert end.reason == "internal error"
    assert "ZeroDivisionError" in caplog.text
    assert await first.receive() == ["2 left"]
    first.write(["1:still here"])
    assert await first.receive() == ["still here"]
    await exchange.close()


async def test_bug_about_a_closed_link_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exchange = RelayRun(FailingCloseRelay)
    await exchange.connect()

    with caplog.at_level(logging.ERROR):
        await exchange.close()

    assert "LookupError" in caplog.text
    assert exchange.serving[0].result().reason == "the end"


@in_virtual_time
async def test_relay_is_ticked_at_its_deadline() -> None:
    exchange = RelayRun()
    first = await exchange.connect()

    first.write(["tick"])

    assert await first.receive() == ["tick"]
    assert len(exchange.switch.ticks) == 1
    await exchange.close()


@in_virtual_time
async def test_paused_link_loses_nothing() -> None:
    exchange = RelayRun()
    first, second = await exchange.connect(), await exchange.connect()

    first.write(["pause"])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.write(["2:late"])
    second.write(["2:now"])

    assert await second.receive() == ["now"]
    assert await second.receive() == ["late"]
    await exchange.close()


async def test_stop_closes_all_links() -> None:
    exchange = RelayRun()
    links = [await exchange.connect() for _ in range(3)]

    exchange.switching.disconnect_all("the coordinator is stopping")
    ends = await asyncio.gather(*exchange.serving)

    assert {end.code for end in ends} == {1001}
    assert [await close_reason(link) for link in links] == [
        "the coordinator is stopping"
    ] * 3
    assert len(exchange.switching) == 0


async def test_cancelled_link_leaves_the_relay() -> None:
    exchange = RelayRun()
    await exchange.connect()

    exchange.serving[0].cancel()
    with suppress(asyncio.CancelledError):
        await exchange.serving[0]

    assert exchange.switch.left == [1]
    assert len(exchange.switching) == 0


class StandingRelay(NumberedRelay):
    """A relay machine whose first link has a certain standing."""

    first = RelayStanding.GUEST

    def standing(self, link: int) -> RelayStanding:
        return self.first if link == 1 else super().standing(link)


@pytest.mark.parametrize("standing", RelayStanding)
async def test_only_the_coordinator_is_served_beyond_the_loops_share(
    monkeypatch: pytest.MonkeyPatch, standing: RelayStanding
) -> None:
    monkeypatch.setattr(StandingRelay, "first", standing)
    exchange = RelayRun(StandingRelay)
    used = chain([0.0] * 2, count(0.0, 1000.0))  # seconds of CPU: then 1000 a turn
    clock = LoopClock()
    strangers = Strangers(share=LoopShare(clock, meter=lambda: next(used)))
    exchange.switching = RelayRunner(
        "test", exchange.switch, clock, strangers, lambda: next(used)
    )
    first, host = await exchange.connect(), await exchange.connect(is_host=True)
    first.write(["2:here"])  # the first turn is that of a stranger
    assert await host.receive() == ["here"]

    first.write(["2:one"])
    assert await host.receive() == ["one"]
    first.write(["2:two"])
    for number in range(10):  # more than it would take
        host.write([f"1:{number}"])
        assert await first.receive() == [str(number)]

    assert host.unread == 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await host.receive()
    await exchange.close()


@pytest.mark.parametrize("is_open", [True, False])
async def test_newcomers_to_an_open_relay_have_the_share_of_its_guests(
    is_open: bool,
) -> None:
    clock, exchange = ManualClock(), RelayRun()
    exchange.switch.is_open = is_open
    share = LoopShare(clock, 0.1, 1.0, clock.cpu)
    strangers = Strangers(share=share)
    exchange.switching = RelayRunner(
        "test", exchange.switch, clock, strangers, clock.cpu
    )
    first, second = await exchange.connect(), await exchange.connect()
    share.charge("192.0.2.9", 2.0)  # spent by strangers elsewhere

    first.write(["2:hello"])
    hearing = asyncio.create_task(second.receive())
    await settle()

    assert hearing.done() is is_open
    await clock.advance(11.0)
    assert await hearing == ["hello"]
    await exchange.close()


@pytest.mark.parametrize("is_host", [True, False], ids=["host", "peer"])
async def test_guest_pays_for_what_its_messages_cost_the_coordinator(
    is_host: bool,
) -> None:
    clock, exchange = ManualClock(), RelayRun()
    exchange.switching = RelayRunner(
        "test", exchange.switch, clock, Strangers(), clock.cpu
    )
    first, other = await exchange.connect(), await exchange.connect(is_host=is_host)
    first.write(["2:first"])  # read as that of a stranger
    assert await other.receive() == ["first"]
    paid = round(GUESTS_BURST / HOST_COSTS[RelayStanding.GUEST])
    first.write(["2:paid"] * (2 * paid))
    assert len(await other.receive()) == 2 * paid

    first.write(["2:later"])
    later = asyncio.create_task(other.receive())
    await clock.advance(0.0)

    assert later.done() is not is_host
    if is_host:
        await clock.advance(0.9 * GUESTS_BURST / GUESTS_SHARE)
        assert not later.done()
        await clock.advance(0.2 * GUESTS_BURST / GUESTS_SHARE)
    assert await later == ["later"]
    await exchange.close()


class CountedLink(LocalLink):
    """A link whose peer has an account, as those of WebSockets have."""

    def __init__(self, strangers: Strangers) -> None:
        super().__init__("peer")
        self.account = strangers.add("192.0.2.1", lambda reason: None)
        self.message_max: list[int | None] = []

    @property
    def is_stranger(self) -> bool:
        return True

    def write(self, packs: Sequence[Data]) -> None:
        pass  # nobody reads it

    def arrive(self, *messages: Data) -> None:
        """Let the relay receive messages of the peer."""
        super().write(messages)

    def admit(self) -> None:
        raise AssertionError("the relay admits nobody")

    def run(self, call: Callable[..., T], *args: object) -> T:
        return call(*args)

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        self.account.received(size)
        try:
            yield
        finally:
            self.account.released(size)

    def share_budget(
        self, strangers: Strangers, message_max: int | None = None
    ) -> None:
        self.message_max.append(message_max)
        self.account.move(strangers)


@pytest.mark.parametrize("standing", RelayStanding)
async def test_what_the_unadmitted_have_sent_counts_until_their_turn(
    monkeypatch: pytest.MonkeyPatch, standing: RelayStanding
) -> None:
    monkeypatch.setattr(StandingRelay, "first", standing)
    clock, exchange = ManualClock(), RelayRun(StandingRelay)
    share = LoopShare(clock, 0.1, 1.0, clock.cpu)
    strangers = Strangers(share=share)
    exchange.switching = RelayRunner(
        "test", exchange.switch, clock, strangers, clock.cpu
    )
    link = CountedLink(strangers)
    serving = exchange.switching.serve(link, UpgradeRequest("/x"))
    exchange.serving.append(asyncio.create_task(serving))
    share.charge("192.0.2.9", 2.0)  # of another one, who leaves nothing
    link.arrive("99:some", "99:more")
    await settle()

    assert (link.account.held, strangers.held) == (14, 14)

    await clock.advance(11.0)
    assert (link.account.held, strangers.held) == (0, 0)
    if standing is RelayStanding.GUEST:  # one of the guests, who have their own
        assert (len(strangers), link.message_max) == (0, [None])
    else:
        assert (len(strangers), link.message_max) == (1, [])
    await exchange.close()
