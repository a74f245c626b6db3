"""Handshakes, admission and duplicate connections on the local network."""

from dataclasses import replace
from uuid import UUID

import pytest

from protocols.contexts import require_token
from protocols.tealenet.peers import (
    MAC,
    OFFER,
    REQUEST,
    ForeignPeer,
    PeerPair,
    heartbeat,
    hello,
    hello_ack,
    inference_request,
    local_coordinator,
    local_worker,
    signer,
)
from protocols.tealenet.recordings import Case, recorded
from shoal.domain.errors import Unavailable
from shoal.domain.vocabulary import Dismiss, OffersChanged, RunJob
from shoal.protocols.seam.peer_session import PeerJoined
from shoal.protocols.tealenet.admission import passcodes_match
from shoal.protocols.tealenet.codec.messages import HeartbeatAck
from shoal.protocols.tealenet.codec.scalars import passcode_hash
from shoal.protocols.tealenet.handshake import DeviceConnections
from shoal.protocols.tealenet.local_node import device_id
from shoal.protocols.tealenet.peer import LAN, TealeConnection


@recorded("passcode_check")
def test_passcode_checks_match_real_peers(case: Case) -> None:
    local, remote = case["local"], case["remote"]

    assert passcodes_match(local, remote) is case["match"]


@recorded("lan_duplicate_connection")
def test_the_same_connection_is_kept_as_by_real_peers(case: Case) -> None:
    connections = DeviceConnections(case["local_id"].upper(), LAN.disconnected_after)
    remote = case["remote_id"].upper()
    newer = case["new_connection_is"] == "outbound"
    old = connections.claim(remote, outbound=not newer, now=0.0)

    new = connections.claim(remote, outbound=newer, now=1.0)

    assert old is not None
    assert (new is not None) is (case["keeps"] == "new")


def test_a_newer_connection_from_the_same_device_replaces_the_older() -> None:
    connections = DeviceConnections("A", LAN.disconnected_after)

    old = connections.claim("B", outbound=False, now=0.0)
    new = connections.claim("B", outbound=False, now=1.0)
    assert old is not None
    assert new is not None
    connections.release(old)

    # A is the smaller id.
    assert connections.claim("B", outbound=True, now=2.0) is not None
    assert connections.claim("B", outbound=False, now=3.0) is None


def test_a_silent_connection_can_be_replaced() -> None:
    connections = DeviceConnections("A", LAN.disconnected_after)
    connections.claim("B", outbound=True, now=0.0)

    assert connections.claim("B", outbound=False, now=30.0) is None
    assert connections.claim("B", outbound=False, now=30.1) is not None


def test_silent_connections_are_evicted() -> None:
    connections = DeviceConnections("A", LAN.disconnected_after)

    for number in range(10_000):
        connections.claim(f"B{number}", outbound=False, now=float(number))

    assert len(connections._connections) < 200


def test_a_device_id_depends_on_the_key_alone() -> None:
    first = device_id(signer("a"), "one name")

    assert str(UUID(first)).upper() == first
    assert first == first.upper() == device_id(signer("a"), "another name")
    assert first != device_id(signer("b"), "one name")
    assert device_id(None, "one") != device_id(None, "another")


def test_two_pools_join_each_other() -> None:
    pair = PeerPair(
        local_coordinator("a", offers=(OFFER,)), local_coordinator("b")
    ).joined()

    (joined,) = pair.acceptor.messages(PeerJoined)
    assert joined.name == device_id(signer("a"), "a")
    assert joined.submits_jobs
    (offered,) = pair.acceptor.messages(OffersChanged)
    assert [offer.models for offer in offered.offers] == [{"m"}]
    (joined,) = pair.dialler.messages(PeerJoined)
    assert joined.name == device_id(signer("b"), "b")
    assert pair.dialler.messages(OffersChanged) == [OffersChanged(())]


def test_only_greetings_are_sent_before_the_first_heartbeat() -> None:
    pair = PeerPair(
        local_coordinator("a", offers=(OFFER,)), local_coordinator("b", offers=(OFFER,))
    ).joined()

    kinds = [
        [kind for kind, _ in end.sent_messages] for end in (pair.dialler, pair.acceptor)
    ]

    assert kinds[0][:2] == ["hello", "heartbeat"]
    assert kinds[1][:2] == ["helloAck", "heartbeat"]
    assert set(kinds[0][2:]) == set(kinds[1][2:]) == {"heartbeatAck"}


def test_hello_ack_for_a_mac_is_delayed() -> None:
    mac = ForeignPeer(local_coordinator("a"))

    mac.deliver(hello())
    assert mac.drain() == []
    mac.wait(0.14)
    assert mac.drain() == []
    mac.wait(0.02)

    (ack, beat) = mac.drain()
    assert ack[0] == "helloAck"
    assert "clusterPasscodeHash" not in ack[1]
    assert beat[0] == "heartbeat"
    assert not mac.end.messages(PeerJoined)
    mac.deliver(heartbeat())
    (joined,) = mac.end.messages(PeerJoined)
    assert (joined.name, joined.cancels, joined.submits_jobs) == (MAC, False, True)
    assert [offer.models for offer in mac.end.messages(OffersChanged)[0].offers] == [
        {"m"}
    ]


def test_hello_ack_without_a_heartbeat_is_repeated_once() -> None:
    mac = ForeignPeer(local_coordinator("a"))
    mac.deliver(hello())
    mac.wait(0.2)
    assert [kind for kind, _ in mac.drain()] == ["helloAck", "heartbeat"]

    mac.wait(6.0)
    assert [kind for kind, _ in mac.drain()] == ["heartbeat", "helloAck"]
    mac.wait(12.0)
    assert {kind for kind, _ in mac.drain()} == {"heartbeat"}
    mac.wait(12.0)

    assert mac.end.closed == "no heartbeat within 30 s of helloAck"


def test_hello_is_repeated_until_it_is_answered() -> None:
    mac = ForeignPeer(local_coordinator("a"), dialled=True)
    assert [kind for kind, _ in mac.drain()] == ["hello"]

    mac.wait(4.5)
    # Twice, in both forms.
    assert [kind for kind, _ in mac.drain()] == 4 * ["hello"]
    mac.deliver(hello_ack())
    assert [kind for kind, _ in mac.drain()] == ["heartbeat"]
    mac.deliver(heartbeat())

    assert [each.name for each in mac.end.messages(PeerJoined)] == [MAC]
    assert [kind for kind, _ in mac.drain()] == ["heartbeatAck"]


def test_a_connection_without_a_hello_is_closed() -> None:
    dialled, accepted = (
        ForeignPeer(local_coordinator("a"), dialled=True),
        ForeignPeer(local_coordinator("a")),
    )

    for mac in (dialled, accepted):
        mac.wait(10.0)

    assert dialled.end.closed == "no helloAck within 10 s"
    assert accepted.end.closed == "no hello within 10 s"
    assert dialled.end.session.deadline is None


def test_messages_before_the_handshake_and_repeated_greetings_are_ignored() -> None:
    mac = ForeignPeer(local_coordinator("a"))

    mac.deliver(heartbeat())
    mac.deliver(b'{"modelQuery":{"_0":{"modelID":"m"}}}')
    mac.deliver(hello_ack())
    assert (mac.drain(), mac.end.received) == ([], [])
    mac.deliver(hello())
    mac.deliver(hello(), after=0.2)  # as if the helloAck was lost
    mac.deliver(heartbeat())
    received = [*mac.end.received]
    mac.drain()
    mac.deliver(hello(device="AAAAAAAA-E29B-41D4-A716-446655440000"))

    assert mac.end.received == received
    assert mac.drain() == []


@pytest.mark.parametrize("early", [False, True])
def test_a_peer_without_a_heartbeat_joins_by_its_first_message(early: bool) -> None:
    peer = ForeignPeer(local_coordinator("a", offers=(OFFER,)))
    peer.deliver(hello())

    peer.deliver(inference_request(), after=0.0 if early else 0.2)

    assert [kind for kind, _ in peer.drain()] == ["helloAck", "heartbeat"]
    assert [each.name for each in peer.end.messages(PeerJoined)] == [MAC]
    (run,) = peer.end.messages(RunJob)
    assert run.job_id == REQUEST


def test_the_first_message_of_a_peer_that_was_dialled_may_be_a_request() -> None:
    peer = ForeignPeer(local_coordinator("a"), dialled=True)
    peer.deliver(hello_ack())

    peer.deliver(inference_request())

    assert isinstance(peer.end.received[0], PeerJoined)
    assert len(peer.end.messages(RunJob)) == 1


def test_a_first_request_that_is_invalid_is_refused() -> None:
    peer = ForeignPeer(local_coordinator("a"))
    peer.deliver(hello())
    peer.wait(0.2)
    peer.drain()

    peer.deliver(b'{"inferenceRequest":{"requestID":"%b"}}' % REQUEST.encode())

    assert [kind for kind, _ in peer.drain()] == ["inferenceError"]


def test_a_wrong_passcode_closes_the_connection_without_a_message() -> None:
    for expected, presented in (("right", "wrong"), ("right", None), (None, "any")):
        local = local_coordinator("a", passcode=expected or "")
        mac = ForeignPeer(local)

        mac.deliver(hello(passcode_hash(presented) if presented else None))

        assert mac.end.closed is not None
        assert "is not admitted" in mac.end.closed
        assert "passcode" in mac.end.closed
        assert mac.drain() == []


class CountingThrottle:
    """A throttle that blocks an address after two wrong passcodes."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def check(self, address: str) -> None:
        if self.failures.count(address) >= 2:
            raise Unavailable("too many wrong passcodes")

    def check_passcode(self, address: str) -> None:
        self.check(address)

    def failed(self, address: str) -> None:
        self.failures.append(address)


def test_repeated_wrong_passcodes_are_throttled() -> None:
    throttle = CountingThrottle()
    local = replace(local_coordinator("a", passcode="right"), throttle=throttle)

    def attempt(passcode: str, address: str) -> str | None:
        mac = ForeignPeer(local, connection=TealeConnection(False, address=address))
        mac.deliver(hello(passcode_hash(passcode)))
        return mac.end.closed

    for passcode in ("a", "b"):
        assert "another passcode" in str(attempt(passcode, "192.0.2.1"))

    assert "too many wrong passcodes" in str(attempt("right", "192.0.2.1"))
    assert attempt("right", "192.0.2.2") is None
    assert throttle.failures == ["192.0.2.1"] * 2


def test_an_absent_passcode_does_not_count_as_a_guess() -> None:
    throttle = CountingThrottle()
    local = replace(local_coordinator("a", passcode="right"), throttle=throttle)

    for greeting in (hello(), hello(passcode_hash("right"))):
        connection = TealeConnection(False, address="192.0.2.1")
        ForeignPeer(local, connection=connection).deliver(greeting)

    assert throttle.failures == []


def test_the_passcode_hash_is_sent_to_a_peer_that_presented_it() -> None:
    local = local_coordinator("a", passcode="right")

    pair = PeerPair(local_worker("w", passcode="right"), local).joined()

    hashed = passcode_hash("right").encode()
    assert any(hashed in data for data in pair.acceptor.sent)
    assert pair.acceptor.messages(PeerJoined)


def test_a_dialled_peer_needs_the_passcode_too() -> None:
    mac = ForeignPeer(local_coordinator("a", passcode="right"), dialled=True)
    ((_, payload),) = mac.drain()
    assert payload["clusterPasscodeHash"] == passcode_hash("right")

    mac.deliver(hello_ack(passcode_hash("wrong")))

    assert mac.end.closed is not None
    assert "another passcode" in mac.end.closed


def test_a_configured_peer_may_serve_but_not_submit() -> None:
    local = local_coordinator("a", admission=require_token("t"))
    named = PeerPair(local, local_coordinator("b", open=True), configured=True).joined()
    unnamed = PeerPair(local, local_coordinator("b", open=True)).joined()

    assert [joined.submits_jobs for joined in named.dialler.messages(PeerJoined)] == [
        False
    ]
    assert not unnamed.dialler.messages(PeerJoined)
    assert unnamed.dialler.closed is not None
    assert "--tealenet-open" in unnamed.dialler.closed


def test_a_connection_to_the_same_device_is_closed() -> None:
    pair = PeerPair(local_coordinator("a"), local_coordinator("a")).joined()

    assert pair.acceptor.closed is not None
    assert "this device itself" in pair.acceptor.closed


def test_a_dismissed_peer_is_disconnected_without_a_message() -> None:
    pair = PeerPair(local_worker("w"), local_coordinator("a")).joined()
    sent = len(pair.acceptor.sent)

    pair.acceptor.send(Dismiss("replaced"), 1.0)

    assert pair.acceptor.closed == "replaced"
    assert len(pair.acceptor.sent) == sent


def test_model_that_a_worker_has_loaded_is_offered_at_once() -> None:
    worker = replace(local_worker("w"), offers=())
    pair = PeerPair(worker, local_coordinator("a")).joined()
    assert pair.acceptor.messages(OffersChanged) == [OffersChanged(())]

    pair.dialler.send(OffersChanged((OFFER,)), pair.now)
    pair.settle()

    *_, changed = pair.acceptor.messages(OffersChanged)
    assert [offer.models for offer in changed.offers] == [{"m"}]


def test_a_second_connection_is_closed_after_its_hello_ack() -> None:
    small, large = sorted(
        [local_coordinator("a"), local_coordinator("b")], key=lambda o: o.device_id
    )
    of_small, of_large = (
        DeviceConnections(each.device_id, LAN.disconnected_after)
        for each in (small, large)
    )
    first = PeerPair(small, large, device_connections=(of_small, of_large)).joined()

    second = PeerPair(large, small, device_connections=(of_large, of_small)).joined()

    assert first.dialler.messages(PeerJoined)
    assert first.acceptor.messages(PeerJoined)
    assert [kind for kind, _ in second.acceptor.sent_messages] == ["helloAck"]
    assert second.acceptor.closed is not None
    assert "preferred" in second.acceptor.closed
    assert second.dialler.closed is not None


def test_a_preferred_second_connection_replaces_the_first() -> None:
    small, large = sorted(
        [local_coordinator("a"), local_coordinator("b")], key=lambda o: o.device_id
    )
    of_small, of_large = (
        DeviceConnections(each.device_id, LAN.disconnected_after)
        for each in (small, large)
    )
    PeerPair(large, small, device_connections=(of_large, of_small)).joined()

    second = PeerPair(small, large, device_connections=(of_small, of_large)).joined()

    # The coordinator dismisses the older one.
    assert second.dialler.messages(PeerJoined)
    assert second.acceptor.messages(PeerJoined)


def test_a_heartbeat_ack_counts_as_the_first_heartbeat() -> None:
    mac = ForeignPeer(local_coordinator("a"))
    mac.deliver(hello())
    mac.wait(0.2)

    mac.deliver(HeartbeatAck(MAC, 0.0, "nominal", 100, (), False, 0))

    assert mac.end.messages(PeerJoined)
    assert [o.models for o in mac.end.messages(OffersChanged)[-1].offers] == [{"m"}]
