"""Connections of one worker each, from start to end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import pytest

from coordinator.hubs import run_pending, running_coordinator
from peers.scripted_peers import PeerCoordinator, accept_peers
from shoal.coordinator.admission import REVOKED
from shoal.domain.credentials import JoinToken, digest_of
from shoal.domain.facts import Fact, JobLeased, LateResult, WorkerLeft
from shoal.domain.ids import WorkerId
from shoal.domain.vocabulary import Completed, Dismiss, Joined, RunJob
from shoal.domain.work import JobKind
from shoal.domain.worker import Offer, Suspension
from shoal.peers.connections import REPLACED
from shoal.pool.inputs import WorkerResumption, WorkerSuspension
from shoal.protocols.seam.admission import NO_JOIN_TOKEN, AdmissionGrant
from shoal.protocols.seam.session import CloseCode, Data, Send
from shoal.protocols.seam.sole_worker import SoleWorkerSession
from shoal.transports.driver import ConnectionEnd
from shoal.transports.link import LinkClosed
from simulation import virtual
from simulation.virtual import scripted
from transports.memory_links import MemoryLink, ScriptedSession, silent

NAME = "w/a 100% name"
WORKER = WorkerId(f"wire:{NAME}")
JOINED = Joined(NAME, Offer(frozenset({JobKind.CHAT}), frozenset({"m"})))
TOKEN = JoinToken("t1", "fleet", digest_of("secret"), 0.0)
ADMITTED = AdmissionGrant("t1", "wire:w")


class TextSession(ScriptedSession):
    """A session that sends commands as plain text."""

    grant = NO_JOIN_TOKEN

    def send(self, message: object, now: float) -> Sequence[Send]:
        text = message.reason if isinstance(message, Dismiss) else ""
        return [Send(f"{type(message).__name__} {text}".strip())]


def raise_bug(data: Data) -> Sequence[object]:
    raise ZeroDivisionError("a bug")


def connect(
    peers: PeerCoordinator,
    link: MemoryLink,
    answer: Callable[[Data], Sequence[object]] = silent,
    grant: AdmissionGrant = NO_JOIN_TOKEN,
) -> "asyncio.Task[ConnectionEnd]":
    worker = TextSession(answer, opening=[JOINED])
    worker.grant = grant
    session = SoleWorkerSession(worker)
    return asyncio.create_task(peers.connections.serve("wire", session, link))


def play(
    script: Callable[[PeerCoordinator], Awaitable[None]], *tokens: JoinToken
) -> None:
    async def scenario() -> None:
        async with running_coordinator() as coordinator:
            keys = coordinator.store.keys
            for token in tokens:
                await keys.tokens.add(token)
            await script(await accept_peers(coordinator, keys=keys))

    virtual.run(scenario())


def recorded(peers: PeerCoordinator) -> list[Fact]:
    """Return a list that receives all later facts."""
    facts: list[Fact] = []
    peers.coordinator.hub.subscribe(facts.extend)
    return facts


@scripted(play)
async def test_worker_is_in_the_pool_while_connected(peers: PeerCoordinator) -> None:
    link = MemoryLink()
    serving = connect(peers, link)
    await run_pending()
    assert peers.workers == [WORKER]
    assert peers.coordinator.hub.peer_route_of(WORKER) is None
    await peers.coordinator.request()
    assert link.sent == [RunJob.__name__]

    link.cut(LinkClosed("closed by peer: 1000", 1000))
    await serving
    await run_pending()

    assert not peers.workers


def test_bug_in_a_session_ends_its_connection_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def script(peers: PeerCoordinator) -> None:
        link, facts = MemoryLink(), recorded(peers)
        serving = connect(peers, link, raise_bug)
        other = await peers.coordinator.join("other")
        link.deliver("boom")

        await serving
        await run_pending()

        assert peers.workers == ["wire:other"]
        assert (1011, "internal error") in link.closed
        assert WorkerLeft(WORKER, "internal error") in facts
        await peers.coordinator.request()
        assert len(other.runs) == 1

    with caplog.at_level(logging.INFO, "shoal.peers"):
        play(script)

    said = [record.getMessage().split()[0] for record in caplog.records]
    assert said == ["connected", "broken", "disconnected"]


@scripted(play)
async def test_newer_connection_of_a_worker_replaces_the_older(
    peers: PeerCoordinator,
) -> None:
    older, newer, facts = MemoryLink(), MemoryLink(), recorded(peers)
    connect(peers, older)
    await run_pending()

    connect(peers, newer)
    await run_pending()
    await peers.coordinator.request()

    assert older.sent == [f"Dismiss {REPLACED}"]
    assert newer.sent == [RunJob.__name__]
    assert WorkerLeft(WORKER, REPLACED) in facts


@scripted(play)
async def test_removed_worker_is_refused_until_it_is_resumed(
    peers: PeerCoordinator,
) -> None:
    hub, facts = peers.coordinator.hub, recorded(peers)
    await hub.process(WorkerSuspension("wire:w", Suspension.REMOVED, "al"))
    facts.clear()
    refused, admitted = MemoryLink(), MemoryLink()

    connect(peers, refused)
    await run_pending()

    assert refused.sent == [
        "Dismiss removed by an operator; `shoal nodes resume wire:w` at the "
        "coordinator admits it again"
    ]
    assert facts == []  # some workers come back every few seconds
    assert peers.workers == []
    await hub.process(WorkerResumption("wire:w", "al"))
    connect(peers, admitted)
    await run_pending()
    assert peers.workers == [WORKER]


@scripted(play)
async def test_result_of_a_lease_of_an_earlier_connection_is_recorded(
    peers: PeerCoordinator,
) -> None:
    facts = recorded(peers)
    late: list[object] = []
    connect(peers, MemoryLink())
    await run_pending()
    client = await peers.coordinator.request()
    newer = MemoryLink()
    connect(peers, newer, lambda data: late)
    await run_pending()
    first, second = [each for each in facts if isinstance(each, JobLeased)]

    late.append(Completed(first.job_id, first.lease))
    newer.deliver("late")
    await run_pending()

    assert LateResult(first.job_id, first.lease, WORKER, "completed") in facts
    assert second.lease != first.lease
    assert not client.task.done()


def test_revoked_token_closes_the_connection_with_its_code() -> None:
    async def script(peers: PeerCoordinator) -> None:
        link = MemoryLink()
        serving = connect(peers, link, grant=ADMITTED)
        await run_pending()
        assert peers.workers == [WORKER]
        assert peers.admission.count_connected(TOKEN) == 1

        await peers.admission.revoke(TOKEN)
        await serving
        await run_pending()

        assert link.closed == [(CloseCode.POLICY_VIOLATION, REVOKED)]
        assert not peers.workers

    play(script, TOKEN)


def test_worker_whose_token_was_revoked_while_it_connected_is_refused() -> None:
    async def script(peers: PeerCoordinator) -> None:
        link = MemoryLink()
        await peers.admission.revoke(TOKEN)

        await connect(peers, link, grant=ADMITTED)

        assert link.closed == [(CloseCode.POLICY_VIOLATION, REVOKED)]
        assert not peers.workers

    play(script, TOKEN)


@scripted(play)
async def test_stop_closes_connections_that_have_not_joined(
    peers: PeerCoordinator,
) -> None:
    link = MemoryLink()
    session = SoleWorkerSession(TextSession())
    serving = asyncio.create_task(peers.connections.serve("wire", session, link))
    await run_pending()

    peers.connections.disconnect_all("stopping")
    await serving

    assert link.closed == [(CloseCode.GOING_AWAY, "stopping")]
