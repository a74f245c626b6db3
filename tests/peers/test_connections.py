"""Connections with several peers, whose models are workers of the pool."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from coordinator.hubs import coordinator, moment
from peers.played_peers import SAYABLE, Line, Place, PlayedSession, asks, offer, place
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
from shoal.domain.work import Feature
from shoal.domain.worker import MachineHealth, WorkerLoad
from shoal.peers.connections import ANNOUNCE_INTERVAL, PEERS_MAX, RENAME
from shoal.peers.inbound_jobs import WaitForRoom
from shoal.peers.peer_models import MODELS_MAX, NAME_MAX
from shoal.peers.refused_peers import REFUSED_MAX
from shoal.peers.remote_peer import MAY_NOT_SUBMIT, PENDING_MAX
from shoal.protocols.seam.admission import AdmissionGrant
from shoal.protocols.seam.peer_session import (
    ALL_PEERS,
    PeerJoined,
    PeerLeft,
    PeerRefused,
    Protection,
)
from shoal.protocols.seam.session import CloseCode
from shoal.store.sqlite.keys import SqliteKeys
from simulation import virtual
from transports.memory_links import MemoryLink

CONTINUES = frozenset({Feature.CONTINUE})


def play(script: Callable[[Place, Line], Awaitable[None]]) -> None:
    """Run a script with a connection on which nobody was met yet, in virtual time."""

    async def scenario() -> None:
        async with coordinator() as its:
            here = await place(its)
            await script(here, await here.line())

    virtual.run(scenario())


async def says(line: Line, peer: str, *words: object) -> None:
    line.says(peer, *words)  # type: ignore[arg-type]  # words of either kind
    await moment()


# Who is there.


def test_each_model_of_each_peer_is_a_worker() -> None:
    async def script(here: Place, line: Line) -> None:
        await says(
            line, "a", PeerJoined("mac"), OffersChanged((offer("m"), offer("n")))
        )
        await says(line, "b", PeerJoined("a/b%"), OffersChanged((offer("m"),)))

        assert here.workers == ["wire:a%2Fb%25/m", "wire:mac/m", "wire:mac/n"]

        await says(line, "a", PeerLeft("relay says so"))

        assert here.workers == ["wire:a%2Fb%25/m"]
        await line.end()
        assert here.workers == []

    play(script)


def test_an_offer_of_many_models_is_one_worker_whose_name_is_cut() -> None:
    async def script(here: Place, line: Line) -> None:
        names = [letter * 100 for letter in "abcd"]
        await says(line, "a", PeerJoined("mac"), OffersChanged((offer(*names),)))

        assert here.workers == [f"wire:mac/{names[0]},{names[1]},+2"]
        for name in names:
            await here.its.ask(name)
        assert len(line.heard("a", RunJob)) == 1
        line.completes("a")
        await moment()
        assert len(line.heard("a", RunJob)) == 2

    play(script)


def test_refused_peers_are_listed_until_they_leave_or_join() -> None:
    async def script(here: Place, line: Line) -> None:
        refused = here.crowds.refused
        other = await here.line()
        for key in "abc":
            await says(line, key, PeerRefused(key, f"why {key}"))
        await says(other, "d", PeerRefused("d", "why d"))
        listed = {f"wire:{each}": f"why {each}" for each in "abcd"}
        assert refused.reasons == listed

        await says(line, "a", PeerLeft("bye"))
        await says(line, "b", PeerJoined("b"))
        assert [*refused.reasons] == ["wire:c", "wire:d"]
        await line.end()
        assert [*refused.reasons] == ["wire:d"]
        for number in range(REFUSED_MAX):
            await says(other, str(number), PeerRefused(str(number), "why"))
        assert len(refused.reasons) == REFUSED_MAX
        assert "wire:d" not in refused.reasons
        assert here.workers == []

    play(script)


def test_what_an_unknown_peer_says_is_of_no_account() -> None:
    async def script(here: Place, line: Line) -> None:
        await says(line, "a", OffersChanged((offer(),)), asks(), PeerLeft("bye"))

        assert here.workers == []
        assert line.heard("a", object) == []

    play(script)


def test_newer_peer_of_a_name_takes_the_place_of_the_older() -> None:
    async def script(here: Place, line: Line) -> None:
        other = await here.line()
        await says(
            line, "a", PeerJoined("mac"), OffersChanged((offer("m"), offer("n")))
        )
        client = await here.its.ask("n")
        line.writes("a", "half")
        await moment()

        await says(other, "z", PeerJoined("mac"), OffersChanged((offer("n"),)))

        assert line.heard("a", Dismiss) == [Dismiss(RENAME)]
        assert here.workers == ["wire:mac/n"]
        (run,) = other.heard("z", RunJob)
        assert run.lease == 2
        await says(line, "a", OffersChanged((offer("o"),)))
        assert here.workers == ["wire:mac/n"]
        other.writes("z", "half", " and whole")
        other.completes("z")
        await moment()
        assert client.text == "half and whole"

    play(script)


def test_peer_without_models_is_replaced_as_well() -> None:
    async def script(here: Place, line: Line) -> None:
        await says(line, "a", PeerJoined("mac", submits_jobs=True))
        await says(line, "b", PeerJoined("mac", submits_jobs=True))

        assert len(line.heard("a", Dismiss)) == 1
        assert line.heard("b", Dismiss) == []

    play(script)


def test_peer_that_is_met_anew_on_its_connection_is_not_dismissed() -> None:
    async def script(here: Place, line: Line) -> None:
        await says(line, "a", PeerJoined("mac"), OffersChanged((offer("m"),)))

        await says(line, "a", PeerJoined("mac"), OffersChanged((offer("n"),)))

        assert line.heard("a", Dismiss) == []
        assert here.workers == ["wire:mac/n"]

    play(script)


def test_one_name_on_two_wires_is_two_peers() -> None:
    async def script(here: Place, line: Line) -> None:
        other = await here.line("other")
        await says(line, "a", PeerJoined("mac"), OffersChanged((offer(),)))
        await says(other, "a", PeerJoined("mac"), OffersChanged((offer(),)))

        assert here.workers == ["other:mac/m", "wire:mac/m"]

    play(script)


@pytest.mark.parametrize("name", ["", "x" * (NAME_MAX + 1)], ids=["none", "long"])
def test_peer_without_a_proper_name_is_sent_away(name: str) -> None:
    async def script(here: Place, line: Line) -> None:
        await says(line, "a", PeerJoined(name), OffersChanged((offer(),)))

        (dismiss,) = line.heard("a", Dismiss)
        assert "1 to 256 characters" in dismiss.reason
        assert here.workers == []

    play(script)


def test_connection_has_so_many_peers_and_no_more() -> None:
    async def script(here: Place, line: Line) -> None:
        for number in range(PEERS_MAX + 1):
            line.says(str(number), PeerJoined(f"peer {number}"))
        await moment()

        assert line.heard(str(PEERS_MAX - 1), Dismiss) == []
        (dismiss,) = line.heard(str(PEERS_MAX), Dismiss)
        assert f"{PEERS_MAX} peers" in dismiss.reason

    play(script)


def test_bug_in_a_session_ends_its_connection_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def script(here: Place, line: Line) -> None:
        other = await here.line()
        await says(line, "a", PeerJoined("mac"), OffersChanged((offer(),)))
        await says(other, "a", PeerJoined("pc"), OffersChanged((offer(),)))

        line.breaks(ZeroDivisionError("a bug"))
        end = await line.serving
        await moment()

        assert end.reason == "internal error"
        assert line.link.closed[0] == (1011, "internal error")
        assert here.workers == ["wire:pc/m"]

    with caplog.at_level(logging.INFO, "shoal.peers"):
        play(script)

    said = [record.getMessage().split()[0] for record in caplog.records]
    assert said.count("broken") == 1


def test_names_of_peers_cannot_forge_log_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def script(here: Place, line: Line) -> None:
        await says(
            line, "a", PeerJoined("mac\nfact=Forged"), OffersChanged((offer("x\ny"),))
        )
        await says(line, "a", PeerLeft("a\nb"))

    with caplog.at_level(logging.DEBUG, "shoal"):
        play(script)

    assert not any("\n" in record.getMessage() for record in caplog.records)


# What they can run.


def test_models_come_and_go_with_what_is_offered() -> None:
    async def script(here: Place, line: Line) -> None:
        await says(
            line, "a", PeerJoined("mac"), OffersChanged((offer("m"), offer("n")))
        )

        await says(line, "a", OffersChanged((offer("n"), offer("o"))))

        assert here.workers == ["wire:mac/n", "wire:mac/o"]

    play(script)


def test_changed_model_joins_anew_at_once_if_it_is_idle() -> None:
    async def script(here: Place, line: Line) -> None:
        await says(line, "a", PeerJoined("mac"), OffersChanged((offer(),)))
        joined: list[object] = []
        here.its.hub.subscribe(joined.append)

        await says(line, "a", OffersChanged((offer(),)))
        assert joined == []  # for nothing has changed
        await says(line, "a", OffersChanged((offer(slots=3),)))

        (worker,) = here.its.hub.pool.workers.values()
        assert worker.offer.slots == 3
        assert sum(isinstance(each, WorkerJoined) for each in joined) == 1

    play(script)


def test_changed_model_that_is_busy_joins_anew_when_it_is_idle() -> None:
    async def script(here: Place, line: Line) -> None:
        await says(line, "a", PeerJoined("mac"), OffersChanged((offer(),)))
        client = await here.its.ask()

        await says(line, "a", OffersChanged((offer(slots=3),)))
        (worker,) = here.its.hub.pool.workers.values()
        assert worker.offer.slots == 1
        line.writes("a", "whole")
        line.completes("a")
        await moment()

        assert client.text == "whole"
        (worker,) = here.its.hub.pool.workers.values()
        assert worker.offer.slots == 3

    play(script)


def test_unloaded_model_ends_what_it_has_and_takes_nothing_new() -> None:
    async def script(here: Place, line: Line) -> None:
        await says(line, "a", PeerJoined("mac"), OffersChanged((offer(slots=2),)))
        first = await here.its.ask()

        await says(line, "a", OffersChanged(()))
        second = await here.its.ask()
        assert len(line.heard("a", RunJob)) == 1
        line.completes("a")
        await moment()

        assert first.outcome is not None
        assert here.workers == []
        await says(line, "a", OffersChanged((offer(),)))
        assert len(line.heard("a", RunJob)) == 2
        line.completes("a")
        await moment()
        assert second.outcome is not None

    play(script)


def test_model_that_is_loaded_again_before_it_could_leave_stays() -> None:
    async def script(here: Place, line: Line) -> None:
        await says(line, "a", PeerJoined("mac"), OffersChanged((offer(),)))
        await here.its.ask()
        await says(line, "a", OffersChanged(()))
        await says(line, "a", OffersChanged((offer(),)))
        await says(line, "a", OffersChanged(()))
        await says(line, "a", OffersChanged((offer(),)))

        line.completes("a")
        await moment()

        (worker,) = here.its.hub.pool.workers.values()
        assert not worker.draining
        second = await here.its.ask()
        line.completes("a")
        await moment()
        assert second.outcome is not None

    play(script)


def test_offers_beyond_the_limits_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def script(here: Place, line: Line) -> None:
        many = tuple(offer(f"m{number}") for number in range(MODELS_MAX + 5))
        twice = (offer("x"), offer("x"), offer("y" * (NAME_MAX + 1)))
        await says(line, "a", PeerJoined("mac"), OffersChanged(many))
        await says(line, "b", PeerJoined("pc"), OffersChanged(twice))

        assert len(here.workers) == MODELS_MAX + 1
        assert "wire:pc/x" in here.workers

    play(script)

    assert any("offers=5" in record.getMessage() for record in caplog.records)


def test_offer_without_models_is_a_worker_by_its_peers_name() -> None:
    async def script(here: Place, line: Line) -> None:
        await says(line, "a", PeerJoined("mac"), OffersChanged((offer("m"),)))
        await says(line, "a", OffersChanged((replace(offer(), models=frozenset()),)))

        assert here.workers == ["wire:mac"]

    play(script)


def test_condition_of_a_peer_is_that_of_all_its_models() -> None:
    async def script(here: Place, line: Line) -> None:
        hot = LoadChanged(WorkerLoad("is too hot"))
        await says(
            line, "a", PeerJoined("mac"), OffersChanged((offer("m"), offer("n"))), hot
        )
        client = await here.its.ask("n")
        await says(line, "a", OffersChanged((offer("m"), offer("n"), offer("o"))))

        assert line.heard("a", RunJob) == []
        conditions = [w.load for w in here.its.hub.pool.workers.values()]
        assert conditions == [WorkerLoad("is too hot")] * 3

        await says(line, "a", LoadChanged(WorkerLoad(speed=0.5)))
        await asyncio.sleep(1.0)
        assert len(line.heard("a", RunJob)) == 1
        line.completes("a")
        await moment()
        assert client.outcome is not None

    play(script)


def test_job_of_one_model_makes_the_others_of_its_peer_dearer() -> None:
    async def script(here: Place, line: Line) -> None:
        await says(
            line, "a", PeerJoined("mac"), OffersChanged((offer("m"), offer("n")))
        )
        await says(line, "b", PeerJoined("pc"), OffersChanged((offer("n"),)))
        await here.its.ask("m")
        workers = here.its.hub.pool.workers

        await here.its.ask("n")

        assert len(line.heard("b", RunJob)) == 1
        queued = {name: each.load.queued for name, each in workers.items()}
        assert queued == {"wire:mac/m": 0, "wire:mac/n": 1, "wire:pc/n": 0}
        line.completes("a")
        await asyncio.sleep(1.0)
        assert [each.load.queued for each in workers.values()] == [0, 0, 0]

    play(script)


def test_busy_peer_is_given_a_second_job_if_nobody_else_is_free() -> None:
    async def script(here: Place, line: Line) -> None:
        await says(
            line, "a", PeerJoined("mac"), OffersChanged((offer("m"), offer("n")))
        )
        await here.its.ask("m")
        await here.its.ask("n")
        await here.its.ask("n")

        assert [run.work.model for run in line.heard("a", RunJob)] == ["m", "n"]

    play(script)


def test_draining_and_health_of_a_peer_hold_for_all_its_models() -> None:
    async def script(here: Place, line: Line) -> None:
        await says(
            line, "a", PeerJoined("mac"), OffersChanged((offer("m"), offer("n")))
        )
        await says(
            line, "a", HealthReported(MachineHealth(cpu=50.0)), Draining("going home")
        )
        await says(line, "a", OffersChanged((offer("m"), offer("n"), offer("o"))))

        draining = [w.draining for w in here.its.hub.pool.workers.values()]
        assert draining == ["going home"] * 3
        assert here.its.hub.health[WorkerId("wire:mac/n")].cpu == 50.0

    play(script)


# Their work.


def test_peer_that_goes_mid_answer_is_replaced_without_a_gap() -> None:
    async def script(here: Place, line: Line) -> None:
        await says(
            line, "a", PeerJoined("mac"), OffersChanged((offer(features=CONTINUES),))
        )
        client = await here.its.ask()
        line.writes("a", "one ", "two ")
        await says(
            line, "b", PeerJoined("pc"), OffersChanged((offer(features=CONTINUES),))
        )

        await says(line, "a", PeerLeft("silent for 30 s"))
        (run,) = line.heard("b", RunJob)
        assert run.continues == "one two "
        line.writes("b", "three")
        line.completes("b")
        await moment()

        assert client.text == "one two three"

    play(script)


def test_client_that_leaves_has_the_job_cancelled_where_the_peer_can_be_told() -> None:
    async def script(here: Place, line: Line) -> None:
        await says(
            line, "a", PeerJoined("shoal", cancels=True), OffersChanged((offer("m"),))
        )
        await says(line, "b", PeerJoined("mac"), OffersChanged((offer("n"),)))
        one, two = await here.its.ask("m"), await here.its.ask("n")

        await one.leave()
        await two.leave()

        assert len(line.heard("a", CancelJob)) == 1
        assert line.heard("b", CancelJob) == []
        busy = {w.id: len(w.leases) for w in here.its.hub.pool.workers.values()}
        assert busy == {"wire:shoal/m": 0, "wire:mac/n": 1}
        line.completes("b")  # it was not told, so it does the job to its end
        line.completes("a")  # it had just done it
        await moment()
        assert not any(w.leases for w in here.its.hub.pool.workers.values())

    play(script)


def test_nobody_ends_the_job_of_another_peer() -> None:
    async def script(here: Place, line: Line) -> None:
        await says(line, "a", PeerJoined("mac"), OffersChanged((offer("m"),)))
        await says(line, "b", PeerJoined("eve"), OffersChanged((offer("n"),)))
        client = await here.its.ask("m")
        (run,) = line.heard("a", RunJob)

        await says(line, "b", Completed(run.job_id, run.lease))

        assert client.outcome is None
        line.writes("a", "right")
        line.completes("a")
        await moment()
        assert client.text == "right"

    play(script)


def test_refused_job_goes_to_another_peer() -> None:
    async def script(here: Place, line: Line) -> None:
        await says(line, "a", PeerJoined("mac"), OffersChanged((offer(),)))
        client = await here.its.ask()
        await says(line, "b", PeerJoined("pc"), OffersChanged((offer(),)))
        (run,) = line.heard("a", RunJob)

        await says(line, "a", Rejected(run.job_id, run.lease, "queue_full"))
        line.writes("b", "whole")
        line.completes("b")
        await moment()

        assert client.text == "whole"

    play(script)


# Tokens.


async def token(here: Place, uses_max: int | None = None) -> JoinToken:
    made = JoinToken("t1", "lab", digest_of("secret"), 0.0, uses_max=uses_max)
    await here.admission.tokens.add(made)
    return made


def test_peer_counts_only_when_its_token_is_stored() -> None:
    class SlowKeys(SqliteKeys):
        disk = asyncio.Event()

        async def bind_worker(self, token_id: str, worker: str) -> None:
            await self.disk.wait()
            await super().bind_worker(token_id, worker)

    async def scenario() -> None:
        async with coordinator() as its:
            keys = SlowKeys(its.store)
            here = await place(its, keys=keys)
            line = await here.line()
            made = await token(here, uses_max=1)
            by = AdmissionGrant("t1", "wire:mac")
            await says(
                line,
                "a",
                PeerJoined("mac", grant=by),
                OffersChanged((offer(),)),
                asks(),
            )
            assert here.workers == []

            keys.disk.set()
            await moment()

            assert here.workers == ["wire:mac/m"]
            assert (await keys.tokens.all())[0].workers == {"wire:mac"}
            assert [each.reason for each in line.heard("a", Rejected)] == [
                MAY_NOT_SUBMIT
            ]
            assert here.admission.count_connected(made) == 1

    virtual.run(scenario())


def test_peer_whose_token_cannot_be_stored_is_sent_away() -> None:
    class FullKeys(SqliteKeys):
        async def bind_worker(self, token_id: str, worker: str) -> None:
            raise StoreError("shoal.db: disk I/O error")

    async def scenario() -> None:
        async with coordinator() as its:
            here = await place(its, keys=FullKeys(its.store))
            line = await here.line()
            await token(here, uses_max=1)
            by = AdmissionGrant("t1", "wire:mac")

            await says(
                line, "a", PeerJoined("mac", grant=by), OffersChanged((offer(),))
            )

            assert line.heard("a", Dismiss) == [Dismiss("shoal.db: disk I/O error")]
            assert here.workers == []
            assert not line.serving.done()

    virtual.run(scenario())


def test_revoked_token_ends_the_peers_that_came_by_it_and_no_others() -> None:
    async def script(here: Place, line: Line) -> None:
        made = await token(here)
        by = AdmissionGrant("t1", "wire:mac")
        await says(line, "a", PeerJoined("mac", grant=by), OffersChanged((offer(),)))
        await says(line, "b", PeerJoined("pc"), OffersChanged((offer(),)))

        await here.admission.revoke(made)
        await moment()

        assert line.heard("a", Dismiss) == [Dismiss(REVOKED)]
        assert here.workers == ["wire:pc/m"]
        assert not line.serving.done()
        await says(line, "c", PeerJoined("late", grant=by), OffersChanged((offer(),)))
        assert line.heard("c", Dismiss) == [Dismiss(REVOKED)]
        assert here.workers == ["wire:pc/m"]

    play(script)


def test_peer_that_leaves_frees_its_token() -> None:
    async def script(here: Place, line: Line) -> None:
        made = await token(here)
        by = AdmissionGrant("t1", "wire:mac")
        await says(line, "a", PeerJoined("mac", grant=by))
        assert here.admission.count_connected(made) == 1

        await says(line, "a", PeerLeft("bye"))

        assert here.admission.count_connected(made) == 0

    play(script)


def test_peer_that_does_not_wait_until_it_is_let_in_is_sent_away() -> None:
    async def script(here: Place, line: Line) -> None:
        await token(here)
        by = AdmissionGrant("t1", "wire:mac")

        line.says("a", PeerJoined("mac", grant=by), *[asks()] * (PENDING_MAX + 1))
        line.says("a", OffersChanged((offer(),)))
        await moment()

        (dismiss,) = line.heard("a", Dismiss)
        assert dismiss.reason.startswith(f"said more than {PENDING_MAX}")
        assert here.workers == []

    play(script)


# What they are told of us.


def test_peers_are_told_what_our_own_workers_can_run() -> None:
    async def script(here: Place, line: Line) -> None:
        assert line.heard(ALL_PEERS, OffersChanged) == [OffersChanged(())]
        await here.its.join("w", "own", slots=2)
        await says(
            line,
            "a",
            PeerJoined("pool"),
            OffersChanged((offer("far", neighbour=True),)),
        )
        await asyncio.sleep(ANNOUNCE_INTERVAL)

        told = line.heard(ALL_PEERS, OffersChanged)[-1].offers
        assert [each.models for each in told] == [{"own"}]
        assert told[0].slots == 2
        late = await here.line()
        assert late.heard(ALL_PEERS, OffersChanged) == [OffersChanged(told)]

    play(script)


def test_models_of_a_connection_are_offered_on_all_others_only() -> None:
    async def script(here: Place, line: Line) -> None:
        other = await here.line()
        await here.its.join("w", "own")
        mac = PeerJoined("mac", submits_jobs=True)
        await says(line, "a", mac, OffersChanged((offer("m"), offer("own"))))
        await says(other, "b", PeerJoined("gateway", submits_jobs=True))
        await asyncio.sleep(ANNOUNCE_INTERVAL)

        assert offered(line) == {"own": 1}
        assert offered(other) == {"m": 1, "own": 2}
        late = await here.line()
        await says(late, "c", PeerJoined("late", submits_jobs=True))
        assert offered(late) == {"m": 1, "own": 2}

    play(script)


def test_a_worker_of_this_pool_alone_is_offered_on_its_own_connection() -> None:
    async def script(here: Place, line: Line) -> None:
        await says(line, "a", PeerJoined("gateway", submits_jobs=True))
        ours = PeerJoined("ours", exclusive=True)
        await says(line, "b", ours, OffersChanged((offer("m"),)))
        await asyncio.sleep(ANNOUNCE_INTERVAL)

        assert offered(line) == {"m": 1}

    play(script)


def test_a_peer_that_reconnects_is_not_shown_its_models() -> None:
    async def script(here: Place, line: Line) -> None:
        mac = PeerJoined("mac", submits_jobs=True)
        await says(line, "a", mac, OffersChanged((offer("m"),)))

        newer = await here.line()
        await says(newer, "a", mac, OffersChanged((offer("m"),)))
        await asyncio.sleep(ANNOUNCE_INTERVAL)

        assert offered(newer) == {}
        assert offered(line) == {"m": 1}

    play(script)


def test_slots_of_a_peer_do_not_make_the_pool_look_free_to_it() -> None:
    async def script(here: Place, line: Line) -> None:
        await here.its.join("w", "own")
        mac = PeerJoined("mac", submits_jobs=True)
        await says(line, "a", mac, OffersChanged((offer("m"),)))
        await here.its.ask("own")
        await asyncio.sleep(2 * ANNOUNCE_INTERVAL)

        assert line.heard(ALL_PEERS, LoadChanged)[-1].load.full

    play(script)


def offered(line: Line) -> dict[str, int]:
    """Return the models offered last on a connection, with their slots."""
    offers = line.heard(ALL_PEERS, OffersChanged)[-1].offers
    return {name: each.slots for each in offers for name in each.models}


def test_peers_are_told_how_busy_we_are_once_a_second_at_most() -> None:
    async def script(here: Place, line: Line) -> None:
        member = await here.its.join("w", "own", slots=100)
        await asyncio.sleep(2 * ANNOUNCE_INTERVAL)
        before = len(line.heard(ALL_PEERS, LoadChanged))

        for _ in range(20):
            await here.its.ask("own")
        await asyncio.sleep(ANNOUNCE_INTERVAL)

        told = line.heard(ALL_PEERS, LoadChanged)[before:]
        assert len(told) <= 3
        assert told[-1] == LoadChanged(WorkerLoad(queued=20))
        for _ in range(80):
            await here.its.ask("own")
        await asyncio.sleep(2 * ANNOUNCE_INTERVAL)
        full = LoadChanged(WorkerLoad(queued=100, full=True))
        assert line.heard(ALL_PEERS, LoadChanged)[-1] == full
        for run in range(100):
            member.complete(run)
        await asyncio.sleep(2 * ANNOUNCE_INTERVAL)
        assert line.heard(ALL_PEERS, LoadChanged)[-1] == LoadChanged(WorkerLoad())

    play(script)


def test_peers_are_told_when_we_take_nothing_new() -> None:
    async def script(here: Place, line: Line) -> None:
        here.crowds.drain("stopping")
        late = await here.line()

        assert line.heard(ALL_PEERS, Draining) == [Draining("stopping")]
        assert late.heard(ALL_PEERS, Draining) == [Draining("stopping")]

    play(script)


def test_connections_end_when_the_coordinator_stops_and_nobody_is_sent_away() -> None:
    async def script(here: Place, line: Line) -> None:
        await says(line, "a", PeerJoined("mac"), OffersChanged((offer(),)))
        other = await here.line()

        here.its.hub.disconnect_all("stopping")
        here.crowds.disconnect_all("stopping")
        ends = await asyncio.gather(line.serving, other.serving)

        assert [end.code for end in ends] == [
            CloseCode.GOING_AWAY,
            CloseCode.GOING_AWAY,
        ]
        assert line.heard("a", Dismiss) == []

    play(script)


def test_who_reads_what_a_peer_is_told_can_be_looked_up() -> None:
    async def script(here: Place, line: Line) -> None:
        met = PeerJoined("mac/1", protection=Protection.NOISE)
        await says(line, "a", met, OffersChanged((offer(),)))
        await here.its.join("w")

        via = {
            each.id: here.its.hub.peer_route_of(each.id)
            for each in here.its.hub.pool.workers.values()
        }

        assert via == {
            "wire:mac%2F1/m": PeerRoute("mac/1", Protection.NOISE),
            "wire:w": None,
        }

    play(script)


# Models to be copied.


def test_there_are_no_models_to_be_copied_unless_they_are_shared() -> None:
    async def script(here: Place, line: Line) -> None:
        await says(line, "a", PeerJoined("mac"), ModelQuery("m"))

        assert line.heard("a", ModelAnswer) == [ModelAnswer("m", available=False)]

    play(script)


def test_words_about_models_go_to_who_shares_them() -> None:
    class Library:
        def __init__(self) -> None:
            self.heard: list[tuple[str, ModelMessage]] = []
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

        def on_peer_left(self, peer: str) -> None:
            self.left.append(peer)

    async def scenario() -> None:
        async with coordinator() as its:
            library = Library()
            here = await place(its, share=library)
            line = await here.line()
            await says(line, "a", PeerJoined("mac"), ModelQuery("m"))
            assert library.heard == [("wire:mac", ModelQuery("m"))]
            assert library.say(ModelAnswer("m", available=True, size=9))
            await moment()
            assert len(line.heard("a", ModelAnswer)) == 1

            await says(line, "a", PeerLeft("bye"))

            assert library.left == ["wire:mac"]
            assert not library.say(ModelAnswer("m", available=True))

    virtual.run(scenario())


def test_story_of_a_job_says_who_was_unfit() -> None:
    async def script(here: Place, line: Line) -> None:
        hot = LoadChanged(WorkerLoad("is too hot"))
        await says(line, "a", PeerJoined("mac"), OffersChanged((offer(),)), hot)
        await says(line, "b", PeerJoined("pc"), OffersChanged((offer(),)))
        client = await here.its.ask()
        assert client.accepted

        story = await here.its.story(client.job_id)

        (leased,) = [fact for fact in story if isinstance(fact, JobLeased)]
        assert [(g.reason, g.workers) for g in leased.passed_over] == [
            ("is too hot", ("wire:mac/m",))
        ]

    play(script)


def test_connection_on_which_nobody_can_be_met_is_not_worth_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with coordinator() as its:
            here = await place(its)
            for accepts in (frozenset[type](), SAYABLE):
                link = MemoryLink()
                link.cut()
                session = PlayedSession([], accepts=accepts)
                await here.crowds.serve("wire", session, link)

    with caplog.at_level(logging.INFO, "shoal.peers"):
        virtual.run(scenario())

    words = [record.getMessage().split()[0] for record in caplog.records]
    assert words.count("connected") == words.count("disconnected") == 1
