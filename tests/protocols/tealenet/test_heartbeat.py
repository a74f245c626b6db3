"""A peer's state, by its heartbeats and by its silence."""

from itertools import groupby
from typing import Any

import pytest

from originals.mac import is_eligible
from protocols.contexts import require_token
from protocols.tealenet.peers import (
    MAC,
    OFFER,
    ForeignPeer,
    PeerPair,
    chunk,
    encoded,
    heartbeat,
    hello,
    hello_ack,
    inference_request,
    local_coordinator,
    local_worker,
    submitted_request,
)
from protocols.tealenet.recordings import Case, recorded
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import (
    Completed,
    Draining,
    LoadChanged,
    OffersChanged,
    RunJob,
)
from shoal.domain.work import Chat
from shoal.domain.worker import (
    PAUSED,
    ThermalLevel,
    WorkerLoad,
    machine_load,
)
from shoal.protocols.tealenet.codec.messages import HeartbeatAck
from shoal.protocols.tealenet.local_node import TealeLocalNode
from shoal.protocols.tealenet.peer import LAN
from shoal.protocols.tealenet.peer_state import PeerLiveness, liveness_after

RUN = RunJob(
    JobId("job"), LeaseNumber(1), Chat("m", ({"role": "user", "content": "hi"},))
)


ROLES = ["coordinator", "worker"]


def joined_mac() -> ForeignPeer:
    mac = ForeignPeer(local_coordinator("a", offers=(OFFER,)))
    mac.deliver(hello())
    mac.wait(0.2)
    mac.deliver(heartbeat())
    mac.drain()
    return mac


@recorded("lan_health")
def test_liveness_matches_real_peers(case: Case) -> None:
    before = PeerLiveness(case["status"])

    after = liveness_after(case["seconds_since_heartbeat"], LAN)

    assert (after.value if after is not before else None) == case["becomes"]


def test_a_silent_peer_becomes_unfit_and_is_disconnected() -> None:
    mac = joined_mac()

    mac.wait(15.0)
    assert not mac.end.messages(LoadChanged)
    mac.wait(0.1)
    assert mac.end.messages(LoadChanged) == [LoadChanged(WorkerLoad("silent for 15 s"))]
    mac.deliver(b'{"modelQuery":{"_0":{"modelID":"m"}}}')  # no sign of life
    mac.wait(14.8)
    assert mac.end.closed is None
    mac.wait(0.2)

    assert mac.end.closed == "silent for 30 s"
    assert len(mac.end.messages(LoadChanged)) == 1


def test_a_peer_that_waits_for_an_answer_may_be_silent() -> None:
    peer = joined_mac()
    peer.deliver(inference_request())
    (run,) = peer.end.messages(RunJob)

    peer.wait(100.0)
    assert peer.end.closed is None
    peer.send(Completed(run.job_id, run.lease))
    peer.wait(31.0)

    assert peer.end.closed == "silent for 30 s"


def test_a_peer_that_writes_an_answer_may_send_nothing_else() -> None:
    peer = joined_mac()
    request_id = submitted_request(peer)

    for _ in range(5):
        peer.deliver(encoded(chunk(request_id, "on and on ")), after=20.0)
    assert peer.end.closed is None
    peer.wait(61.0)

    assert peer.end.closed == "silent for 30 s"


def test_a_silent_peer_that_has_a_job_is_lost_with_it() -> None:
    mac = joined_mac()
    mac.deliver(inference_request())
    submitted_request(mac)

    mac.wait(31.0)

    assert mac.end.closed == "silent for 30 s"


def test_a_heartbeat_after_silence_makes_a_peer_fit_again() -> None:
    mac = joined_mac()
    mac.wait(16.0)

    mac.deliver(HeartbeatAck(MAC, 0.0, "nominal", 100, (), False, 0))

    assert mac.end.messages(LoadChanged)[-1] == LoadChanged(WorkerLoad())
    mac.wait(14.0)
    assert len(mac.end.messages(LoadChanged)) == 2


def test_heartbeats_are_periodic_and_acknowledged() -> None:
    mac = joined_mac()

    mac.wait(20.0)
    beats = [payload for kind, payload in mac.drain() if kind == "heartbeat"]
    mac.deliver(heartbeat())
    ((kind, ack),) = mac.drain()

    assert len(beats) == 4
    assert kind == "heartbeatAck"
    # As in the document: the state of the responder.
    assert ack["loadedModels"] == ["m"]
    assert ack["deviceID"] == beats[0]["deviceID"]
    assert "organizationID" not in ack


@pytest.mark.parametrize(
    ("given", "load"),
    [
        ({"thermal_level": "fair"}, WorkerLoad(speed=0.8, thermal=ThermalLevel.FAIR)),
        (
            {"thermal_level": "serious"},
            WorkerLoad("too hot: serious", thermal=ThermalLevel.SERIOUS),
        ),
        (
            {"thermal_level": "critical"},
            WorkerLoad("too hot: critical", thermal=ThermalLevel.CRITICAL),
        ),
        ({"throttle_level": 50}, WorkerLoad(speed=0.5, throttle=50)),
        (
            {"throttle_level": 50, "thermal_level": "fair"},
            WorkerLoad(speed=0.4, thermal=ThermalLevel.FAIR, throttle=50),
        ),
        ({"throttle_level": 0}, WorkerLoad(PAUSED, throttle=0)),
        ({"throttle_level": -3}, WorkerLoad(PAUSED, throttle=0)),
        ({"is_generating": True}, WorkerLoad(queued=1)),
        ({"queue_depth": 3}, WorkerLoad(queued=3)),
        ({"queue_depth": 2**50}, WorkerLoad(queued=10_000)),
    ],
)
def test_a_heartbeat_reports_the_load(given: dict[str, Any], load: WorkerLoad) -> None:
    mac = joined_mac()

    mac.deliver(heartbeat(**given))
    mac.deliver(heartbeat(**given))

    assert mac.end.messages(LoadChanged) == [LoadChanged(load)]


def joined_as(role: str) -> ForeignPeer:
    """Return the session of a Mac with a coordinator or a worker."""
    if role == "coordinator":
        return joined_mac()
    mac = ForeignPeer(local_worker("w"), dialled=True)
    mac.deliver(hello_ack())
    mac.deliver(heartbeat())
    mac.drain()
    return mac


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("load", "told"),
    [
        (WorkerLoad(), (0, False)),
        (WorkerLoad(full=True), (0, True)),
        (WorkerLoad(full=True, waiting=3), (3, True)),
    ],
)
def test_the_depth_counts_jobs_that_wait_and_generating_means_no_free_slot(
    role: str, load: WorkerLoad, told: tuple[int, bool]
) -> None:
    mac = joined_as(role)

    mac.wait(2.0)
    mac.send(LoadChanged(load))
    mac.wait(5.0)

    kind, beat = mac.drain()[-1]
    assert kind == "heartbeat"
    assert (beat["queueDepth"], beat["isGenerating"]) == told


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("load", "told", "eligible"),
    [
        (machine_load(ThermalLevel.NOMINAL), ("nominal", 100), True),
        (machine_load(ThermalLevel.FAIR, 50), ("fair", 50), True),
        (machine_load(ThermalLevel.SERIOUS), ("serious", 100), False),
        (machine_load(ThermalLevel.CRITICAL, 1), ("critical", 1), False),
        (machine_load(ThermalLevel.NOMINAL, 0), ("nominal", 0), False),
        (WorkerLoad("its engine restarts"), ("nominal", 0), False),
    ],
)
def test_heat_and_throttle_are_told_in_the_words_of_the_document(
    role: str, load: WorkerLoad, told: tuple[str, int], eligible: bool
) -> None:
    mac = joined_as(role)

    mac.wait(2.0)
    mac.send(LoadChanged(load))
    mac.wait(5.0)

    kind, beat = mac.drain()[-1]
    assert kind == "heartbeat"
    assert (beat["thermalLevel"], beat["throttleLevel"]) == told
    assert is_eligible(beat, "m") is eligible


@pytest.mark.parametrize("peer", [local_worker("w"), local_coordinator("b")])
def test_jobs_of_others_at_a_full_pool_or_worker_count_as_load(
    peer: TealeLocalNode,
) -> None:
    pair = PeerPair(peer, local_coordinator("a")).until(2.0)

    pair.dialler.send(LoadChanged(WorkerLoad(full=True)), 2.0)
    pair.until(4.0)
    pair.dialler.send(LoadChanged(WorkerLoad(full=True, waiting=2)), 4.0)
    pair.until(6.0)

    loads = pair.acceptor.messages(LoadChanged)
    assert [each.load.queued for each in loads] == [1, 2]


def test_own_jobs_do_not_count_as_load() -> None:
    mac = joined_mac()
    mac.send(RUN)

    mac.deliver(heartbeat(is_generating=True, queue_depth=1))

    assert not mac.end.messages(LoadChanged)


def test_a_macs_heartbeat_ack_does_not_change_its_offers() -> None:
    mac = joined_mac()
    mac.deliver(heartbeat(queue_depth=3))

    mac.deliver(HeartbeatAck(MAC, 0.0, "nominal", 100, (), False, 0))

    assert len(mac.end.messages(OffersChanged)) == 1
    assert mac.end.messages(LoadChanged) == [LoadChanged(WorkerLoad(queued=3))]


def test_changes_of_models_are_reported() -> None:
    mac = joined_mac()

    for models in [("m",), ("m", "n"), ("m", "n"), ()]:
        mac.deliver(heartbeat(models))

    offered = [
        sorted(name for offer in each.offers for name in offer.models)
        for each in mac.end.messages(OffersChanged)
    ]
    assert offered == [["m"], ["m", "n"], []]


def test_changes_are_sent_at_once_within_a_rate_limit() -> None:
    mac = joined_mac()
    mac.wait(2.0)
    mac.drain()

    mac.send(OffersChanged(()))
    assert [p["loadedModels"] for _, p in mac.drain()] == [[]]
    for _ in range(100):
        mac.send(LoadChanged(WorkerLoad(queued=1)))
        mac.send(LoadChanged(WorkerLoad(queued=4, waiting=2, full=True)))
    assert mac.drain() == []
    mac.wait(1.0)

    ((_, beat),) = mac.drain()
    assert (beat["queueDepth"], beat["isGenerating"]) == (2, True)


def test_running_jobs_do_not_make_a_pool_with_free_slots_look_busy() -> None:
    mac = joined_mac()
    mac.wait(2.0)
    mac.drain()

    mac.send(LoadChanged(WorkerLoad(queued=3)))

    ((_, beat),) = mac.drain()
    assert (beat["queueDepth"], beat["isGenerating"]) == (0, False)
    assert is_eligible(beat, "m")


def test_a_peer_that_may_not_submit_gets_no_load_changes() -> None:
    local = local_coordinator("a", offers=(OFFER,), admission=require_token("t"))
    pair = PeerPair(local, local_worker("w"), configured=True).joined()
    sent = len(pair.dialler.sent)

    outputs = pair.dialler.session.send(LoadChanged(WorkerLoad(queued=2)), 2.0)

    assert list(outputs) == []
    assert len(pair.dialler.sent) == sent


def test_a_draining_peer_offers_no_models() -> None:
    mac = joined_mac()

    mac.send(Draining("leaving"))

    ((_, beat),) = mac.drain()
    assert beat["loadedModels"] == []


def test_a_worker_whose_slots_are_all_taken_is_generating() -> None:
    pair = PeerPair(local_coordinator("a"), local_worker("w")).joined()
    runs = [RunJob(JobId(f"job{n}"), LeaseNumber(1), RUN.work) for n in range(2)]

    pair.until(2.0)
    for run in runs:
        pair.dialler.send(run, 2.0)
    pair.until(4.0)
    for run in pair.acceptor.messages(RunJob):
        done = Completed(run.job_id, run.lease)
        pair.acceptor.send(done, 4.0)
    pair.until(6.0)

    busy = [
        p["isGenerating"] for k, p in pair.acceptor.sent_messages if k == "heartbeat"
    ]
    assert [each for each, _ in groupby(busy)] == [False, True, False]
