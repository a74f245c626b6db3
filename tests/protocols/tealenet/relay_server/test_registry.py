from dataclasses import replace

import msgspec
import pytest

from protocols.contexts import SIGNER
from protocols.tealenet.network import HOST, Network, local_coordinator
from protocols.tealenet.relay_client.relay_nodes import local_worker
from protocols.tealenet.relay_harness import (
    CAPABILITIES,
    RelayClient,
    RelayHarness,
    error_of,
)
from shoal.protocols.seam.peer_session import PeerJoined
from shoal.protocols.seam.relay import RelayStanding
from shoal.protocols.tealenet.codec.relay_messages import CAPABILITIES_MAX
from shoal.protocols.tealenet.local_node import Config
from shoal.protocols.tealenet.relay_server.limits import Rate
from shoal.protocols.tealenet.relay_server.nodes import NODE_OVERHEAD
from shoal.protocols.tealenet.relay_server.server import LIMITS

NOT_OPEN = (1008, "only for this coordinator, unless it runs --relay-open")


def found_by(peer: RelayClient) -> set[str]:
    (answer,) = peer.send({"discover": {}})
    return {each["nodeID"] for each in answer["discoverResponse"]["peers"]}


def standing(harness: RelayHarness, peer: RelayClient) -> RelayStanding:
    return harness.relay.standing(peer.link)


# Who may use a relay.


def test_a_node_at_a_relay_that_is_not_open_is_told_which_flag_is_missing() -> None:
    harness = RelayHarness(is_open=False)
    host, node = harness.join_host(), harness.connect(2)

    (answer,) = node.send(node.registration(), node.registration())

    assert answer["error"]["code"] == "invalid_register"
    assert "shoal serve --relay-open" in answer["error"]["message"]
    assert node.closed == NOT_OPEN
    assert host.drain() == []


def test_nothing_reaches_the_coordinator_of_a_relay_that_is_not_open() -> None:
    harness = RelayHarness(is_open=False)
    host, node = harness.join_host(), harness.connect(2)

    assert error_of(node.send(node.to("relayOpen", host))) == "not_registered"
    node.send({"discover": {}}, node.registration())

    assert node.closed == NOT_OPEN
    assert host.drain() == []


@pytest.mark.parametrize("present", [False, True])
def test_nobody_takes_the_place_of_the_coordinator(present: bool) -> None:
    harness = RelayHarness()
    host = harness.join_host() if present else None
    impostor = harness.connect(1)
    impostor.signer = SIGNER  # it has copied the signature, which is always the same

    assert error_of(impostor.send(impostor.registration())) == "invalid_register"

    assert standing(harness, impostor) is RelayStanding.STRANGER
    assert host is None or host.closed is None


def test_peers_are_counted_by_their_standing() -> None:
    harness = RelayHarness()
    harness.join_host()
    harness.connect(1)
    harness.join(2)

    assert harness.relay.count_peers() == {
        RelayStanding.STRANGER: 1,
        RelayStanding.GUEST: 1,
    }


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


# What nodes may send.


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("what", ["messages", "bytes"])
def test_all_but_the_coordinator_share_one_budget(is_open: bool, what: str) -> None:
    harness = RelayHarness(
        replace(
            LIMITS, messages_in_all=Rate(10, 100), size_in_all=Rate(10_000, 100_000)
        ),
        is_open=is_open,
    )
    host = harness.join_host()
    crowd = [harness.connect(seed) for seed in range(2, 7)]
    harness.now += 100
    flood = ["null"] * 30 if what == "messages" else [" " * 30_000]

    for each in crowd:
        each.send(*flood)
        host.send(*flood)

    # The first three are within the burst, and the others wait for all before them.
    waits = [harness.relay.read_delay(each.link, harness.now) for each in crowd]
    assert [round(max(0.0, each), 3) for each in waits] == [0, 0, 0, 2, 5]
    assert harness.relay.read_delay(host.link, harness.now) <= 0


def test_registered_nodes_share_the_budget_too() -> None:
    harness = RelayHarness(replace(LIMITS, messages_in_all=Rate(10, 100)))
    first, second = harness.pair()
    assert standing(harness, first) is RelayStanding.GUEST
    harness.now += 100

    first.send(*[first.to("relayData", second, data="e30=")] * 200)

    assert harness.relay.read_delay(first.link, harness.now) == 10
    assert len(second.drain()) == 200  # nothing is lost


# With a coordinator.


def test_a_worker_joins_an_open_coordinator_as_any_node() -> None:
    net = Network()
    host = net.attach(local_coordinator(Config(open=True)))
    local, worker_id = local_worker()
    worker = net.attach(local)
    net.run(100.0)

    assert [each.name for each in host.messages(PeerJoined)] == [worker_id]
    assert net.relay.standing(worker.link) is RelayStanding.GUEST
    assert worker.closed is None


def test_the_coordinator_registers_at_its_relay_although_it_is_not_open() -> None:
    net = Network(is_open=False)

    host = net.attach(local_coordinator())

    assert net.relay.standing(host.link) is RelayStanding.GUEST
    assert host.node.id == HOST.public_key.hex()
    assert not net.relay.count_peers()
