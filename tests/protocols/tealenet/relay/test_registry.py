import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from protocols.contexts import SIGNER, require_token
from protocols.tealenet.membership.relay_nodes import local_worker
from protocols.tealenet.network import HOST, Network, local_coordinator
from protocols.tealenet.relay_harness import (
    CAPABILITIES,
    SHOAL_CAPABILITIES,
    RelayClient,
    RelayHarness,
    error_of,
)
from shoal.domain.vocabulary import Dismiss
from shoal.protocols.seam.peer_session import PeerJoined
from shoal.protocols.seam.relay import RelayStanding
from shoal.protocols.tealenet.codec.relay_messages import CAPABILITIES_MAX
from shoal.protocols.tealenet.config import Config
from shoal.protocols.tealenet.relay.limits import Rate
from shoal.protocols.tealenet.relay.nodes import NODE_OVERHEAD
from shoal.protocols.tealenet.relay.server import LIMITS

UNADMITTED = (1008, "only for this pool's workers, unless it runs --relay-open")


@pytest.fixture
def harness() -> RelayHarness:
    return RelayHarness(is_open=False)


def pending(harness: RelayHarness, seed: int) -> RelayClient:
    """Register a Shoal node that the coordinator has not admitted."""
    return harness.join_proven(seed)


def member(harness: RelayHarness, seed: int) -> RelayClient:
    """Register a Shoal node that the coordinator has admitted."""
    peer = pending(harness, seed)
    harness.relay.admit(peer.id)
    harness.tick(10.0)
    for each in harness.peers.values():
        each.drain()
    return peer


def host_of(harness: RelayHarness) -> RelayClient:
    """Register the coordinator's own node."""
    host = harness.connect(0)
    host.signer = SIGNER
    (challenge,) = host.send(host.registration(capabilities=SHOAL_CAPABILITIES))
    host.prove(challenge["registerChallenge"]["challenge"])
    return host


def found_by(peer: RelayClient) -> set[str]:
    (answer,) = peer.send({"discover": {}})
    return {each["nodeID"] for each in answer["discoverResponse"]["peers"]}


def standing(harness: RelayHarness, peer: RelayClient) -> RelayStanding:
    return harness.relay.standing(peer.link)


# Who may use a relay that is not open.


def test_a_node_without_credentials_is_told_which_flag_is_missing(
    harness: RelayHarness,
) -> None:
    other, node = member(harness, 1), harness.connect(2)

    (answer,) = node.send(node.registration(), node.registration())

    assert answer["error"]["code"] == "invalid_register"
    assert "shoal serve --relay-open" in answer["error"]["message"]
    assert node.closed == UNADMITTED
    assert other.drain() == []


def test_a_pending_node_reaches_the_coordinator_alone(harness: RelayHarness) -> None:
    host, other, node = host_of(harness), member(harness, 1), pending(harness, 2)
    host.drain()

    assert node.send(node.to("relayOpen", host)) == []
    assert host.drain_kinds() == ["relayOpen"]
    assert host.send(host.to("relayReady", node)) == []
    assert node.drain_kinds() == ["relayReady"]
    # For the others it is not there.
    opening = other.to("relayOpen", node, "x")
    assert error_of(other.send(opening)) == "peer_not_found"
    assert error_of(node.send(node.to("relayOpen", other, "x"))) == "not_admitted"
    assert node.closed == UNADMITTED
    assert other.drain() == []


def test_a_node_that_is_refused_is_gone_before_its_link_is(
    harness: RelayHarness,
) -> None:
    host, other, node = host_of(harness), member(harness, 1), pending(harness, 2)
    opening = json.dumps(node.to("relayOpen", other, "x"))

    harness.relay.receive(node.link, [opening], harness.now)

    assert error_of(host.send(host.to("relayOpen", node))) == "peer_not_found"


@pytest.mark.parametrize("early", [False, True])
def test_a_pending_node_finds_no_others(harness: RelayHarness, early: bool) -> None:
    member(harness, 1)
    node: RelayClient
    answers: list[dict[str, Any]]

    if early:
        node = harness.connect(2)
        register = node.registration(capabilities=SHOAL_CAPABILITIES)
        (challenge,) = node.send({"discover": {}}, register)
        answers = node.prove(challenge["registerChallenge"]["challenge"])
    else:
        node = pending(harness, 2)
        answers = node.send({"discover": {}})

    assert error_of(answers) == "not_admitted"
    assert node.closed == UNADMITTED


def test_others_hear_of_a_node_once_it_is_admitted(harness: RelayHarness) -> None:
    other, node = member(harness, 1), pending(harness, 2)
    assert found_by(other) == set()

    harness.relay.admit(node.id)
    harness.tick(10.0)

    assert other.drain_kinds() == ["peerJoined"]
    assert node.drain_kinds() == []
    assert found_by(other) == {node.id}
    assert found_by(node) == {other.id}
    node.leave()
    assert other.drain_kinds() == ["peerLeft"]


def test_an_admitted_node_is_found_at_once(harness: RelayHarness) -> None:
    other, node = member(harness, 1), pending(harness, 2)

    harness.relay.admit(node.id)

    assert found_by(other) == {node.id}


def test_a_node_that_leaves_before_its_announcement_is_not_announced(
    harness: RelayHarness,
) -> None:
    other, node = member(harness, 1), pending(harness, 2)

    harness.relay.admit(node.id)
    node.leave()

    assert found_by(other) == set()
    assert other.drain() == []


def test_a_pending_node_hears_of_no_others(harness: RelayHarness) -> None:
    node = pending(harness, 2)

    joined = member(harness, 1)
    joined.leave()

    assert node.drain() == []


def test_others_never_hear_of_a_node_that_is_not_admitted(
    harness: RelayHarness,
) -> None:
    other, node = member(harness, 1), pending(harness, 2)

    node.leave()

    assert other.drain() == []


def test_a_node_that_is_not_admitted_in_time_is_disconnected(
    harness: RelayHarness,
) -> None:
    host, other, node = host_of(harness), member(harness, 1), pending(harness, 2)

    harness.tick(LIMITS.registration_timeout + 10)

    assert node.closed == UNADMITTED
    assert (host.closed, other.closed) == (None, None)
    assert other.drain() == []
    assert error_of(host.send(host.to("relayOpen", node))) == "peer_not_found"


@pytest.mark.parametrize("returns", [False, True])
def test_a_node_that_leaves_the_pool_has_to_be_admitted_again(
    harness: RelayHarness, returns: bool
) -> None:
    node = member(harness, 1)
    harness.tick(LIMITS.registration_timeout * 2)

    harness.relay.dismiss(node.id)
    assert standing(harness, node) is RelayStanding.PENDING
    if returns:
        harness.relay.admit(node.id)
    harness.tick(LIMITS.registration_timeout + 10)

    assert node.closed == (None if returns else UNADMITTED)


def test_a_member_that_reconnects_is_a_member(harness: RelayHarness) -> None:
    other, older = member(harness, 1), member(harness, 2)

    newer = harness.join_proven(2)

    assert older.closed == (1012, "Replaced by newer session")
    assert standing(harness, newer) is RelayStanding.MEMBER
    assert found_by(other) == {newer.id}
    assert other.drain() == []


def test_the_coordinator_is_a_member_by_its_key(harness: RelayHarness) -> None:
    host = host_of(harness)

    harness.relay.dismiss(host.id)

    assert standing(harness, host) is RelayStanding.MEMBER
    assert not harness.relay.count_peers()


def test_peers_are_counted_by_their_standing(harness: RelayHarness) -> None:
    host_of(harness)
    harness.connect(1)
    pending(harness, 2)
    member(harness, 3)
    guests = RelayHarness()
    guests.join(1)

    assert harness.relay.count_peers() == {
        RelayStanding.STRANGER: 1,
        RelayStanding.PENDING: 1,
        RelayStanding.MEMBER: 1,
    }
    assert guests.relay.count_peers() == {RelayStanding.GUEST: 1}


def test_a_proof_without_a_challenge_is_refused(harness: RelayHarness) -> None:
    node = harness.connect(1)

    # Who saw a node sign nothing else could repeat it.
    assert error_of(node.prove("")) == "invalid_register"


@pytest.mark.parametrize(("more", "found"), [(0, 1), (1, 2)])
def test_a_list_of_nodes_has_a_limit_of_bytes(more: int, found: int) -> None:
    of_one = NODE_OVERHEAD + len(msgspec.json.encode(CAPABILITIES))
    harness = RelayHarness(replace(LIMITS, results_size=of_one + more))
    nodes = [harness.join(seed) for seed in (1, 2, 3)]

    assert len(found_by(nodes[0])) == found


@pytest.mark.parametrize("size", [CAPABILITIES_MAX, CAPABILITIES_MAX + 1])
def test_capabilities_have_a_limit(size: int) -> None:
    node = RelayHarness().connect(1)
    capabilities = {"x": "y" * (size - len('{"x":""}'))}

    (answer,) = node.send(node.registration(capabilities=capabilities))

    assert ("registerAck" in answer) is (size <= CAPABILITIES_MAX)


# What those without a credential may send.


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("what", ["messages", "bytes"])
def test_strangers_share_one_budget(is_open: bool, what: str) -> None:
    harness = RelayHarness(
        replace(
            LIMITS,
            messages_of_strangers=Rate(10, 100),
            size_of_strangers=Rate(10_000, 100_000),
        ),
        is_open=is_open,
    )
    admitted = member(harness, 1)
    crowd = [harness.connect(seed) for seed in range(2, 7)]
    harness.now += 100
    flood = ["null"] * 30 if what == "messages" else [" " * 30_000]

    for each in crowd:
        each.send(*flood)
        admitted.send(*flood)

    # The first three are within the burst, and the others wait for all before them.
    waits = [harness.relay.read_delay(each.link, harness.now) for each in crowd]
    assert [round(max(0.0, each), 3) for each in waits] == [0, 0, 0, 2, 5]
    assert harness.relay.read_delay(admitted.link, harness.now) <= 0


def test_guests_count_as_strangers_until_they_are_admitted() -> None:
    harness = RelayHarness(replace(LIMITS, messages_of_strangers=Rate(10, 100)))
    first, second = harness.pair()
    assert standing(harness, first) is RelayStanding.GUEST
    harness.now += 100
    flood = [first.to("relayData", second, data="e30=")] * 200

    first.send(*flood)
    assert harness.relay.read_delay(first.link, harness.now) == 10
    harness.relay.admit(second.id)
    second.send(*[second.to("relayData", first, data="e30=")] * 200)

    assert standing(harness, second) is RelayStanding.MEMBER
    assert harness.relay.read_delay(second.link, harness.now) <= 0
    assert len(second.drain()) == 200  # nothing is lost


# With a coordinator.


@pytest.mark.parametrize("is_open", [False, True])
def test_the_join_token_makes_a_worker_a_member(is_open: bool) -> None:
    net = Network(is_open=is_open)
    host = net.attach(
        local_coordinator(admission=require_token("tok")), relay=net.relay
    )
    worker = net.attach(local_worker()[0])
    net.run(100.0)

    assert [each.name for each in host.messages(PeerJoined)] == ["bela"]
    assert net.relay.standing(worker.link) is RelayStanding.MEMBER
    assert worker.closed is None


def test_a_wrong_join_token_makes_no_member() -> None:
    net = Network(is_open=False)
    host = net.attach(
        local_coordinator(admission=require_token("tok")), relay=net.relay
    )
    worker = net.attach(local_worker(token="wrong")[0])
    net.run(100.0)

    assert not host.messages(PeerJoined)
    assert worker.closed == UNADMITTED[1]


def test_a_removed_worker_is_no_member() -> None:
    net = Network(is_open=False)
    host = net.attach(
        local_coordinator(admission=require_token("tok")), relay=net.relay
    )
    local, worker_id = local_worker()
    worker = net.attach(local)
    net.run(1.0)

    net.send(host, worker_id, Dismiss("no longer wanted"))

    assert net.relay.standing(worker.link) is not RelayStanding.MEMBER


def test_a_node_admitted_without_a_credential_stays_a_guest() -> None:
    net = Network()
    host = net.attach(local_coordinator(Config(open=True)), relay=net.relay)
    worker = net.attach(local_worker(token="")[0])
    net.run(1.0)

    assert [each.name for each in host.messages(PeerJoined)] == ["bela"]
    assert net.relay.standing(worker.link) is RelayStanding.GUEST


def test_the_coordinators_own_key_names_its_node() -> None:
    net = Network(is_open=False)

    host = net.attach(local_coordinator(), relay=net.relay)

    assert net.relay.standing(host.link) is RelayStanding.MEMBER
    assert host.node.id == HOST.public_key.hex()
