"""Connections with several peers, whose models are workers of the pool."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from coordinator.hubs import run_pending, running_coordinator
from peers.scripted_peers import (
    ACCEPTED,
    PeerCoordinator,
    ScriptedConnection,
    ScriptedPeerSession,
    accept_peers,
    offer,
    requested_chat,
)
from shoal.coordinator.admission import REVOKED
from shoal.coordinator.connections import PeerRoute
from shoal.domain.credentials import JoinToken, digest_of
from shoal.domain.errors import StoreError
from shoal.domain.facts import JobLeased, WorkerJoined
from shoal.domain.ids import WorkerId
from shoal.domain.model_messages import ModelAnswer, ModelMessage, ModelQuery
from shoal.domain.vocabulary import (
    CancelJob,
    Completed,
    Dismiss,
    Draining,
    HealthReported,
    LoadChanged,
    OffersChanged,
    Rejected,
    RunJob,
)
from shoal.domain.work import Feature, JobKind, ModelAction, ModelOrder, Shard
from shoal.domain.worker import (
    Hardware,
    LentShard,
    LoadableModel,
    MachineHealth,
    MeasuredLink,
    MemoryLoan,
    ModelLibrary,
    Offer,
    Suspension,
    WorkerLoad,
)
from shoal.peers.connections import ANNOUNCE_INTERVAL, RENAME
from shoal.peers.inbound_jobs import WaitForRoom
from shoal.peers.peer_directory import PROFILES_MAX, REFUSED_MAX
from shoal.peers.peer_models import NAME_MAX
from shoal.peers.remote_peer import MAY_NOT_SUBMIT, PENDING_MAX
from shoal.pool.inputs import WorkerApproval, WorkerResumption, WorkerSuspension
from shoal.protocols.seam.admission import AdmissionGrant
from shoal.protocols.seam.peer_session import (
    ALL_PEERS,
    PeerDescribed,
    PeerJoined,
    PeerLeft,
    PeerRefused,
    Protection,
)
from shoal.protocols.seam.session import UNDESCRIBED, CloseCode, PeerProfile
from shoal.store.sql.keys import SqlKeys
from simulation import virtual
from simulation.virtual import in_virtual_time, scripted
from transports.memory_links import MemoryLink

CONTINUES = frozenset({Feature.CONTINUE})
MODELS = frozenset({JobKind.MODEL})
QWEN = LoadableModel("qwen3", 2_000_000_000, context=8192, cache=1000)


def play(
    script: Callable[[PeerCoordinator, ScriptedConnection], Awaitable[None]],
) -> None:
    """Run a script with a connection without peers, in virtual time."""

    async def scenario() -> None:
        async with running_coordinator() as coordinator:
            peers = await accept_peers(coordinator)
            await script(peers, await peers.connect())

    virtual.run(scenario())


def library_of(*models: LoadableModel) -> Offer:
    return Offer(MODELS, library=ModelLibrary(models))


async def send(line: ScriptedConnection, peer: str, *words: object) -> None:
    line.emit(peer, *words)  # type: ignore[arg-type]  # words of either kind
    await run_pending()


# Peers.


@scripted(play)
async def test_each_model_of_each_peer_is_a_worker(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await send(line, "a", PeerJoined("mac"), OffersChanged((offer("m"), offer("n"))))
    await send(line, "b", PeerJoined("a/b%"), OffersChanged((offer("m"),)))

    assert peers.workers == ["wire:a%2Fb%25/m", "wire:mac/m", "wire:mac/n"]

    await send(line, "a", PeerLeft("relay says so"))

    assert peers.workers == ["wire:a%2Fb%25/m"]
    await line.end()
    assert peers.workers == []


@scripted(play)
async def test_an_offer_of_many_models_is_one_worker_whose_name_is_cut(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    names = [letter * 100 for letter in "abcd"]
    await send(line, "a", PeerJoined("mac"), OffersChanged((offer(*names),)))

    assert peers.workers == [f"wire:mac/{names[0]},{names[1]},+2"]
    for name in names:
        await peers.coordinator.request(name)
    assert len(line.received("a", RunJob)) == 1
    line.complete("a")
    await run_pending()
    assert len(line.received("a", RunJob)) == 2


@scripted(play)
async def test_refused_peers_are_listed_until_they_leave_or_join(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    directory = peers.connections.directory
    other = await peers.connect()
    for key in "abc":
        await send(line, key, PeerRefused(key, f"why {key}"))
    await send(other, "d", PeerRefused("d", "why d"))
    listed = {f"wire:{each}": f"why {each}" for each in "abcd"}
    assert directory.refusals == listed

    await send(line, "a", PeerLeft("bye"))
    await send(line, "b", PeerJoined("b"))
    assert [*directory.refusals] == ["wire:c", "wire:d"]
    await line.end()
    assert [*directory.refusals] == ["wire:d"]
    for number in range(REFUSED_MAX):
        await send(other, str(number), PeerRefused(str(number), "why"))
    assert len(directory.refusals) == REFUSED_MAX
    assert "wire:d" not in directory.refusals
    assert peers.workers == []


def test_peers_are_described_and_their_descriptions_outlive_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    studio = PeerProfile("Studio", Hardware("Apple M2 Pro", memory_gb=32.0, tier=2))

    async def script(peers: PeerCoordinator, line: ScriptedConnection) -> None:
        directory = peers.connections.directory
        await send(line, "a", PeerJoined("ab"), PeerDescribed(studio))
        await send(line, "b", PeerRefused("cd", "why"), PeerDescribed(studio))
        await send(line, "c", PeerDescribed(studio))  # unknown
        for _ in range(3):
            await send(line, "a", PeerDescribed(studio))
        assert list(directory.connected) == ["wire:ab"]

        await line.end()

        assert list(directory.connected) == []
        assert directory.profile_of("wire:ab") == studio
        assert directory.profile_of("wire:cd") == studio
        for number in range(PROFILES_MAX):
            directory.describe(str(number), studio)
        assert directory.profile_of("wire:ab") is UNDESCRIBED

    with caplog.at_level(logging.INFO, "shoal.peers"):
        play(script)

    lines = [each for each in caplog.messages if each.startswith("described")]
    machine = "name='Studio' chip='Apple M2 Pro' memory_gb=32.0"
    assert lines == [
        f"described peer='wire:{name}' {machine} tier=2" for name in ("ab", "cd")
    ]


@scripted(play)
async def test_messages_of_unknown_peers_are_ignored(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await send(line, "a", OffersChanged((offer(),)), requested_chat(), PeerLeft("bye"))

    assert peers.workers == []
    assert line.received("a", object) == []


@scripted(play)
async def test_newer_peer_replaces_its_namesake(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    other = await peers.connect()
    await send(line, "a", PeerJoined("mac"), OffersChanged((offer("m"), offer("n"))))
    client = await peers.coordinator.request("n")
    line.write("a", "half")
    await run_pending()

    await send(other, "z", PeerJoined("mac"), OffersChanged((offer("n"),)))

    assert line.received("a", Dismiss) == [Dismiss(RENAME, replaced=True)]
    assert peers.workers == ["wire:mac/n"]
    (run,) = other.received("z", RunJob)
    assert run.lease == 2
    await send(line, "a", OffersChanged((offer("o"),)))
    assert peers.workers == ["wire:mac/n"]
    other.write("z", "half", " and whole")
    other.complete("z")
    await run_pending()
    assert client.text == "half and whole"


@scripted(play)
async def test_peer_without_models_is_replaced_as_well(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await send(line, "a", PeerJoined("mac", submits_jobs=True))
    await send(line, "b", PeerJoined("mac", submits_jobs=True))

    assert len(line.received("a", Dismiss)) == 1
    assert line.received("b", Dismiss) == []


async def suspend(peers: PeerCoordinator, name: str, how: Suspension) -> None:
    await peers.coordinator.hub.process(WorkerSuspension(name, how, "al"))
    await run_pending()


@scripted(play)
async def test_removed_peer_leaves_with_all_its_models_and_may_not_rejoin(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    models = OffersChanged((offer("m"), offer("n")))
    await send(line, "a", PeerJoined("a/b", cancels=True), models)
    client = await peers.coordinator.request("n")
    await send(line, "b", PeerJoined("mac"), OffersChanged((offer("n"),)))

    await suspend(peers, "wire:a%2Fb", Suspension.REMOVED)

    assert peers.workers == ["wire:mac/n"]
    (dismissal,) = line.received("a", Dismiss)
    assert dismissal.reason.startswith("removed by an operator")
    line.complete("b")
    await run_pending()
    assert client.outcome is not None
    await send(line, "a", PeerJoined("a/b"), models)
    assert line.received("a", Dismiss) == [dismissal, dismissal]
    assert peers.workers == ["wire:mac/n"]

    await peers.coordinator.hub.process(WorkerResumption("wire:a%2Fb", "al"))
    await send(line, "a", PeerJoined("a/b"), models)
    assert peers.workers == ["wire:a%2Fb/m", "wire:a%2Fb/n", "wire:mac/n"]


@scripted(play)
async def test_drained_peer_stays_and_may_come_back(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    models = OffersChanged((offer("m"),))
    await send(line, "a", PeerJoined("mac"), models)
    client = await peers.coordinator.request("m")

    await suspend(peers, "wire:mac", Suspension.DRAINING)
    line.complete("a", 0)
    await run_pending()
    assert client.outcome is not None
    await send(line, "a", PeerLeft("reset"))
    await send(line, "a", PeerJoined("mac"), models)

    assert line.received("a", Dismiss) == []
    assert peers.workers == ["wire:mac/m"]
    assert peers.coordinator.hub.pool.is_drained(WorkerId("wire:mac/m"))


@scripted(play)
async def test_one_model_of_a_peer_is_removed_without_its_connection(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await send(line, "a", PeerJoined("mac"), OffersChanged((offer("m"), offer("n"))))

    await suspend(peers, "wire:mac/m", Suspension.REMOVED)
    waiting = await peers.coordinator.request("m")
    await peers.coordinator.request("n")

    (run,) = line.received("a", RunJob)
    assert run.work.model == "n"
    assert not waiting.task.done()
    assert line.received("a", Dismiss) == []
    # It is offered again, and still gets nothing.
    await send(line, "a", OffersChanged((offer("n"),)))
    await send(line, "a", OffersChanged((offer("m"), offer("n"))))
    assert len(line.received("a", RunJob)) == 1


@scripted(play)
async def test_rejoined_peer_is_not_dismissed(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await send(line, "a", PeerJoined("mac"), OffersChanged((offer("m"),)))

    await send(line, "a", PeerJoined("mac"), OffersChanged((offer("n"),)))

    assert line.received("a", Dismiss) == []
    assert peers.workers == ["wire:mac/n"]


@scripted(play)
async def test_one_name_on_two_wires_is_two_peers(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    other = await peers.connect("other")
    await send(line, "a", PeerJoined("mac"), OffersChanged((offer(),)))
    await send(other, "a", PeerJoined("mac"), OffersChanged((offer(),)))

    assert peers.workers == ["other:mac/m", "wire:mac/m"]


@pytest.mark.parametrize("name", ["", "x" * (NAME_MAX + 1)], ids=["none", "long"])
def test_peer_with_an_invalid_name_is_dismissed(name: str) -> None:
    async def script(peers: PeerCoordinator, line: ScriptedConnection) -> None:
        await send(line, "a", PeerJoined(name), OffersChanged((offer(),)))

        (dismiss,) = line.received("a", Dismiss)
        assert "1 to 256 characters" in dismiss.reason
        assert peers.workers == []

    play(script)


def test_number_of_peers_per_connection_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.peers.connections.PEERS_MAX", 10)

    async def script(peers: PeerCoordinator, line: ScriptedConnection) -> None:
        for number in range(11):
            line.emit(str(number), PeerJoined(f"peer {number}"))
        await run_pending()

        assert line.received("9", Dismiss) == []
        (dismiss,) = line.received("10", Dismiss)
        assert "10 peers" in dismiss.reason

    play(script)


def test_bug_in_a_session_ends_its_connection_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def script(peers: PeerCoordinator, line: ScriptedConnection) -> None:
        other = await peers.connect()
        await send(line, "a", PeerJoined("mac"), OffersChanged((offer(),)))
        await send(other, "a", PeerJoined("pc"), OffersChanged((offer(),)))

        line.fail(ZeroDivisionError("a bug"))
        end = await line.serving
        await run_pending()

        assert end.reason == "internal error"
        assert line.link.closed[0] == (1011, "internal error")
        assert peers.workers == ["wire:pc/m"]

    with caplog.at_level(logging.INFO, "shoal.peers"):
        play(script)

    said = [record.getMessage().split()[0] for record in caplog.records]
    assert said.count("broken") == 1


def test_names_of_peers_cannot_forge_log_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def script(peers: PeerCoordinator, line: ScriptedConnection) -> None:
        await send(
            line, "a", PeerJoined("mac\nfact=Forged"), OffersChanged((offer("x\ny"),))
        )
        await send(line, "a", PeerLeft("a\nb"))

    with caplog.at_level(logging.DEBUG, "shoal"):
        play(script)

    assert not any("\n" in record.getMessage() for record in caplog.records)


# Offers.


@scripted(play)
async def test_models_follow_the_offers(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await send(line, "a", PeerJoined("mac"), OffersChanged((offer("m"), offer("n"))))

    await send(line, "a", OffersChanged((offer("n"), offer("o"))))

    assert peers.workers == ["wire:mac/n", "wire:mac/o"]


@scripted(play)
async def test_changed_idle_model_rejoins_at_once(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await send(line, "a", PeerJoined("mac"), OffersChanged((offer(),)))
    joined: list[object] = []
    peers.coordinator.hub.subscribe(joined.extend)

    await send(line, "a", OffersChanged((offer(),)))
    assert joined == []  # because nothing has changed
    await send(line, "a", OffersChanged((offer(slots=3),)))

    (worker,) = peers.coordinator.hub.pool.workers.values()
    assert worker.offer.slots == 3
    assert sum(isinstance(each, WorkerJoined) for each in joined) == 1


@scripted(play)
async def test_changed_busy_model_rejoins_when_idle(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await send(line, "a", PeerJoined("mac"), OffersChanged((offer(),)))
    client = await peers.coordinator.request()

    await send(line, "a", OffersChanged((offer(slots=3),)))
    (worker,) = peers.coordinator.hub.pool.workers.values()
    assert worker.offer.slots == 1
    line.write("a", "whole")
    line.complete("a")
    await run_pending()

    assert client.text == "whole"
    (worker,) = peers.coordinator.hub.pool.workers.values()
    assert worker.offer.slots == 3


@scripted(play)
async def test_unloaded_model_finishes_and_drains(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await send(line, "a", PeerJoined("mac"), OffersChanged((offer(slots=2),)))
    first = await peers.coordinator.request()

    await send(line, "a", OffersChanged(()))
    second = await peers.coordinator.request()
    assert len(line.received("a", RunJob)) == 1
    line.complete("a")
    await run_pending()

    assert first.outcome is not None
    assert peers.workers == []
    await send(line, "a", OffersChanged((offer(),)))
    assert len(line.received("a", RunJob)) == 2
    line.complete("a")
    await run_pending()
    assert second.outcome is not None


@scripted(play)
async def test_reloaded_model_stays(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await send(line, "a", PeerJoined("mac"), OffersChanged((offer(),)))
    await peers.coordinator.request()
    await send(line, "a", OffersChanged(()))
    await send(line, "a", OffersChanged((offer(),)))
    await send(line, "a", OffersChanged(()))
    await send(line, "a", OffersChanged((offer(),)))

    line.complete("a")
    await run_pending()

    (worker,) = peers.coordinator.hub.pool.workers.values()
    assert not worker.draining
    second = await peers.coordinator.request()
    line.complete("a")
    await run_pending()
    assert second.outcome is not None


def test_offers_beyond_the_limits_are_ignored(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.peers.peer_models.MODELS_MAX", 10)

    async def script(peers: PeerCoordinator, line: ScriptedConnection) -> None:
        many = tuple(offer(f"m{number}") for number in range(15))
        twice = (offer("x"), offer("x"), offer("y" * (NAME_MAX + 1)))
        await send(line, "a", PeerJoined("mac"), OffersChanged(many))
        await send(line, "b", PeerJoined("pc"), OffersChanged(twice))

        assert len(peers.workers) == 11
        assert "wire:pc/x" in peers.workers

    play(script)

    assert any("offers=5" in record.getMessage() for record in caplog.records)


@scripted(play)
async def test_offer_without_models_has_the_name_of_its_peer(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await send(line, "a", PeerJoined("mac"), OffersChanged((offer("m"),)))
    await send(line, "a", OffersChanged((replace(offer(), models=frozenset()),)))

    assert peers.workers == ["wire:mac"]


@scripted(play)
async def test_load_of_a_peer_applies_to_all_its_models(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    hot = LoadChanged(WorkerLoad("is too hot"))
    await send(
        line, "a", PeerJoined("mac"), OffersChanged((offer("m"), offer("n"))), hot
    )
    client = await peers.coordinator.request("n")
    await send(line, "a", OffersChanged((offer("m"), offer("n"), offer("o"))))

    assert line.received("a", RunJob) == []
    conditions = [w.load for w in peers.coordinator.hub.pool.workers.values()]
    assert conditions == [WorkerLoad("is too hot")] * 3

    await send(line, "a", LoadChanged(WorkerLoad(speed=0.5)))
    await asyncio.sleep(1.0)
    assert len(line.received("a", RunJob)) == 1
    line.complete("a")
    await run_pending()
    assert client.outcome is not None


@scripted(play)
async def test_job_of_one_model_raises_the_cost_of_the_others(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await send(line, "a", PeerJoined("mac"), OffersChanged((offer("m"), offer("n"))))
    await send(line, "b", PeerJoined("pc"), OffersChanged((offer("n"),)))
    await peers.coordinator.request("m")
    workers = peers.coordinator.hub.pool.workers

    await peers.coordinator.request("n")

    assert len(line.received("b", RunJob)) == 1
    queued = {name: each.load.queued for name, each in workers.items()}
    assert queued == {"wire:mac/m": 0, "wire:mac/n": 1, "wire:pc/n": 0}
    line.complete("a")
    await asyncio.sleep(1.0)
    assert [each.load.queued for each in workers.values()] == [0, 0, 0]


@scripted(play)
async def test_busy_peer_gets_a_second_job_if_no_other_is_free(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await send(line, "a", PeerJoined("mac"), OffersChanged((offer("m"), offer("n"))))
    await peers.coordinator.request("m")
    await peers.coordinator.request("n")
    await peers.coordinator.request("n")

    assert [run.work.model for run in line.received("a", RunJob)] == ["m", "n"]


@scripted(play)
async def test_drain_and_health_of_a_peer_apply_to_all_its_models(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await send(line, "a", PeerJoined("mac"), OffersChanged((offer("m"), offer("n"))))
    await send(
        line, "a", HealthReported(MachineHealth(cpu=50.0)), Draining("going home")
    )
    await send(line, "a", OffersChanged((offer("m"), offer("n"), offer("o"))))

    draining = [w.draining for w in peers.coordinator.hub.pool.workers.values()]
    assert draining == ["going home"] * 3
    assert peers.coordinator.hub.health[WorkerId("wire:mac/n")].cpu == 50.0


# Jobs at peers.


@scripted(play)
async def test_takeover_from_a_peer_has_no_gap(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await send(
        line, "a", PeerJoined("mac"), OffersChanged((offer(features=CONTINUES),))
    )
    client = await peers.coordinator.request()
    line.write("a", "one ", "two ")
    await send(line, "b", PeerJoined("pc"), OffersChanged((offer(features=CONTINUES),)))

    await send(line, "a", PeerLeft("silent for 30 s"))
    (run,) = line.received("b", RunJob)
    assert run.continues == "one two "
    line.write("b", "three")
    line.complete("b")
    await run_pending()

    assert client.text == "one two three"


@scripted(play)
async def test_client_disconnect_cancels_the_job_at_the_peer(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await send(
        line, "a", PeerJoined("shoal", cancels=True), OffersChanged((offer("m"),))
    )
    await send(line, "b", PeerJoined("mac"), OffersChanged((offer("n"),)))
    one, two = (
        await peers.coordinator.request("m"),
        await peers.coordinator.request("n"),
    )

    await one.disconnect()
    await two.disconnect()

    assert len(line.received("a", CancelJob)) == 1
    assert line.received("b", CancelJob) == []
    busy = {w.id: len(w.leases) for w in peers.coordinator.hub.pool.workers.values()}
    assert busy == {"wire:shoal/m": 0, "wire:mac/n": 1}
    line.complete("b")  # it was not cancelled, so it completes the job
    line.complete("a")  # it had just completed it
    await run_pending()
    assert not any(w.leases for w in peers.coordinator.hub.pool.workers.values())


@scripted(play)
async def test_peer_cannot_end_the_job_of_another(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await send(line, "a", PeerJoined("mac"), OffersChanged((offer("m"),)))
    await send(line, "b", PeerJoined("eve"), OffersChanged((offer("n"),)))
    client = await peers.coordinator.request("m")
    (run,) = line.received("a", RunJob)

    await send(line, "b", Completed(run.job_id, run.lease))

    assert client.outcome is None
    line.write("a", "right")
    line.complete("a")
    await run_pending()
    assert client.text == "right"


@scripted(play)
async def test_rejected_job_goes_to_another_peer(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await send(line, "a", PeerJoined("mac"), OffersChanged((offer(),)))
    client = await peers.coordinator.request()
    await send(line, "b", PeerJoined("pc"), OffersChanged((offer(),)))
    (run,) = line.received("a", RunJob)

    await send(line, "a", Rejected(run.job_id, run.lease, "queue_full"))
    line.write("b", "whole")
    line.complete("b")
    await run_pending()

    assert client.text == "whole"


# Tokens.


async def token(peers: PeerCoordinator, uses_max: int | None = None) -> JoinToken:
    made = JoinToken("t1", "lab", digest_of("secret"), 0.0, uses_max=uses_max)
    await peers.admission.tokens.add(made)
    return made


def test_peer_joins_after_its_token_use_is_stored() -> None:
    class SlowKeys(SqlKeys):
        disk = asyncio.Event()

        async def bind_worker(self, token_id: str, worker: str) -> None:
            await self.disk.wait()
            await super().bind_worker(token_id, worker)

    async def scenario() -> None:
        async with running_coordinator() as coordinator:
            keys = SlowKeys(coordinator.store.database)
            peers = await accept_peers(coordinator, keys=keys)
            line = await peers.connect()
            made = await token(peers, uses_max=1)
            by = AdmissionGrant("t1", "wire:mac")
            await send(
                line,
                "a",
                PeerJoined("mac", grant=by),
                OffersChanged((offer(),)),
                requested_chat(),
            )
            assert peers.workers == []

            keys.disk.set()
            await run_pending()

            assert peers.workers == ["wire:mac/m"]
            assert (await keys.tokens.all())[0].workers == {"wire:mac"}
            assert [each.reason for each in line.received("a", Rejected)] == [
                MAY_NOT_SUBMIT
            ]
            assert peers.admission.count_connected(made) == 1

    virtual.run(scenario())


def test_peer_is_dismissed_if_its_token_use_cannot_be_stored() -> None:
    class FullKeys(SqlKeys):
        async def bind_worker(self, token_id: str, worker: str) -> None:
            raise StoreError("shoal.db: disk I/O error")

    async def scenario() -> None:
        async with running_coordinator() as coordinator:
            peers = await accept_peers(
                coordinator, keys=FullKeys(coordinator.store.database)
            )
            line = await peers.connect()
            await token(peers, uses_max=1)
            by = AdmissionGrant("t1", "wire:mac")

            await send(
                line, "a", PeerJoined("mac", grant=by), OffersChanged((offer(),))
            )

            assert line.received("a", Dismiss) == [Dismiss("shoal.db: disk I/O error")]
            assert peers.workers == []
            assert not line.serving.done()

    virtual.run(scenario())


@scripted(play)
async def test_a_peer_offers_later_only_what_its_token_permits(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await token(peers)
    by = AdmissionGrant("t1", "wire:mac", ("m", "qwen*"))
    models = tuple(map(LoadableModel, ("qwen3", "llama")))
    library = Offer(frozenset({JobKind.MODEL}), library=ModelLibrary(models))

    await send(
        line,
        "a",
        PeerJoined("mac", grant=by),
        OffersChanged((offer(), offer("gpt"), library)),
    )

    assert peers.workers == ["wire:mac/*models", "wire:mac/m"]
    assert [*peers.coordinator.hub.pool.roster.loadable] == ["qwen3"]


@pytest.mark.parametrize(
    ("said", "counts"),
    [
        (replace(QWEN, name=""), False),
        (replace(QWEN, name="a\nb"), False),
        (replace(QWEN, name="\x1b[2J"), False),
        (replace(QWEN, name="*call"), False),
        (replace(QWEN, name="x" * 256), True),
        (replace(QWEN, name="x" * 257), False),
        (replace(QWEN, size=-1), False),
        (replace(QWEN, size=2**63 - 1), False),
        (replace(QWEN, cache=2**63 - 1), False),
        (replace(QWEN, context=-1), False),
        (replace(QWEN, engine="x" * 1000), False),
    ],
)
def test_only_models_that_can_be_ordered_count(
    said: LoadableModel, counts: bool
) -> None:
    async def script(peers: PeerCoordinator, line: ScriptedConnection) -> None:
        await send(line, "a", PeerJoined("mac"), OffersChanged((library_of(said),)))

        assert [*peers.coordinator.hub.pool.roster.loadable] == [said.name] * counts

    play(script)


@scripted(play)
async def test_a_name_counts_once_in_a_library_and_its_machine_can_leave(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    others = [replace(QWEN, name=f"m{n}") for n in range(10_000)]
    library = library_of(QWEN, replace(QWEN, size=1), *others)
    await send(line, "a", PeerJoined("mac"), OffersChanged((library,)))
    loadable = peers.coordinator.hub.pool.roster.loadable

    assert len(loadable) == 256
    assert [*loadable["qwen3"].values()] == [QWEN]

    await send(line, "a", PeerLeft("over"))

    assert not loadable


@scripted(play)
async def test_numbers_of_a_library_that_cannot_be_are_unknown(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    odd = ModelLibrary((QWEN,), -5, math.nan, -1, -3)
    offer = Offer(MODELS, library=odd)
    await send(line, "a", PeerJoined("mac"), OffersChanged((offer,)))
    pool = peers.coordinator.hub.pool

    (worker,) = pool.workers.values()
    assert worker.offer.library == ModelLibrary((QWEN,), context=0)
    version = pool.roster.version
    await send(line, "a", OffersChanged((offer,)))
    assert pool.roster.version == version


PART = ModelOrder(
    ModelAction.LEND, "big", "wire:a/*models", group="g", shards=(Shard("x", 1, 1),)
)
LINK = MeasuredLink("x", 0.02, 1e8)
LENT = LentShard(PART, ("10.0.0.1",), 4711, "f" * 64)
LOAN = MemoryLoan("ggml-rpc 8.0.0", "ab" * 32, 9, shards=(LENT,), groups=(PART,))


@pytest.mark.parametrize(
    ("said", "counts"),
    [
        (LOAN, LOAN),
        (replace(LOAN, memory=-1), replace(LOAN, memory=0)),
        (replace(LOAN, key="cd" * 32), None),
        (replace(LOAN, protocol="x" * 1000), None),
        (
            replace(LOAN, shards=(replace(LENT, port=1 << 16),)),
            replace(LOAN, shards=()),
        ),
        (replace(LOAN, shards=(LENT,) * 999), replace(LOAN, shards=(LENT,) * 64)),
        (
            replace(
                LOAN, groups=(replace(PART, shards=()), replace(PART, name="n" * 999))
            ),
            replace(LOAN, groups=()),
        ),
        (
            replace(LOAN, groups=(replace(PART, shards=(Shard("x", 1, -1),)),)),
            replace(LOAN, groups=()),
        ),
        (
            replace(
                LOAN,
                round_trip=-1.0,
                links=(
                    LINK,
                    MeasuredLink("y", math.nan),
                    MeasuredLink("n" * 999, 0.1),
                    MeasuredLink("z", 0.1, math.inf),
                ),
            ),
            replace(LOAN, links=(LINK,)),
        ),
    ],
    ids=["right", "memory", "key", "protocol", "port", "many", "names", "bytes", "far"],
)
def test_only_loans_that_can_be_count(
    said: MemoryLoan, counts: MemoryLoan | None
) -> None:
    async def script(peers: PeerCoordinator, line: ScriptedConnection) -> None:
        offer = replace(
            library_of(QWEN),
            library=ModelLibrary((QWEN,), loan=said),
            public_key="ab" * 32,
            proven=True,
        )
        await send(line, "a", PeerJoined("mac"), OffersChanged((offer,)))

        (worker,) = peers.coordinator.hub.pool.workers.values()
        assert worker.offer.library == ModelLibrary((QWEN,), loan=counts)

    play(script)


@scripted(play)
async def test_other_pools_and_machines_without_a_slot_get_no_orders(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    library = library_of(QWEN)
    for each in (replace(library, neighbour=True), replace(library, slots=0)):
        await send(line, "a", PeerJoined("mac"), OffersChanged((each,)))

        assert peers.workers == []


@scripted(play)
async def test_revoked_token_dismisses_its_peers_only(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    made = await token(peers)
    by = AdmissionGrant("t1", "wire:mac")
    await send(line, "a", PeerJoined("mac", grant=by), OffersChanged((offer(),)))
    await send(line, "b", PeerJoined("pc"), OffersChanged((offer(),)))

    await peers.admission.revoke(made)
    await run_pending()

    assert line.received("a", Dismiss) == [Dismiss(REVOKED)]
    assert peers.workers == ["wire:pc/m"]
    assert not line.serving.done()
    await send(line, "c", PeerJoined("late", grant=by), OffersChanged((offer(),)))
    assert line.received("c", Dismiss) == [Dismiss(REVOKED)]
    assert peers.workers == ["wire:pc/m"]


@scripted(play)
async def test_leaving_peer_releases_its_token(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    made = await token(peers)
    by = AdmissionGrant("t1", "wire:mac")
    await send(line, "a", PeerJoined("mac", grant=by))
    assert peers.admission.count_connected(made) == 1

    await send(line, "a", PeerLeft("bye"))

    assert peers.admission.count_connected(made) == 0


@scripted(play)
async def test_peer_that_sends_before_admission_is_dismissed(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await token(peers)
    by = AdmissionGrant("t1", "wire:mac")

    line.emit("a", PeerJoined("mac", grant=by), *[requested_chat()] * (PENDING_MAX + 1))
    line.emit("a", OffersChanged((offer(),)))
    await run_pending()

    (dismiss,) = line.received("a", Dismiss)
    assert dismiss.reason.startswith(f"sent more than {PENDING_MAX}")
    assert peers.workers == []


# Messages about the local pool.


@scripted(play)
async def test_peers_receive_the_offers_of_local_workers(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    assert line.received(ALL_PEERS, OffersChanged) == [OffersChanged(())]
    await peers.coordinator.join("w", "own", slots=2)
    await send(
        line,
        "a",
        PeerJoined("pool"),
        OffersChanged((offer("far", neighbour=True),)),
    )
    await asyncio.sleep(ANNOUNCE_INTERVAL)

    told = line.received(ALL_PEERS, OffersChanged)[-1].offers
    assert [each.models for each in told] == [{"own"}]
    assert told[0].slots == 2
    late = await peers.connect()
    assert late.received(ALL_PEERS, OffersChanged) == [OffersChanged(told)]


@scripted(play)
async def test_models_of_a_connection_are_offered_on_all_others_only(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    other = await peers.connect()
    await peers.coordinator.join("w", "own")
    mac = PeerJoined("mac", submits_jobs=True)
    await send(line, "a", mac, OffersChanged((offer("m"), offer("own"))))
    await send(other, "b", PeerJoined("gateway", submits_jobs=True))
    await asyncio.sleep(ANNOUNCE_INTERVAL)

    assert offered(line) == {"own": 1}
    assert offered(other) == {"m": 1, "own": 2}
    late = await peers.connect()
    await send(late, "c", PeerJoined("late", submits_jobs=True))
    assert offered(late) == {"m": 1, "own": 2}


@scripted(play)
async def test_a_worker_of_this_pool_alone_is_offered_on_its_own_connection(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await send(line, "a", PeerJoined("gateway", submits_jobs=True))
    ours = PeerJoined("ours", exclusive=True)
    await send(line, "b", ours, OffersChanged((offer("m"),)))
    await asyncio.sleep(ANNOUNCE_INTERVAL)

    assert offered(line) == {"m": 1}


@scripted(play)
async def test_a_peer_that_reconnects_is_not_shown_its_models(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    mac = PeerJoined("mac", submits_jobs=True)
    await send(line, "a", mac, OffersChanged((offer("m"),)))

    newer = await peers.connect()
    await send(newer, "a", mac, OffersChanged((offer("m"),)))
    await asyncio.sleep(ANNOUNCE_INTERVAL)

    assert offered(newer) == {}
    assert offered(line) == {"m": 1}


@scripted(play)
async def test_slots_of_a_peer_do_not_make_the_pool_look_free_to_it(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await peers.coordinator.join("w", "own")
    mac = PeerJoined("mac", submits_jobs=True)
    await send(line, "a", mac, OffersChanged((offer("m"),)))
    await peers.coordinator.request("own")
    await asyncio.sleep(2 * ANNOUNCE_INTERVAL)

    assert line.received(ALL_PEERS, LoadChanged)[-1].load.full


def offered(line: ScriptedConnection) -> dict[str, int]:
    """Return the models offered last on a connection, with their slots."""
    offers = line.received(ALL_PEERS, OffersChanged)[-1].offers
    return {name: each.slots for each in offers for name in each.models}


@scripted(play)
async def test_load_is_sent_at_most_once_a_second(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    member = await peers.coordinator.join("w", "own", slots=20)
    await asyncio.sleep(2 * ANNOUNCE_INTERVAL)
    before = len(line.received(ALL_PEERS, LoadChanged))

    for _ in range(5):
        await peers.coordinator.request("own")
    await asyncio.sleep(ANNOUNCE_INTERVAL)

    told = line.received(ALL_PEERS, LoadChanged)[before:]
    assert len(told) <= 3
    assert told[-1] == LoadChanged(WorkerLoad(queued=5))
    for _ in range(15):
        await peers.coordinator.request("own")
    await asyncio.sleep(2 * ANNOUNCE_INTERVAL)
    full = LoadChanged(WorkerLoad(queued=20, full=True))
    assert line.received(ALL_PEERS, LoadChanged)[-1] == full
    for run in range(20):
        member.complete(run)
    await asyncio.sleep(2 * ANNOUNCE_INTERVAL)
    assert line.received(ALL_PEERS, LoadChanged)[-1] == LoadChanged(WorkerLoad())


@scripted(play)
async def test_peers_learn_of_a_drain(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    peers.connections.drain("stopping")
    late = await peers.connect()

    assert line.received(ALL_PEERS, Draining) == [Draining("stopping")]
    assert late.received(ALL_PEERS, Draining) == [Draining("stopping")]


@scripted(play)
async def test_stop_closes_connections_without_dismissals(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await send(line, "a", PeerJoined("mac"), OffersChanged((offer(),)))
    other = await peers.connect()

    peers.coordinator.hub.disconnect_all("stopping")
    peers.connections.disconnect_all("stopping")
    ends = await asyncio.gather(line.serving, other.serving)

    assert [end.code for end in ends] == [
        CloseCode.GOING_AWAY,
        CloseCode.GOING_AWAY,
    ]
    assert line.received("a", Dismiss) == []


@scripted(play)
async def test_readers_of_a_connection_can_be_queried(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    met = PeerJoined("mac/1", protection=Protection.NOISE)
    await send(line, "a", met, OffersChanged((offer(),)))
    await peers.coordinator.join("w")

    via = {
        each.id: peers.coordinator.hub.peer_route_of(each.id)
        for each in peers.coordinator.hub.pool.workers.values()
    }

    assert via == {
        "wire:mac%2F1/m": PeerRoute("mac/1", Protection.NOISE),
        "wire:w": None,
    }


# Shared models.


@scripted(play)
async def test_models_are_not_shared_by_default(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    await send(line, "a", PeerJoined("mac"), ModelQuery("m"))

    assert line.received("a", ModelAnswer) == [ModelAnswer("m", available=False)]


class Library:
    """Records what it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, ModelMessage]] = []
        self.joined: list[tuple[str, bool]] = []
        self.left: list[str] = []

    def on_message(
        self,
        peer: str,
        word: ModelMessage,
        say: Callable[[ModelMessage], bool],
        room: WaitForRoom,
    ) -> None:
        self.heard.append((peer, word))
        self.say = say

    def on_peer_joined(
        self,
        peer: str,
        say: Callable[[ModelMessage], bool],
        *,
        passed_on: bool = False,
    ) -> None:
        self.joined.append((peer, passed_on))

    def on_peer_left(self, peer: str) -> None:
        self.left.append(peer)


def test_peer_exchanges_models_while_it_is_approved() -> None:
    refused = ModelAnswer("m", available=False)

    async def scenario() -> None:
        async with running_coordinator(approve_nodes=True) as coordinator:
            library, hub = Library(), coordinator.hub
            peers = await accept_peers(coordinator, share=library)
            line = await peers.connect()
            mac = PeerJoined("mac", public_key="8a")
            await send(line, "a", mac, ModelQuery("m"), refused)
            await send(line, "b", PeerJoined("other", public_key="5e"))
            assert (library.heard, library.joined, library.left) == ([], [], [])
            assert line.received("a", ModelAnswer) == [refused]

            await hub.process(WorkerApproval("wire:mac", "al", "8a"))
            await send(line, "a", ModelQuery("n"))
            assert library.heard == [("wire:mac", ModelQuery("n"))]
            assert library.joined == [("wire:mac", False)]

            # The removal ends the approval of a key, under any name.
            await send(line, "c", PeerJoined("also", public_key="8a"))
            await hub.process(WorkerSuspension("wire:mac", Suspension.REMOVED, "al"))
            await send(line, "c", ModelQuery("m"))
            assert library.left == ["wire:mac", "wire:also"]
            assert line.received("c", ModelAnswer) == [refused]

    virtual.run(scenario())


@in_virtual_time
async def test_model_messages_go_to_the_model_sharing() -> None:
    async with running_coordinator() as coordinator:
        library = Library()
        peers = await accept_peers(coordinator, share=library)
        line = await peers.connect()
        await send(line, "a", PeerJoined("mac"), ModelQuery("m"))
        worker = PeerJoined("w", exclusive=True, sends_chunks=True)
        await send(line, "b", worker)
        assert library.joined == [("wire:mac", False), ("wire:w", True)]
        assert library.heard == [("wire:mac", ModelQuery("m"))]
        assert library.say(ModelAnswer("m", available=True, size=9))
        await run_pending()
        assert len(line.received("a", ModelAnswer)) == 1

        await send(line, "a", PeerLeft("bye"))

        assert library.left == ["wire:mac"]
        assert not library.say(ModelAnswer("m", available=True))


@scripted(play)
async def test_history_of_a_job_names_unfit_workers(
    peers: PeerCoordinator, line: ScriptedConnection
) -> None:
    hot = LoadChanged(WorkerLoad("is too hot"))
    await send(line, "a", PeerJoined("mac"), OffersChanged((offer(),)), hot)
    await send(line, "b", PeerJoined("pc"), OffersChanged((offer(),)))
    client = await peers.coordinator.request()
    assert client.accepted

    story = await peers.coordinator.history(client.job_id)

    (leased,) = [fact for fact in story if isinstance(fact, JobLeased)]
    assert [(g.reason, g.workers) for g in leased.passed_over] == [
        ("is too hot", ("wire:mac/m",))
    ]


def test_connection_without_peers_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with running_coordinator() as coordinator:
            peers = await accept_peers(coordinator)
            for accepts in (frozenset[type](), ACCEPTED):
                link = MemoryLink()
                link.cut()
                session = ScriptedPeerSession([], accepts=accepts)
                await peers.connections.serve("wire", session, link)

    with caplog.at_level(logging.INFO, "shoal.peers"):
        virtual.run(scenario())

    words = [record.getMessage().split()[0] for record in caplog.records]
    assert words.count("connected") == words.count("disconnected") == 1
