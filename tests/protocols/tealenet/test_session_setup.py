"""Handshakes, admission and duplicate connections on the local network."""

from dataclasses import replace
from uuid import UUID

import msgspec
import pytest

from protocols.contexts import require_token
from protocols.tealenet.peers import (
    BINDING,
    MAC,
    OFFER,
    ForeignPeer,
    PeerPair,
    heartbeat,
    hello,
    hello_ack,
    local_coordinator,
    local_worker,
    signer,
)
from protocols.tealenet.recordings import Case, recorded
from shoal.domain.errors import NotAdmitted, Unavailable
from shoal.domain.vocabulary import Dismiss, OffersChanged
from shoal.protocols.seam.admission import (
    AdmissionCheck,
    AdmissionGrant,
    JoinRequest,
)
from shoal.protocols.seam.peer_session import PeerJoined
from shoal.protocols.tealenet.admission import passcodes_match
from shoal.protocols.tealenet.codec.extension import (
    IntroductionExtension,
    write_extension,
)
from shoal.protocols.tealenet.codec.messages import HeartbeatAck, Hello, HelloAck
from shoal.protocols.tealenet.codec.scalars import passcode_hash
from shoal.protocols.tealenet.handshake import DeviceConnections
from shoal.protocols.tealenet.link_profile import LAN
from shoal.protocols.tealenet.local_node import device_id
from shoal.protocols.tealenet.peer import TealeConnection


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


def test_two_shoal_peers_join_each_other() -> None:
    pair = PeerPair(
        local_coordinator("a", offers=(OFFER,)), local_coordinator("b")
    ).settle()

    (joined,) = pair.acceptor.messages(PeerJoined)
    assert joined.name == device_id(signer("a"), "a")
    assert joined.submits_jobs
    assert joined.cancels
    (offered,) = pair.acceptor.messages(OffersChanged)
    (offer,) = offered.offers
    assert offer.models == {"m"}
    assert offer.neighbour
    assert offer.proven
    assert offer.public_key == signer("a").public_key.hex()
    (joined,) = pair.dialler.messages(PeerJoined)
    assert joined.name == device_id(signer("b"), "b")
    assert pair.dialler.messages(OffersChanged) == [OffersChanged(())]


def test_only_greetings_are_sent_before_the_first_heartbeat() -> None:
    pair = PeerPair(
        local_coordinator("a", offers=(OFFER,)), local_coordinator("b", offers=(OFFER,))
    ).settle()

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


def test_an_absent_passcode_or_a_token_does_not_count_as_a_guess() -> None:
    throttle = CountingThrottle()
    local = replace(
        local_coordinator("a", passcode="right", admission=require_token("t")),
        throttle=throttle,
    )
    for greeting in (hello(), hello(passcode_hash("right"))):
        ForeignPeer(
            local, connection=TealeConnection(False, address="192.0.2.1")
        ).deliver(greeting)
    PeerPair(local_worker("w", token="t", passcode="wrong"), local).settle()

    assert throttle.failures == []


def test_a_dialled_peer_needs_the_passcode_too() -> None:
    mac = ForeignPeer(local_coordinator("a", passcode="right"), dialled=True)
    ((_, payload),) = mac.drain()
    assert payload["clusterPasscodeHash"] == passcode_hash("right")

    mac.deliver(hello_ack(passcode_hash("wrong")))

    assert mac.end.closed is not None
    assert "another passcode" in mac.end.closed


def test_the_passcode_hash_is_sent_only_to_peers_that_presented_it() -> None:
    local = local_coordinator("a", passcode="right", admission=require_token("t"))
    insider = PeerPair(local_worker("w", passcode="right"), local).settle()
    token = PeerPair(local_worker("w", token="t"), local).settle()
    pretender = PeerPair(local_worker("w", token="t", passcode="wrong"), local).settle()

    hashed = passcode_hash("right")

    assert any(hashed.encode() in data for data in insider.acceptor.sent)
    assert not any(hashed.encode() in data for data in token.acceptor.sent)
    assert not any(hashed.encode() in data for data in pretender.acceptor.sent)
    assert insider.acceptor.messages(PeerJoined)
    assert token.acceptor.messages(PeerJoined)
    assert pretender.acceptor.messages(PeerJoined)


def test_a_worker_with_a_token_may_serve_but_not_submit() -> None:
    def admission(applicant: JoinRequest) -> AdmissionGrant:
        require_token("t")(applicant)
        return AdmissionGrant("id", applicant.name)

    local = local_coordinator("a", admission=admission, offers=(OFFER,))

    pair = PeerPair(local_worker("w", token="t"), local).settle()

    (joined,) = pair.acceptor.messages(PeerJoined)
    assert (joined.name, joined.submits_jobs, joined.grant) == (
        "w",
        False,
        AdmissionGrant("id", "w"),
    )
    (offered,) = pair.acceptor.messages(OffersChanged)
    (offer,) = offered.offers
    assert (offer.neighbour, offer.proven, offer.slots) == (False, True, 2)
    # It gets none of the coordinator's offers.
    assert pair.dialler.messages(OffersChanged) == [OffersChanged(())]
    (joined,) = pair.dialler.messages(PeerJoined)
    assert joined.submits_jobs


@pytest.mark.parametrize("token", ["", "wrong"])
def test_an_unadmitted_worker_gets_the_reason(token: str) -> None:
    reasons: list[str] = []
    worker = replace(local_worker("w", token=token), on_rejected=reasons.append)

    pair = PeerPair(
        worker, local_coordinator("a", admission=require_token("t"))
    ).settle()

    assert pair.acceptor.closed is not None
    assert "'w' is not admitted" in pair.acceptor.closed
    assert reasons == [pair.dialler.closed]
    assert "--token" in reasons[0]
    assert not pair.dialler.messages(PeerJoined)


def test_a_token_restricts_the_offered_models() -> None:
    def admission(applicant: JoinRequest) -> AdmissionGrant:
        require_token("t")(applicant)
        if not applicant.models <= {"m"}:
            raise NotAdmitted("The token is not for this model")
        return AdmissionGrant()

    other = replace(OFFER, models=frozenset({"other"}))
    some = replace(local_worker("w", token="t"), offers=(OFFER, other))
    none = replace(local_worker("w", token="t"), offers=(other,))

    pair = PeerPair(some, local_coordinator("a", admission=admission)).settle()
    (offered,) = pair.acceptor.messages(OffersChanged)
    pair.dialler.send(OffersChanged((other, OFFER)), 2.0)
    pair.settle()
    refused = PeerPair(none, local_coordinator("a", admission=admission)).settle()

    assert [offer.models for offer in offered.offers] == [{"m"}]
    assert len(pair.acceptor.messages(OffersChanged)) == 1  # unchanged
    assert refused.dialler.closed is not None
    assert "not for this model" in refused.dialler.closed


def test_a_configured_peer_may_serve_but_not_submit() -> None:
    local = local_coordinator("a", admission=require_token("t"))
    named = PeerPair(local, local_coordinator("b", open=True), configured=True).settle()
    unnamed = PeerPair(local, local_coordinator("b", open=True)).settle()

    assert [joined.submits_jobs for joined in named.dialler.messages(PeerJoined)] == [
        False
    ]
    assert not unnamed.dialler.messages(PeerJoined)
    assert unnamed.dialler.closed is not None
    assert "--tealenet-open" in unnamed.dialler.closed


def test_an_unproven_key_closes_the_connection() -> None:
    introduction = IntroductionExtension(
        version=1, role="worker", name="w", key="ab" * 32
    )
    peer = ForeignPeer(local_coordinator("a"))

    peer.deliver(replace_hello(hello(), introduction))
    peer.deliver(heartbeat())

    assert peer.end.closed == "the peer has not proved the key that it announces"
    assert not peer.end.messages(PeerJoined)


def replace_hello(message: Hello, introduction: IntroductionExtension) -> Hello:
    return msgspec.structs.replace(message, shoal=write_extension(introduction))


def test_a_connection_to_the_same_device_is_closed() -> None:
    pair = PeerPair(local_coordinator("a"), local_coordinator("a")).settle()

    assert pair.acceptor.closed is not None
    assert "this device itself" in pair.acceptor.closed


def test_a_dismissed_peer_gets_the_reason() -> None:
    reasons: list[str] = []
    worker = replace(local_worker("w"), on_rejected=reasons.append)
    pair = PeerPair(worker, local_coordinator("a")).settle()

    pair.acceptor.send(Dismiss("replaced"), 1.0)
    pair.settle()

    assert pair.dialler.closed == "replaced"
    assert reasons == ["replaced"]


def test_a_second_connection_is_closed_after_its_hello_ack() -> None:
    small, large = sorted(
        [local_coordinator("a"), local_coordinator("b")], key=lambda o: o.device_id
    )
    of_small, of_large = (
        DeviceConnections(each.device_id, LAN.disconnected_after)
        for each in (small, large)
    )
    first = PeerPair(small, large, device_connections=(of_small, of_large)).settle()

    second = PeerPair(large, small, device_connections=(of_large, of_small)).settle()

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
    PeerPair(large, small, device_connections=(of_large, of_small)).settle()

    second = PeerPair(small, large, device_connections=(of_small, of_large)).settle()

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


def test_the_token_is_proved_by_both_ends_and_sent_by_none() -> None:
    token = "a-token-that-is-never-sent"
    local = local_coordinator("a", admission=require_token(token))

    pair = PeerPair(local_worker("w", token=token), local).settle()

    assert pair.acceptor.messages(PeerJoined)
    assert pair.dialler.messages(PeerJoined)
    for end in (pair.dialler, pair.acceptor):
        assert not any(token.encode() in data for data in end.sent)


@pytest.mark.parametrize("admission", [None, require_token("another")])
def test_who_does_not_prove_the_token_is_no_coordinator(
    admission: AdmissionCheck | None,
) -> None:
    reasons: list[str] = []
    worker = replace(local_worker("w", token="t"), on_rejected=reasons.append)
    pretender = local_coordinator("a", admission=admission, open=True)

    pair = PeerPair(worker, pretender).settle()

    assert pair.dialler.closed is not None
    assert not pair.dialler.messages(PeerJoined)
    if admission is None:  # it admits anyone
        assert "not proved the join token" in pair.dialler.closed
        assert reasons == []  # so that the worker goes on looking for its own


def test_a_proof_of_another_channel_admits_nobody() -> None:
    local = local_coordinator("a", admission=require_token("t"))
    one = PeerPair(local_worker("w", token="t"), local_coordinator("m"))

    # A man in the middle has a channel with each of them.
    other = ForeignPeer(local, binding=b"the other channel")
    other.deliver(one.dialler.sent[0])

    (kind, payload) = other.drain()[0]
    assert kind == "helloAck"
    assert "Invalid token" in payload["shoal"]["refusal"]
    assert "token_proof" not in payload["shoal"]


def test_a_reflected_proof_does_not_make_a_coordinator() -> None:
    worker = ForeignPeer(local_worker("w", token="t"), dialled=True, binding=BINDING)
    ((_, payload),) = worker.drain()
    proof = payload["shoal"]["token_proof"]
    shoal = IntroductionExtension(version=1, role="coordinator", token_proof=proof)

    ack = msgspec.structs.replace(hello_ack(), shoal=write_extension(shoal))
    assert isinstance(ack, HelloAck)
    worker.deliver(ack)

    assert worker.end.closed is not None
    assert "not proved the join token" in worker.end.closed


def test_a_token_is_not_sent_in_the_clear_unless_asked_for() -> None:
    local = local_coordinator("a", admission=require_token("t"))
    worker = local_worker("w", token="t")

    refused = PeerPair(worker, local, binding=b"").settle()
    plain = PeerPair(replace(worker, plain=True), local, binding=b"").settle()

    assert refused.dialler.sent == []
    assert refused.dialler.closed is not None
    assert "--plain" in refused.dialler.closed
    assert plain.acceptor.messages(PeerJoined)


@pytest.mark.parametrize(
    ("address", "plain", "admitted"),
    [
        ("192.0.2.1", False, False),
        ("192.0.2.1", True, True),
        ("127.0.0.1", False, True),
    ],
)
def test_a_plain_worker_of_another_machine_is_refused(
    address: str, plain: bool, admitted: bool
) -> None:
    local = local_coordinator("a", admission=require_token("t"))
    worker = replace(local_worker("w", token="t"), plain=True)
    sent = PeerPair(worker, local, binding=b"").dialler.sent[0]

    coordinator = ForeignPeer(
        replace(local, plain=plain), connection=TealeConnection(False, address=address)
    )
    coordinator.deliver(sent)

    (_, payload) = coordinator.drain()[0]
    assert ("refusal" not in payload["shoal"]) is admitted
    if not admitted:
        assert "--plain" in payload["shoal"]["refusal"]


def test_a_token_in_the_clear_does_not_admit_on_an_encrypted_connection() -> None:
    worker = replace(local_worker("w", token="t"), plain=True)
    local = local_coordinator("a", admission=require_token("t"))
    sent = PeerPair(worker, local, binding=b"").dialler.sent[0]

    coordinator = ForeignPeer(local, binding=BINDING)
    coordinator.deliver(sent)

    (_, payload) = coordinator.drain()[0]
    assert "refusal" in payload["shoal"]


EXPECTING = replace(local_worker("w", "tok"), offers=(), expected_models=("m",))
"""A worker that has not loaded its model yet."""


def test_worker_is_refused_before_it_loads_a_model_that_its_token_does_not_permit() -> (
    None
):
    refused: list[str] = []

    def for_another_model(applicant: JoinRequest) -> AdmissionGrant:
        if "m" in applicant.models:
            raise NotAdmitted("The token is not for this model")
        return AdmissionGrant()

    PeerPair(
        replace(EXPECTING, on_rejected=refused.append),
        local_coordinator("a", admission=for_another_model),
    ).settle()

    assert refused == ["The token is not for this model: check --token"]


def test_model_that_a_worker_has_loaded_is_offered_at_once() -> None:
    pair = PeerPair(
        EXPECTING, local_coordinator("a", admission=require_token("tok"))
    ).settle()
    assert pair.acceptor.messages(OffersChanged) == [OffersChanged(())]

    pair.dialler.send(OffersChanged((OFFER,)), pair.now)
    pair.settle()

    *_, changed = pair.acceptor.messages(OffersChanged)
    assert [offer.models for offer in changed.offers] == [{"m"}]
