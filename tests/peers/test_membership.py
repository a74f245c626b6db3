"""The membership runner, in virtual time and over real sockets."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from gateway.serving import eventually
from harness.speed import scaled
from peers.dialled_peers import DialledPeers, open_session
from shoal.peers.membership import CHECK_INTERVAL, EXCHANGES_MAX, MembershipRunner
from shoal.peers.outbound import OutboundConnections
from shoal.protocols.seam.endpoints import (
    ListedNode,
    MembershipProber,
    OutgoingConnection,
    Probe,
)
from shoal.protocols.seam.session import Close, Send
from shoal.transports.clock import LoopClock
from shoal.transports.dialer import dial
from simulation import virtual
from transports.memory_links import ScriptedSession

TimedText = tuple[float, str]


@dataclass
class ScriptedMembership:
    """A membership prober with a script of exchanges by tick."""

    plan: list[Sequence[Probe | OutgoingConnection]]
    every: float | None = 1.0
    ticks: list[float] = field(default_factory=list)
    to_drop: list[OutgoingConnection] = field(default_factory=list)
    over: list[TimedText] = field(default_factory=list)
    rows: list[ListedNode] = field(default_factory=list)
    due: float | None = None

    @property
    def deadline(self) -> float | None:
        if self.due is not None or self.every is None:
            return self.due
        return self.ticks[-1] + self.every if self.ticks else 0.0

    def tick(self, now: float) -> Sequence[Probe | OutgoingConnection]:
        self.due = None
        self.ticks.append(now)
        return self.plan.pop(0) if self.plan else ()

    def dropped(self) -> Sequence[OutgoingConnection]:
        dropped, self.to_drop = self.to_drop, []
        return dropped

    def nodes(self) -> Sequence[ListedNode]:
        return self.rows

    def exchange(
        self, url: str, open: Callable[[float], Any] = open_session, within: float = 2.0
    ) -> Probe:
        return Probe(
            OutgoingConnection(url, open),
            within,
            lambda why, now: self.over.append((now, why)),
        )


@asynccontextmanager
async def running(
    rounds: ScriptedMembership, peers: DialledPeers
) -> AsyncIterator[MembershipRunner]:
    assert isinstance(rounds, MembershipProber)
    async with asyncio.TaskGroup() as tasks:
        calls = peers.connections()
        run = MembershipRunner("wire", rounds, calls, peers.dial, LoopClock(), tasks)
        walking = tasks.create_task(run.run())
        try:
            yield run
        finally:
            walking.cancel()
            calls.stop()
            for each in [*run.connections]:
                each.cancel()


def made(rounds: ScriptedMembership, peers: DialledPeers, seconds: float) -> None:
    """Run the prober for ``seconds``."""

    async def test() -> None:
        async with running(rounds, peers):
            await asyncio.sleep(seconds)

    virtual.run(test())


def test_ticks_come_at_their_deadlines() -> None:
    rounds = ScriptedMembership([])
    made(rounds, DialledPeers(), 3.5)

    assert rounds.ticks == pytest.approx([0.0, 1.0, 2.0, 3.0], abs=0.05)


def test_changed_deadline_is_noticed() -> None:
    rounds = ScriptedMembership([], every=None)

    async def test() -> None:
        async with running(rounds, DialledPeers()):
            await asyncio.sleep(5.0)
            rounds.due = 5.5
            await asyncio.sleep(5.0)

    virtual.run(test())

    assert len(rounds.ticks) == 2
    assert 5.5 <= rounds.ticks[1] <= 5.5 + CHECK_INTERVAL


def test_unreachable_node_is_reported_once_at_once() -> None:
    rounds = ScriptedMembership([])
    rounds.plan = [[rounds.exchange("tcp://far:1")]]
    made(rounds, DialledPeers(), 5.0)

    ((when, why),) = rounds.over
    assert when < 0.1
    assert "connection refused" in why


def test_timeout_of_an_exchange_is_reported() -> None:
    rounds = ScriptedMembership([])
    rounds.plan = [[rounds.exchange("tcp://far:1", within=2.0)]]
    made(rounds, DialledPeers(lambda: 60.0), 5.0)

    ((when, why),) = rounds.over
    assert 2.0 <= when <= 2.1
    assert why == "no answer from tcp://far:1 within 2 s"


def test_exchanges_run_concurrently_within_a_limit() -> None:
    rounds = ScriptedMembership([])
    many = [
        rounds.exchange(f"tcp://far:{n}", within=2.0) for n in range(2 * EXCHANGES_MAX)
    ]
    rounds.plan = [many]
    peers = DialledPeers(lambda: 60.0)
    made(rounds, peers, 10.0)

    begun = [when for when, _ in peers.calls]
    assert [sum(when < 1.0 for when in begun), len(begun)] == [EXCHANGES_MAX, len(many)]
    assert len(rounds.over) == len(many)


def test_end_of_an_exchange_is_processed() -> None:
    rounds = ScriptedMembership([], every=10.0)

    def over(why: str, now: float) -> None:
        rounds.due = now

    exchange = Probe(OutgoingConnection("tcp://far:1", open_session), 2.3, over)
    rounds.plan = [[exchange]]
    made(rounds, DialledPeers(lambda: 60.0), 5.0)

    assert rounds.ticks[:2] == pytest.approx([0.0, 2.3], abs=0.05)


def test_cut_exchange_is_reported() -> None:
    rounds = ScriptedMembership([])
    rounds.plan = [[rounds.exchange("tcp://far:1", within=60.0)]]
    made(rounds, DialledPeers(lambda: 60.0), 1.0)

    assert [why for _, why in rounds.over] == ["cut off"]


def test_bug_in_an_exchange_is_contained(caplog: pytest.LogCaptureFixture) -> None:
    def broken(now: float) -> Any:
        raise RuntimeError("a bug")

    rounds = ScriptedMembership([])
    rounds.plan = [[rounds.exchange("tcp://far:1", broken)]]
    made(rounds, DialledPeers(lambda: 60.0), 3.5)

    assert [why for _, why in rounds.over] == ["internal error"]
    assert len(rounds.ticks) == 4
    assert "a bug" in caplog.text


def test_connection_is_maintained_until_dropped() -> None:
    outgoing = OutgoingConnection("tcp://far:1", open_session)
    rounds, peers = ScriptedMembership([[outgoing]]), DialledPeers(lambda: 1.0)

    async def test() -> None:
        async with running(rounds, peers) as run:
            await asyncio.sleep(60.0)
            assert peers.served > 2
            assert len(run.connections) == 1
            rounds.to_drop.append(outgoing)
            await asyncio.sleep(5.0)
            served = peers.served
            assert not run.connections
            await asyncio.sleep(60.0)
            assert peers.served == served

    virtual.run(test())


def test_change_of_a_nodes_state_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rounds = ScriptedMembership([], rows=[ListedNode("b", "192.0.2.1:5", "alive", 0.0)])

    async def test() -> None:
        async with running(rounds, DialledPeers()):
            await asyncio.sleep(3.0)
            rounds.rows = [ListedNode("b", "192.0.2.1:5", "failed", 3.0, note="why")]
            await asyncio.sleep(3.0)

    with caplog.at_level(logging.INFO):
        virtual.run(test())

    assert [record.getMessage() for record in caplog.records] == [
        "node wire=wire name='b' address=192.0.2.1:5 state='alive' remark=''",
        "node wire=wire name='b' address=192.0.2.1:5 state='failed' remark='why'",
    ]


def test_configured_address_without_an_answer_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unanswered = ListedNode("", "192.0.2.1:5", "no answer", 0.0, note="refused")
    membership = ScriptedMembership([], rows=[unanswered])

    async def test() -> None:
        async with running(membership, DialledPeers()):
            await asyncio.sleep(3.0)

    with caplog.at_level(logging.WARNING):
        virtual.run(test())

    (message,) = caplog.messages
    assert "192.0.2.1:5 state='no answer' remark='refused'" in message


def test_own_node_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rounds = ScriptedMembership([], rows=[ListedNode("us", "", "here", 0.0)])

    async def test() -> None:
        async with running(rounds, DialledPeers()):
            await asyncio.sleep(3.0)

    with caplog.at_level(logging.INFO):
        virtual.run(test())

    assert caplog.messages == []


async def test_exchange_works_over_a_real_socket() -> None:
    async def answer(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(b"to " + await reader.readline())
        await writer.drain()
        await reader.read()
        writer.close()

    heard: list[Any] = []

    def asking(now: float) -> Any:
        def hear(data: Any) -> Any:
            heard.append(data)
            return [Close("answered")]

        return ScriptedSession(hear, opening=[Send(b"you\n")])

    async with (
        asyncio.timeout(scaled(20)),
        await asyncio.start_server(answer, "127.0.0.1") as server,
    ):
        port = server.sockets[0].getsockname()[1]
        rounds = ScriptedMembership([])
        rounds.plan = [[rounds.exchange(f"tcp://127.0.0.1:{port}", asking)]]
        async with asyncio.TaskGroup() as tasks:
            calls = OutboundConnections(
                DialledPeers().serve, dial, LoopClock(), Random(1)
            )
            run = MembershipRunner("wire", rounds, calls, dial, LoopClock(), tasks)
            walking = tasks.create_task(run.run())
            await eventually(lambda: bool(rounds.over))
            walking.cancel()

    assert heard == [b"to you\n"]
    assert [why for _, why in rounds.over] == ["answered"]
