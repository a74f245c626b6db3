"""How peers come to know each other on the local network."""

from dataclasses import replace
from uuid import UUID

import msgspec
import pytest

from protocols.tealenet.peers import (
    MAC,
    OFFER,
    ForeignPeer,
    PeerPair,
    coordinator_side,
    heartbeat,
    hello,
    hello_ack,
    signer,
    worker_side,
)
from protocols.tealenet.recordings import Case, recorded
from shoal.domain.errors import NotAdmitted, Unavailable
from shoal.domain.vocabulary import Dismiss, OffersChanged
from shoal.protocols.seam.admission import AdmissionGrant, JoinRequest, require_token
from shoal.protocols.seam.peer_session import PeerJoined
from shoal.protocols.tealenet.admission import passcodes_match
from shoal.protocols.tealenet.codec.extension import (
    IntroductionExtension,
    write_extension,
)
from shoal.protocols.tealenet.codec.messages import HeartbeatAck, Hello
from shoal.protocols.tealenet.codec.scalars import passcode_hash
from shoal.protocols.tealenet.handshake import DeviceConnections
from shoal.protocols.tealenet.link_profile import LAN
from shoal.protocols.tealenet.local_node import device_id
from shoal.protocols.tealenet.peer import TealeConnection


@recorded("passcode_check")
def test_passcodes_are_the_same_as_for_real_peers(case: Case) -> None:
    local, remote = case["local"], case["remote"]

    assert passcodes_match(local, remote) is case["match"]


@recorded("lan_duplicate_connection")
def test_of_two_connections_the_one_stays_that_real_peers_keep(case: Case) -> None:
    desk = DeviceConnections(case["local_id"].upper(), LAN.disconnected_after)
    remote = case["remote_id"].upper()
    newer = case["new_connection_is"] == "outbound"
    old = desk.claim(remote, outbound=not newer, now=0.0)

    new = desk.claim(remote, outbound=newer, now=1.0)

    assert old is not None
    assert (new is not None) is (case["keeps"] == "new")


def test_a_newer_connection_from_the_same_device_replaces_the_older() -> None:
    desk = DeviceConnections("A", LAN.disconnected_after)

    old = desk.claim("B", outbound=False, now=0.0)
    new = desk.claim("B", outbound=False, now=1.0)
    assert old is not None
    assert new is not None
    desk.release(old)

    assert desk.claim("B", outbound=True, now=2.0) is not None  # A is the smaller
    assert desk.claim("B", outbound=False, now=3.0) is None


def test_a_device_that_has_been_silent_for_long_loses_its_seat() -> None:
    desk = DeviceConnections("A", LAN.disconnected_after)
    desk.claim("B", outbound=True, now=0.0)

    assert desk.claim("B", outbound=False, now=30.0) is None
    assert desk.claim("B", outbound=False, now=30.1) is not None


def test_seats_do_not_pile_up() -> None:
    desk = DeviceConnections("A", LAN.disconnected_after)

    for number in range(10_000):
        desk.claim(f"B{number}", outbound=False, now=float(number))

    assert len(desk._connections) < 200


def test_a_device_id_is_always_the_same_for_the_same_key() -> None:
    first = device_id(signer("a"), "one name")

    assert str(UUID(first)).upper() == first
    assert first == first.upper() == device_id(signer("a"), "another name")
    assert first != device_id(signer("b"), "one name")
    assert device_id(None, "one") != device_id(None, "another")


def test_two_shoal_peers_join_each_other() -> None:
    two = PeerPair(
        coordinator_side("a", offers=(OFFER,)), coordinator_side("b")
    ).settle()

    (met,) = two.acceptor.of(PeerJoined)
    assert met.name == device_id(signer("a"), "a")
    assert met.submits_jobs
    assert met.cancels
    (offered,) = two.acceptor.of(OffersChanged)
    (offer,) = offered.offers
    assert offer.models == {"m"}
    assert offer.neighbour
    assert offer.proven
    assert offer.public_key == signer("a").public_key.hex()
    (met,) = two.dialler.of(PeerJoined)
    assert met.name == device_id(signer("b"), "b")
    assert two.dialler.of(OffersChanged) == [OffersChanged(())]


def test_only_greetings_are_sent_before_the_first_heartbeat() -> None:
    two = PeerPair(
        coordinator_side("a", offers=(OFFER,)), coordinator_side("b", offers=(OFFER,))
    ).settle()

    kinds = [[kind for kind, _ in end.said] for end in (two.dialler, two.acceptor)]

    assert kinds[0][:2] == ["hello", "heartbeat"]
    assert kinds[1][:2] == ["helloAck", "heartbeat"]
    assert set(kinds[0][2:]) == set(kinds[1][2:]) == {"heartbeatAck"}


def test_hello_ack_for_a_mac_is_delayed() -> None:
    mac = ForeignPeer(coordinator_side("a"))

    mac.say(hello())
    assert mac.said == []
    mac.wait(0.14)
    assert mac.said == []
    mac.wait(0.02)

    (ack, beat) = mac.said
    assert ack[0] == "helloAck"
    assert "clusterPasscodeHash" not in ack[1]
    assert beat[0] == "heartbeat"
    assert not mac.end.of(PeerJoined)
    mac.say(heartbeat())
    (met,) = mac.end.of(PeerJoined)
    assert (met.name, met.cancels, met.submits_jobs) == (MAC, False, True)
    assert [offer.models for offer in mac.end.of(OffersChanged)[0].offers] == [{"m"}]


def test_hello_ack_without_a_heartbeat_is_repeated_once() -> None:
    mac = ForeignPeer(coordinator_side("a"))
    mac.say(hello())
    mac.wait(0.2)
    assert [kind for kind, _ in mac.said] == ["helloAck", "heartbeat"]

    mac.wait(6.0)
    assert [kind for kind, _ in mac.said] == ["heartbeat", "helloAck"]
    mac.wait(12.0)
    assert {kind for kind, _ in mac.said} == {"heartbeat"}
    mac.wait(12.0)

    assert mac.end.closed == "no heartbeat within 30 s of helloAck"


def test_hello_is_repeated_until_it_is_answered() -> None:
    mac = ForeignPeer(coordinator_side("a"), dialled=True)
    assert [kind for kind, _ in mac.said] == ["hello"]

    mac.wait(4.5)
    assert [kind for kind, _ in mac.said] == ["hello", "hello"]
    mac.say(hello_ack())
    assert [kind for kind, _ in mac.said] == ["heartbeat"]
    mac.say(heartbeat())

    assert [each.name for each in mac.end.of(PeerJoined)] == [MAC]
    assert [kind for kind, _ in mac.said] == ["heartbeatAck"]


def test_a_connection_without_a_hello_is_closed() -> None:
    dialled, accepted = (
        ForeignPeer(coordinator_side("a"), dialled=True),
        ForeignPeer(coordinator_side("a")),
    )

    for mac in (dialled, accepted):
        mac.wait(10.0)

    assert dialled.end.closed == "no helloAck within 10 s"
    assert accepted.end.closed == "no hello within 10 s"
    assert dialled.end.conversation.deadline is None


def test_messages_before_the_handshake_and_repeated_greetings_are_ignored() -> None:
    mac = ForeignPeer(coordinator_side("a"))

    mac.say(heartbeat())
    mac.say(b'{"modelQuery":{"_0":{"modelID":"m"}}}')
    mac.say(hello_ack())
    assert (mac.said, mac.end.heard) == ([], [])
    mac.say(hello())
    mac.say(hello(), after=0.2)  # our answer was lost
    mac.say(heartbeat())
    heard = [*mac.end.heard]
    _ = mac.said
    mac.say(hello(device="AAAAAAAA-E29B-41D4-A716-446655440000"))

    assert mac.end.heard == heard
    assert mac.said == []


def test_a_wrong_passcode_closes_the_connection_without_a_message() -> None:
    for wanted, given in (("right", "wrong"), ("right", None), (None, "any")):
        own = coordinator_side("a", passcode=wanted or "")
        mac = ForeignPeer(own)

        mac.say(hello(passcode_hash(given) if given else None))

        assert mac.end.closed is not None
        assert "is not admitted" in mac.end.closed
        assert "passcode" in mac.end.closed
        assert mac.said == []


class Counting:
    """Counts wrong passcodes, and has enough after two."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def check(self, address: str) -> None:
        if self.failures.count(address) >= 2:
            raise Unavailable("guessed too often")

    def failed(self, address: str) -> None:
        self.failures.append(address)


def test_repeated_wrong_passcodes_are_throttled() -> None:
    guesses = Counting()
    own = replace(coordinator_side("a", passcode="right"), throttle=guesses)

    def tried(passcode: str, address: str) -> str | None:
        mac = ForeignPeer(own, caller=TealeConnection(False, address=address))
        mac.say(hello(passcode_hash(passcode)))
        return mac.end.closed

    for guess in ("a", "b"):
        assert "another passcode" in str(tried(guess, "192.0.2.1"))

    assert "guessed too often" in str(tried("right", "192.0.2.1"))
    assert tried("right", "192.0.2.2") is None
    assert guesses.failures == ["192.0.2.1"] * 2


def test_an_absent_passcode_or_a_token_does_not_count_as_a_guess() -> None:
    guesses = Counting()
    own = replace(
        coordinator_side("a", passcode="right", admission=require_token("t")),
        throttle=guesses,
    )
    for said in (hello(), hello(passcode_hash("right"))):
        ForeignPeer(own, caller=TealeConnection(False, address="192.0.2.1")).say(said)
    PeerPair(worker_side("w", token="t", passcode="wrong"), own).settle()

    assert guesses.failures == []


def test_a_dialled_peer_needs_the_passcode_too() -> None:
    mac = ForeignPeer(coordinator_side("a", passcode="right"), dialled=True)
    ((_, said),) = mac.said
    assert said["clusterPasscodeHash"] == passcode_hash("right")

    mac.say(hello_ack(passcode_hash("wrong")))

    assert mac.end.closed is not None
    assert "another passcode" in mac.end.closed


def test_the_passcode_hash_is_sent_only_to_peers_that_presented_it() -> None:
    own = coordinator_side("a", passcode="right", admission=require_token("t"))
    knows = PeerPair(worker_side("w", passcode="right"), own).settle()
    token = PeerPair(worker_side("w", token="t"), own).settle()
    bluff = PeerPair(worker_side("w", token="t", passcode="wrong"), own).settle()

    shown = passcode_hash("right")

    assert any(shown.encode() in data for data in knows.acceptor.sent)
    assert not any(shown.encode() in data for data in token.acceptor.sent)
    assert not any(shown.encode() in data for data in bluff.acceptor.sent)
    assert knows.acceptor.of(PeerJoined)
    assert token.acceptor.of(PeerJoined)
    assert bluff.acceptor.of(PeerJoined)


def test_a_worker_with_a_token_may_serve_but_not_submit() -> None:
    def admission(applicant: JoinRequest) -> AdmissionGrant:
        require_token("t")(applicant)
        return AdmissionGrant("id", applicant.name)

    own = coordinator_side("a", admission=admission, offers=(OFFER,))

    two = PeerPair(worker_side("w", token="t"), own).settle()

    (met,) = two.acceptor.of(PeerJoined)
    assert (met.name, met.submits_jobs, met.grant) == (
        "w",
        False,
        AdmissionGrant("id", "w"),
    )
    (offered,) = two.acceptor.of(OffersChanged)
    (offer,) = offered.offers
    assert (offer.neighbour, offer.proven, offer.slots) == (False, True, 2)
    # What the coordinator can run is not for it.
    assert two.dialler.of(OffersChanged) == [OffersChanged(())]
    (met,) = two.dialler.of(PeerJoined)
    assert met.submits_jobs


@pytest.mark.parametrize("token", ["", "wrong"])
def test_an_unadmitted_worker_gets_the_reason(token: str) -> None:
    told: list[str] = []
    worker = replace(worker_side("w", token=token), on_rejected=told.append)

    two = PeerPair(worker, coordinator_side("a", admission=require_token("t"))).settle()

    assert two.acceptor.closed is not None
    assert "'w' is not admitted" in two.acceptor.closed
    assert told == [two.dialler.closed]
    assert "--token" in told[0]
    assert not two.dialler.of(PeerJoined)


def test_a_token_for_some_models_lets_those_in_alone() -> None:
    def admission(applicant: JoinRequest) -> AdmissionGrant:
        if not applicant.models <= {"m"}:
            raise NotAdmitted("The token is not for this model")
        return AdmissionGrant()

    other = replace(OFFER, models=frozenset({"other"}))
    some = replace(worker_side("w", token="t"), offers=(OFFER, other))
    none = replace(worker_side("w", token="t"), offers=(other,))

    two = PeerPair(some, coordinator_side("a", admission=admission)).settle()
    (offered,) = two.acceptor.of(OffersChanged)
    two.dialler.take(two.dialler.conversation.send(OffersChanged((other, OFFER)), 2.0))
    two.settle()
    refused = PeerPair(none, coordinator_side("a", admission=admission)).settle()

    assert [offer.models for offer in offered.offers] == [{"m"}]
    assert len(two.acceptor.of(OffersChanged)) == 1  # still the same
    assert refused.dialler.closed is not None
    assert "not for this model" in refused.dialler.closed


def test_a_peer_that_an_operator_named_may_serve_but_not_ask() -> None:
    own = coordinator_side("a", admission=require_token("t"))
    named = PeerPair(own, coordinator_side("b", open=True), named=True).settle()
    unnamed = PeerPair(own, coordinator_side("b", open=True)).settle()

    assert [met.submits_jobs for met in named.dialler.of(PeerJoined)] == [False]
    assert not unnamed.dialler.of(PeerJoined)
    assert unnamed.dialler.closed is not None
    assert "--tealenet-open" in unnamed.dialler.closed


def test_an_unproven_key_closes_the_connection() -> None:
    said = IntroductionExtension(version=1, role="worker", name="w", key="ab" * 32)
    peer = ForeignPeer(coordinator_side("a"))

    peer.say(replace_hello(hello(), said))
    peer.say(heartbeat())

    assert peer.end.closed == "the peer has not proved the key that it announces"
    assert not peer.end.of(PeerJoined)


def replace_hello(message: Hello, said: IntroductionExtension) -> Hello:
    return msgspec.structs.replace(message, shoal=write_extension(said))


def test_a_connection_to_oneself_is_ended() -> None:
    two = PeerPair(coordinator_side("a"), coordinator_side("a")).settle()

    assert two.acceptor.closed is not None
    assert "this device itself" in two.acceptor.closed


def test_a_dismissed_peer_gets_the_reason() -> None:
    told: list[str] = []
    worker = replace(worker_side("w"), on_rejected=told.append)
    two = PeerPair(worker, coordinator_side("a")).settle()

    two.acceptor.take(two.acceptor.conversation.send(Dismiss("replaced"), 1.0))
    two.settle()

    assert two.dialler.closed == "replaced"
    assert told == ["replaced"]


def test_a_second_connection_is_closed_after_its_hello_ack() -> None:
    small, large = sorted(
        [coordinator_side("a"), coordinator_side("b")], key=lambda o: o.device_id
    )
    desks = {
        o.device_id: DeviceConnections(o.device_id, LAN.disconnected_after)
        for o in (small, large)
    }
    small_desk, large_desk = desks[small.device_id], desks[large.device_id]
    first = PeerPair(small, large, desks=(small_desk, large_desk)).settle()

    second = PeerPair(large, small, desks=(large_desk, small_desk)).settle()

    assert first.dialler.of(PeerJoined)
    assert first.acceptor.of(PeerJoined)
    assert [kind for kind, _ in second.acceptor.said] == ["helloAck"]
    assert second.acceptor.closed is not None
    assert "preferred" in second.acceptor.closed
    assert second.dialler.closed is not None


def test_a_preferred_second_connection_takes_the_place_of_the_first() -> None:
    small, large = sorted(
        [coordinator_side("a"), coordinator_side("b")], key=lambda o: o.device_id
    )
    desks = {
        o.device_id: DeviceConnections(o.device_id, LAN.disconnected_after)
        for o in (small, large)
    }
    small_desk, large_desk = desks[small.device_id], desks[large.device_id]
    PeerPair(large, small, desks=(large_desk, small_desk)).settle()

    second = PeerPair(small, large, desks=(small_desk, large_desk)).settle()

    assert second.dialler.of(PeerJoined)  # whoever runs them dismisses the older
    assert second.acceptor.of(PeerJoined)


def test_a_heartbeat_ack_counts_as_the_first_heartbeat() -> None:
    mac = ForeignPeer(coordinator_side("a"))
    mac.say(hello())
    mac.wait(0.2)

    mac.say(HeartbeatAck(MAC, 0.0, "nominal", 100, (), False, 0))

    assert mac.end.of(PeerJoined)
    assert [o.models for o in mac.end.of(OffersChanged)[-1].offers] == [{"m"}]
