"""How a peer is doing, by its heartbeats and by its silence."""

from itertools import groupby
from typing import Any

import pytest

from protocols.tealenet.peers import (
    MAC,
    OFFER,
    ForeignPeer,
    PeerPair,
    coordinator_side,
    heartbeat,
    hello,
    worker_side,
)
from protocols.tealenet.recordings import Case, recorded
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import (
    Completed,
    Draining,
    Event,
    HealthReported,
    LoadChanged,
    OffersChanged,
    RunJob,
)
from shoal.domain.work import Chat
from shoal.domain.worker import MachineHealth, WorkerLoad
from shoal.protocols.tealenet.codec.messages import HeartbeatAck
from shoal.protocols.tealenet.link_profile import LAN
from shoal.protocols.tealenet.peer_state import PeerLiveness, liveness_after

RUN = RunJob(
    JobId("job"), LeaseNumber(1), Chat("m", ({"role": "user", "content": "hi"},))
)


def met_mac() -> ForeignPeer:
    mac = ForeignPeer(coordinator_side("a", offers=(OFFER,)))
    mac.say(hello())
    mac.wait(0.2)
    mac.say(heartbeat())
    _ = mac.said
    return mac


@recorded("lan_health")
def test_silence_means_what_it_means_to_real_peers(case: Case) -> None:
    before = PeerLiveness(case["status"])

    after = liveness_after(case["seconds_since_heartbeat"], LAN)

    assert (after.value if after is not before else None) == case["becomes"]


def test_a_silent_peer_gets_nothing_and_then_is_hung_up_on() -> None:
    mac = met_mac()

    mac.wait(15.0)
    assert not mac.end.of(LoadChanged)
    mac.wait(0.1)
    assert mac.end.of(LoadChanged) == [LoadChanged(WorkerLoad("silent for 15 s"))]
    mac.say(b'{"modelQuery":{"_0":{"modelID":"m"}}}')  # which is no sign of life
    mac.wait(14.8)
    assert mac.end.closed is None
    mac.wait(0.2)

    assert mac.end.closed == "silent for 30 s"
    assert len(mac.end.of(LoadChanged)) == 1


def test_a_heartbeat_after_silence_makes_a_peer_fit_again() -> None:
    mac = met_mac()
    mac.wait(16.0)

    mac.say(HeartbeatAck(MAC, 0.0, "nominal", 100, (), False, 0))

    assert mac.end.of(LoadChanged)[-1] == LoadChanged(WorkerLoad())
    mac.wait(14.0)
    assert len(mac.end.of(LoadChanged)) == 2


def test_heartbeats_are_sent_in_time_and_those_of_macs_are_answered() -> None:
    mac = met_mac()

    mac.wait(20.0)
    beats = [payload for kind, payload in mac.said if kind == "heartbeat"]
    mac.say(heartbeat())
    ((kind, ack),) = mac.said

    assert len(beats) == 4
    assert kind == "heartbeatAck"
    assert ack["loadedModels"] == ["m"]  # the document: how the responder is
    assert ack["deviceID"] == beats[0]["deviceID"]
    assert "organizationID" not in ack


def test_between_two_shoal_peers_one_heartbeat_serves_both() -> None:
    two = PeerPair(worker_side("w"), coordinator_side("a")).settle()

    two.until(60.0)

    kinds = [kind for end in (two.dialler, two.acceptor) for kind, _ in end.said]
    assert kinds.count("heartbeat") <= 2 + 12
    assert two.dialler.closed is two.acceptor.closed is None
    assert not two.acceptor.of(LoadChanged)


@pytest.mark.parametrize(
    ("given", "condition"),
    [
        ({"thermal_level": "fair"}, WorkerLoad(speed=0.8)),
        ({"thermal_level": "serious"}, WorkerLoad("too hot: serious")),
        ({"thermal_level": "critical"}, WorkerLoad("too hot: critical")),
        ({"throttle_level": 50}, WorkerLoad(speed=0.5)),
        (
            {"throttle_level": 50, "thermal_level": "fair"},
            WorkerLoad(speed=0.4),
        ),
        ({"throttle_level": 0}, WorkerLoad("throttled to a standstill")),
        ({"throttle_level": -3}, WorkerLoad("throttled to a standstill")),
        ({"is_generating": True}, WorkerLoad(queued=1)),
        ({"queue_depth": 3}, WorkerLoad(queued=3)),
        ({"queue_depth": 2**50}, WorkerLoad(queued=10_000)),
    ],
)
def test_a_heartbeat_reports_the_load(
    given: dict[str, Any], condition: WorkerLoad
) -> None:
    mac = met_mac()

    mac.say(heartbeat(**given))
    mac.say(heartbeat(**given))

    assert mac.end.of(LoadChanged) == [LoadChanged(condition)]


def test_what_a_mac_does_for_us_is_not_counted_as_others_work() -> None:
    mac = met_mac()
    mac.send(RUN)

    mac.say(heartbeat(is_generating=True, queue_depth=1))

    assert not mac.end.of(LoadChanged)


def test_a_macs_heartbeat_ack_does_not_change_its_offers() -> None:
    mac = met_mac()
    mac.say(heartbeat(queue_depth=3))

    mac.say(HeartbeatAck(MAC, 0.0, "nominal", 100, (), False, 0))

    assert len(mac.end.of(OffersChanged)) == 1
    assert mac.end.of(LoadChanged) == [LoadChanged(WorkerLoad(queued=3))]


def test_changes_of_models_are_reported() -> None:
    mac = met_mac()

    for models in [("m",), ("m", "n"), ("m", "n"), ()]:
        mac.say(heartbeat(models))

    offered = [
        sorted(name for offer in each.offers for name in offer.models)
        for each in mac.end.of(OffersChanged)
    ]
    assert offered == [["m"], ["m", "n"], []]


def test_changes_are_sent_at_once_within_a_rate_limit() -> None:
    mac = met_mac()
    mac.wait(2.0)
    _ = mac.said

    mac.send(OffersChanged(()))
    assert [p["loadedModels"] for _, p in mac.said] == [[]]
    for _ in range(100):
        mac.send(LoadChanged(WorkerLoad(queued=1)))
        mac.send(LoadChanged(WorkerLoad(queued=2)))
    assert mac.said == []
    mac.wait(1.0)

    ((_, beat),) = mac.said
    assert (beat["queueDepth"], beat["isGenerating"]) == (2, True)


def test_a_peer_that_may_not_submit_gets_no_load_changes() -> None:
    two = PeerPair(worker_side("w"), coordinator_side("a", offers=(OFFER,))).settle()
    said = len(two.acceptor.sent)

    issued = two.acceptor.conversation.send(LoadChanged(WorkerLoad(queued=2)), 2.0)

    assert list(issued) == []
    assert len(two.acceptor.sent) == said


def test_the_state_of_a_shoal_peer_is_reported_once() -> None:
    two = PeerPair(worker_side("w"), coordinator_side("a")).settle()
    said = two.dialler.conversation
    words: list[Event] = [
        HealthReported(MachineHealth(50.0, 25.0, 1)),
        LoadChanged(WorkerLoad("too hot")),
        Draining("leaving"),
        Draining("leaving"),
    ]

    for number, word in enumerate(words):
        two.dialler.take(said.send(word, 2.0 + number))
    two.until(30.0)

    heard = [each for each in two.acceptor.heard if isinstance(each, type_of(words))]
    assert heard == [
        HealthReported(MachineHealth(50.0, 25.0, 1)),
        LoadChanged(WorkerLoad("too hot")),
        Draining("leaving"),
    ]


def type_of(words: list[Event]) -> tuple[type, ...]:
    return tuple({type(word) for word in words})


def test_a_draining_peer_offers_no_models_to_plain_peers() -> None:
    mac = met_mac()

    mac.send(Draining("leaving"))

    ((_, beat),) = mac.said
    assert beat["loadedModels"] == []


def test_a_worker_whose_slots_are_all_taken_is_generating() -> None:
    two = PeerPair(coordinator_side("a"), worker_side("w")).settle()
    runs = [RunJob(JobId(f"job{n}"), LeaseNumber(1), RUN.work) for n in range(2)]

    two.until(2.0)
    for run in runs:
        two.dialler.take(two.dialler.conversation.send(run, 2.0))
    two.until(4.0)
    for run in two.acceptor.of(RunJob):
        done = Completed(run.job_id, run.lease)
        two.acceptor.take(two.acceptor.conversation.send(done, 4.0))
    two.until(6.0)

    busy = [p["isGenerating"] for k, p in two.acceptor.said if k == "heartbeat"]
    assert [each for each, _ in groupby(busy)] == [False, True, False]
