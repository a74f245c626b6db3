import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from protocols.tealenet.relay_harness import (
    CAPABILITIES,
    HARDWARE,
    SESSION,
    RelayClient,
    RelayHarness,
    cases,
    error_of,
    signer,
)
from shoal.protocols.seam.relay import RelayStanding
from shoal.protocols.tealenet.codec.relay_messages import KINDS
from shoal.protocols.tealenet.codec.scalars import to_date
from shoal.protocols.tealenet.relay_server.limits import Rate
from shoal.protocols.tealenet.relay_server.server import LIMITS

FORWARDED_KINDS = (
    "offer",
    "answer",
    "iceCandidate",
    "relayOpen",
    "relayReady",
    "relayData",
    "relayClose",
)


@pytest.fixture
def harness() -> RelayHarness:
    return RelayHarness()


# Recordings of a real relay.

# The error that Shoal answers instead, and why.
DIFFERENT_ERRORS: dict[str, tuple[str, str]] = {
    "relay_server/spoofed_from_is_forwarded": (
        "wrong_sender",
        "a node cannot send under another node's id",
    ),
    "relay_server/string": ("invalid_message", "a text has no kind"),
    "relay_server/second_key_ignored": (
        "invalid_message",
        "readers disagree about which key is the first",
    ),
    "relay_server/takeover_with_bad_signature": (
        "invalid_register",
        "an id belongs to the owner of its key",
    ),
    "relay_server_crash/json_null": ("invalid_message", "it crashes the original"),
    "relay_server_crash/forward_null_payload": (
        "invalid_message",
        "it crashes the original",
    ),
    "relay_server_crash/register_numeric_id": (
        "invalid_register",
        "it crashes the original",
    ),
}
# Shoal applies the filter, and omits the node that is registered on the connection.
DIFFERENT_ENTRIES = {
    "relay_server/discover_ignores_filter",
    "relay_server/discover_excludes_requester_by_claimed_id",
}
MODEL = "mlx-community/Qwen3-8B-4bit"


@pytest.mark.parametrize(
    "case",
    [
        *(each for each in cases("relay_server") if "send" in each),
        *cases("relay_server_crash"),
    ],
    ids=lambda case: case["id"],
)
def test_a_recorded_message_gets_the_recorded_answer(
    harness: RelayHarness, case: dict[str, Any]
) -> None:
    first, other, bystander = _recorded(harness, case["id"])
    expected = case.get("responses", {})

    answers = first.send(case["send"])

    if case["id"] in DIFFERENT_ERRORS:
        assert error_of(answers) == DIFFERENT_ERRORS[case["id"]][0]
    elif case["id"] in DIFFERENT_ENTRIES:
        assert _found(answers) == [other.id]
    elif "error" in (expected["sender"] or {}):
        assert error_of(answers) == expected["sender"]["error"]["code"]
    elif expected["sender"]:
        assert [_without_time(each) for each in answers] == [expected["sender"]]
    if "target" in expected and case["id"] not in DIFFERENT_ERRORS:
        assert other.drain() == [expected["target"]]
    elif "other" in expected and case["id"] not in DIFFERENT_ERRORS:
        assert bystander.drain() == [expected["other"]]
    elif case["id"] != "relay_server/register":  # announced to the other node
        assert other.drain() == bystander.drain() == []
    assert not any(each.closed for each in harness.peers.values())


def test_a_departure_is_announced(harness: RelayHarness) -> None:
    (case,) = [each for each in cases("relay_server") if "action" in each]
    first, other, _ = _recorded(harness, "relay_server/leaving")

    first.leave()

    assert other.drain() == [case["responses"]["other"]]


def _recorded(
    harness: RelayHarness, case: str
) -> tuple[RelayClient, RelayClient, RelayClient]:
    """Return the nodes of a recording: the sender, the receiver, and a bystander."""
    fields: dict[int, dict[str, Any]] = {
        0x11: {"displayName": "Studio", "wgPublicKey": _exchange_key(0x11)},
        0x22: {"displayName": "Peer", "wgPublicKey": _exchange_key(0x22)},
    }
    fields = {
        seed: each | {"capabilities": _recorded_capabilities()}
        for seed, each in fields.items()
    }
    bystander = harness.join(0x33, capabilities={"isAvailable": False})
    if case == "relay_server/register":
        return harness.connect(0x11), harness.connect(0x22), bystander
    if case == "relay_server/register_second_peer_broadcasts_peerJoined":
        return harness.connect(0x22), harness.connect(0x11), bystander
    first = harness.join(0x11, **fields[0x11])
    other = harness.join(0x22, **fields[0x22])
    for kind in ("Data", "keeps_extra"):
        if kind in case:
            first.send(first.to("relayOpen", other))
            assert other.drain()
    return first, other, bystander


def _recorded_capabilities() -> dict[str, Any]:
    (register,) = [
        each for each in cases("relay_server") if each["id"] == "relay_server/register"
    ]
    found: dict[str, Any] = register["send"]["register"]["capabilities"]
    return found


def _exchange_key(seed: int) -> str:
    return signer(seed).exchange_key.hex()


def _found(answers: list[dict[str, Any]]) -> list[str]:
    (answer,) = answers
    return [each["nodeID"] for each in answer["discoverResponse"]["peers"]]


def _without_time(message: dict[str, Any]) -> dict[str, Any]:
    text = json.loads(json.dumps(message))
    if "registerAck" in text:
        text["registerAck"]["registeredAt"] = "<reference seconds>"
    return dict(text)


# Registration.


def test_an_acknowledgement_has_the_date_of_the_wire(harness: RelayHarness) -> None:
    peer = harness.connect(1)

    (answer,) = peer.send(peer.registration())

    expected = {"registeredAt": to_date(harness.now), "ttlSeconds": 300}
    assert answer == {"registerAck": {"nodeID": peer.id, **expected}}


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodeID": ""},
        {"nodeID": "me"},
        {"nodeID": "A" * 64},
        {"publicKey": "0" * 64},
        {"signature": "00"},
        {"signature": "0" * 128},
        {"signature": None},
        {"wgPublicKey": "short"},
        {"displayName": 5},
        {"capabilities": []},
        {"capabilities": {"x": "y" * (LIMITS.capabilities_max + 1)}},
    ],
    ids=str,
)
def test_an_invalid_registration_is_refused(
    harness: RelayHarness, wrong: dict[str, Any]
) -> None:
    peer = harness.connect(1)

    assert error_of(peer.send(peer.registration(**wrong))) == "invalid_register"
    opening = peer.to("relayOpen", harness.join(2))
    assert error_of(peer.send(opening)) == "not_registered"


def test_a_registration_under_another_nodes_id_is_refused(
    harness: RelayHarness,
) -> None:
    victim, impostor = harness.join(1), harness.connect(2)

    stolen = impostor.registration(nodeID=victim.id, publicKey=victim.id)

    assert error_of(impostor.send(stolen)) == "invalid_register"
    assert victim.closed is None


def test_one_connection_is_one_node(harness: RelayHarness) -> None:
    peer = harness.join(1)
    peer.signer = signer(2)

    assert error_of(peer.send(peer.registration())) == "invalid_register"


def test_a_node_replaces_its_older_connection(
    harness: RelayHarness,
) -> None:
    older, bystander = harness.join(1), harness.join(2)

    newer = harness.join(1)
    older.leave()

    assert older.closed == (1012, "Replaced by newer session")
    assert bystander.drain() == []
    assert _found(bystander.send({"discover": {}})) == [newer.id]


def test_sessions_of_a_replaced_connection_are_closed_at_the_coordinator(
    harness: RelayHarness,
) -> None:
    one, host, plain = harness.join(1), harness.join_host(), harness.join(3)
    one.send(one.to("relayOpen", host, "a"), one.to("relayOpen", plain, "b"))
    assert (host.drain_kinds(), plain.drain_kinds()) == (["relayOpen"], ["relayOpen"])

    newer = harness.connect(1)
    newer.send(newer.registration())

    # A real node would answer a relayClose by dialling again and again.
    assert (host.drain_kinds(), plain.drain_kinds()) == (["relayClose"], [])
    for end, session in ((host, "a"), (plain, "b")):
        late = end.to("relayData", newer, session, data="")
        (answer,) = end.send(late)
        assert error_of([answer]) == "session_not_found"
        assert session in answer["error"]["message"]


def test_the_coordinator_gets_a_relay_close_when_the_other_end_leaves(
    harness: RelayHarness,
) -> None:
    one, host, plain = harness.join(1), harness.join_host(), harness.join(3)
    one.send(one.to("relayOpen", host, "a"), one.to("relayOpen", plain, "b"))
    assert (host.drain_kinds(), plain.drain_kinds()) == (["relayOpen"], ["relayOpen"])

    one.leave()

    assert host.drain_kinds() == ["relayClose", "peerLeft"]
    assert plain.drain_kinds() == ["peerLeft"]


# Announcements.


def test_a_renewed_registration_has_to_be_signed_as_well(
    harness: RelayHarness,
) -> None:
    peer = harness.join(1)

    answers = peer.send(peer.registration(signature="00" * 64))

    assert error_of(answers) == "invalid_register"


def test_an_unknown_node_has_no_address(harness: RelayHarness) -> None:
    assert harness.relay.address_of(signer(1).public_key.hex()) == ""


def test_a_renewed_registration_is_not_announced(harness: RelayHarness) -> None:
    peer, bystander = harness.join(1), harness.join(2)

    peer.send(peer.registration(displayName="another"))

    assert bystander.drain() == []


def test_nodes_of_one_batch_get_only_later_announcements(
    harness: RelayHarness,
) -> None:
    peers = [harness.connect(seed) for seed in range(1, 5)]
    for peer in peers:
        peer.send(peer.registration())

    for place, peer in enumerate(peers):
        joined = [each["peerJoined"]["nodeID"] for each in peer.drain()]
        assert joined == [each.id for each in peers[place + 1 :]]


def test_announcements_wait_for_others_unless_they_are_many(
    harness: RelayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.protocols.tealenet.relay_server.registry.PENDING_MAX", 3)
    relay, now = harness.relay, harness.now
    peers = [harness.connect(seed) for seed in (1, 2, 3)]
    for peer in peers[:2]:
        peer.send(peer.registration())

    assert relay.deadline is not None
    assert relay.deadline > now
    assert relay.tick(now) == []

    peers[2].send(peers[2].registration())
    assert relay.deadline == now


def test_a_node_gets_no_announcement_of_itself(harness: RelayHarness) -> None:
    peer = harness.connect(1)
    peer.send(peer.registration())

    assert harness.relay.tick(harness.now + 1.0) == []


def test_what_happens_while_a_batch_is_sent_is_announced_after_it(
    harness: RelayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.protocols.tealenet.relay_server.registry.BATCH_LINKS", 1)
    peers = [harness.join(seed) for seed in (1, 2)]
    third, fourth = harness.connect(3), harness.connect(4)
    third.send(third.registration())
    harness.now += 1.0
    harness.deliver(harness.relay.tick(harness.now))  # the first of two batches

    fourth.send(fourth.registration())

    for peer in peers:
        joined = [each["peerJoined"]["nodeID"] for each in peer.drain()]
        assert joined == [third.id, fourth.id]


def test_announcements_are_sent_in_batches_of_links(
    harness: RelayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = 50
    monkeypatch.setattr(
        "shoal.protocols.tealenet.relay_server.registry.BATCH_LINKS", batch
    )
    peers = [harness.connect(1, "a")]
    peers[0].send(peers[0].registration())
    relay = harness.relay
    # Without real keys, because there are fewer seeds than nodes.
    registry = relay._registry
    registry._context = replace(registry._context, verify=lambda *_: True)
    for number in range(2 * batch + 1):
        peer = harness.connect(2, "a")
        id_ = f"{number:064x}"
        peer.send(peer.registration(nodeID=id_, publicKey=id_))
        peers.append(peer)
    harness.tick(1.0)
    for peer in peers:
        peer.inbox.clear()

    peers[0].leave()

    informed = 0
    while informed < len(peers) - 1:
        deadline = relay.deadline
        assert deadline is not None
        harness.now = max(harness.now, deadline)
        (spread,) = relay.tick(harness.now)
        harness.deliver((spread,))
        informed += len(spread.links)  # type: ignore[union-attr]  # nothing else is due
        assert len(spread.links) <= batch  # type: ignore[union-attr]  # as above
    assert all(
        [list(each) for each in peer.inbox] == [["peerLeft"]] for peer in peers[1:]
    )


# Discovery.


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, [1, 2]),
        ({"modelID": "big"}, [1]),
        ({"modelID": "absent"}, []),
        ({"minRAMGB": 32}, [1]),
        ({"minRAMGB": 64}, [1]),
        ({"minRAMGB": 65}, []),
        ({"minTier": 2}, [1]),
        ({"minTier": 4}, [1, 2]),
        ({"maxPeers": 1}, [1]),
        ({"maxPeers": 0}, []),
        ({"modelID": None, "minRAMGB": None}, [1, 2]),
    ],
    ids=str,
)
def test_the_filter_is_applied(
    harness: RelayHarness, wanted: dict[str, Any], found: list[int]
) -> None:
    small = HARDWARE | {"totalRAMGB": 8, "tier": 4}
    harness.join(1, capabilities=CAPABILITIES | {"loadedModels": ["m", "big"]})
    harness.join(2, capabilities=CAPABILITIES | {"hardware": small})
    harness.join(3, capabilities=CAPABILITIES | {"isAvailable": False})
    requester = harness.join(4)

    answers = requester.send({"discover": {"requestingNodeID": "x", "filter": wanted}})

    second = {signer(seed).public_key.hex() for seed in found}
    if wanted.get("maxPeers") == 1:
        assert len(_found(answers)) == 1
    else:
        assert set(_found(answers)) == second


def test_a_truth_value_is_no_amount_of_memory(harness: RelayHarness) -> None:
    odd = HARDWARE | {"totalRAMGB": True}
    harness.join(1, capabilities=CAPABILITIES | {"hardware": odd})
    requester = harness.join(2)

    answers = requester.send({"discover": {"filter": {"minRAMGB": 1}}})

    assert _found(answers) == []


def test_the_last_message_of_a_node_has_the_date_of_the_wire(
    harness: RelayHarness,
) -> None:
    node, requester = harness.join(1), harness.join(2)
    harness.now += 7
    node.send({"discover": {}})
    heard = harness.now
    harness.now += 3

    (answer,) = requester.send({"discover": {}})

    (entry,) = answer["discoverResponse"]["peers"]
    assert entry["lastSeen"] == to_date(heard)


def test_discovery_lists_fifty_nodes_unless_more_are_requested(
    harness: RelayHarness,
) -> None:
    for seed in range(2, 72):
        peer = harness.connect(seed)
        peer.send(peer.registration())
    requester = harness.join(1)

    some = _found(requester.send({"discover": {}}))
    others = _found(requester.send({"discover": {}}))
    all_ = _found(requester.send({"discover": {"filter": {"maxPeers": 1000}}}))

    assert len(set(some)) == len(set(others)) == LIMITS.results == 50
    assert set(some) != set(others)  # the order is random
    assert len(set(all_)) == 70


@pytest.mark.parametrize("together", [False, True])
def test_discovery_before_the_registration_is_answered_after_it(
    harness: RelayHarness, together: bool
) -> None:
    harness.join(1, capabilities=CAPABILITIES | {"loadedModels": ["big"]})
    other = harness.join(2)
    gateway = harness.connect(3)
    early = {"discover": {"requestingNodeID": "x", "filter": {"modelID": "m"}}}

    if together:
        answers = gateway.send(early, gateway.registration())
    else:
        assert gateway.send(early) == []
        answers = gateway.send(gateway.registration())

    assert [next(iter(each)) for each in answers] == ["registerAck", "discoverResponse"]
    assert _found(answers[1:]) == [other.id]
    (renewed,) = gateway.send(gateway.registration())
    assert "registerAck" in renewed


def test_early_discovery_with_invalid_fields_is_refused(harness: RelayHarness) -> None:
    peer = harness.connect(1)
    long = {"discover": {"filter": {"modelID": "m" * 257}}}

    assert error_of(peer.send({"discover": {"filter": 5}})) == "invalid_message"
    assert error_of(peer.send(long)) == "not_registered"


# Forwarding.


def test_messages_are_forwarded_within_a_session(harness: RelayHarness) -> None:
    first, second = harness.join(1), harness.join(2)

    first.send(first.to("relayOpen", second))
    second.send(second.to("relayReady", first, SESSION.lower()))
    first.send(first.to("relayData", second, data="e30="))
    second.send(second.to("relayData", first, SESSION.lower(), data="e30="))
    second.send(second.to("relayClose", first))
    first.send(first.to("relayClose", second))

    assert second.drain_kinds() == ["relayOpen", "relayData"]
    assert first.drain_kinds() == ["relayReady", "relayData", "relayClose"]
    assert error_of(first.send(first.to("relayData", second, data=""))) == (
        "session_not_found"
    )


@pytest.mark.parametrize(
    "data", ["e30=", "e3 0", '\\u00e9 é "', [123, 125], "x" * 99_999]
)
def test_data_is_forwarded_unchanged(harness: RelayHarness, data: object) -> None:
    first, second = harness.pair()

    message = first.to("relayData", second, data=data, more={"a": [1, 2.5, None]})
    assert first.send(message) == []

    assert second.drain() == [message]


def test_binary_messages_are_accepted(harness: RelayHarness) -> None:
    first, second = harness.pair()
    message = first.to("relayData", second, data="e30=")

    first.send(json.dumps(message).encode())

    assert second.drain() == [message]


@pytest.mark.parametrize("kind", FORWARDED_KINDS)
def test_an_unregistered_node_cannot_send(harness: RelayHarness, kind: str) -> None:
    other, stranger = harness.join(1), harness.connect(2)

    assert error_of(stranger.send(stranger.to(kind, other))) == "not_registered"
    assert other.drain() == []


@pytest.mark.parametrize("kind", FORWARDED_KINDS)
def test_a_forged_sender_is_refused(harness: RelayHarness, kind: str) -> None:
    first, second = harness.pair()
    forger = harness.join(3)

    message = first.to(kind, second, data="e30=")

    assert error_of(forger.send(message)) == "wrong_sender"
    assert second.drain() == first.drain() == []


def test_a_third_node_cannot_send_into_a_session(harness: RelayHarness) -> None:
    first, second = harness.pair()
    third = harness.join(3)

    for kind in ("relayData", "relayReady"):
        assert error_of(third.send(third.to(kind, second, data="e30="))) == (
            "session_not_found"
        )
    assert third.send(third.to("relayClose", second)) == []
    # Nodes may identify a session by its id alone.
    assert error_of(third.send(third.to("relayOpen", second))) == "session_taken"
    assert error_of(third.send(third.to("relayOpen", first, SESSION.lower()))) == (
        "session_taken"
    )
    assert first.drain() == second.drain() == []
    first.send(first.to("relayData", second, data="e30="))
    assert second.drain_kinds() == ["relayData"]


def test_a_session_is_opened_again_after_a_reconnection(harness: RelayHarness) -> None:
    first, second = harness.pair()
    first.leave()
    rejoined = harness.join(1)

    assert error_of(second.send(second.to("relayData", rejoined, data=""))) == (
        "session_not_found"
    )
    rejoined.send(rejoined.to("relayOpen", second))
    second.send(second.to("relayData", rejoined, data="e30="))

    assert second.drain_kinds()[-1] == "relayOpen"
    assert rejoined.drain_kinds() == ["relayData"]


def test_an_open_session_may_be_opened_again(harness: RelayHarness) -> None:
    first, second = harness.pair()

    assert second.send(second.to("relayOpen", first)) == []
    assert first.send(first.to("relayOpen", second)) == []

    assert (first.drain_kinds(), second.drain_kinds()) == (["relayOpen"], ["relayOpen"])


@pytest.mark.parametrize("kind", FORWARDED_KINDS)
@pytest.mark.parametrize("name", ["fromNodeID", "toNodeID", "sessionID"])
def test_invalid_ids_are_refused(harness: RelayHarness, kind: str, name: str) -> None:
    first, second = harness.pair()

    nothing: tuple[Any, ...] = (5, None, [], {}, True)
    for value in nothing:
        answers = first.send(first.to(kind, second, data="e30=", **{name: value}))
        assert error_of(answers) == "invalid_message"

    assert first.drain() == second.drain() == []


def test_a_session_with_the_node_itself_is_refused(harness: RelayHarness) -> None:
    peer = harness.join(1)

    assert error_of(peer.send(peer.to("relayOpen", peer))) == "invalid_message"


@pytest.mark.parametrize("size", [32, 79])
def test_a_short_handshake_is_not_forwarded(harness: RelayHarness, size: int) -> None:
    first, second = harness.pair()
    data = "A" + "Q" + "A" * (((size + 1) * 8 + 5) // 6 - 2)
    data += "=" * (-len(data) % 4)

    assert error_of(first.send(first.to("relayData", second, data=data))) == (
        "invalid_message"
    )
    assert second.drain() == []


def test_valid_messages_beside_invalid_ones_are_forwarded(
    harness: RelayHarness,
) -> None:
    first, second = harness.pair()
    good = first.to("relayData", second, data="e30=")

    answers = first.send(good, "null", good, "{}", good)

    assert [each["error"]["code"] for each in answers] == ["invalid_message"] * 2
    assert second.drain_kinds() == ["relayData"] * 3


ANY = st.none() | st.integers() | st.text(max_size=4) | st.lists(st.none(), max_size=1)


@settings(max_examples=examples(0.4))
@given(st.data())
def test_nodes_receive_only_messages_of_their_sessions(
    data: st.DataObject,
) -> None:
    harness = RelayHarness()
    first, second = harness.pair()
    attacker = harness.join(3)
    names = ["fromNodeID", "toNodeID", "sessionID", "data", "nodeID", "filter", "_0"]
    ids = [first.id, second.id, attacker.id, SESSION]
    values = ANY | st.sampled_from(ids)
    payloads = ANY | st.dictionaries(st.sampled_from(names), values)
    kinds = st.sampled_from([*KINDS, "x"])

    for _ in range(5):
        kind, payload = data.draw(kinds), data.draw(payloads)
        attacker.send(json.dumps({kind: payload}))

    for each in (first, second):
        assert each.closed is None
        for message in each.drain():
            ((_, payload),) = message.items()
            assert payload["fromNodeID"] == attacker.id
            assert payload["sessionID"] != SESSION


# Limits.


def test_a_silent_node_is_removed(harness: RelayHarness) -> None:
    silent, other = harness.join(1), harness.join(2)

    harness.now += LIMITS.node_ttl - 10
    other.send({"discover": {}})
    harness.tick(20)

    assert error_of(silent.inbox) == "registration_expired"
    assert [list(each) for each in other.inbox] == [["peerLeft"]]
    assert error_of(silent.send(silent.to("relayOpen", other))) == "not_registered"
    (answer,) = silent.send(silent.registration())
    assert "registerAck" in answer


def test_the_acknowledgement_has_the_time_of_the_first_registration(
    harness: RelayHarness,
) -> None:
    def registered_at(peer: RelayClient) -> float:
        (answer,) = peer.send(peer.registration())
        at: float = answer["registerAck"]["registeredAt"]
        return at

    first = harness.connect(1)
    began = registered_at(first)
    harness.now += 10
    assert registered_at(first) == began
    again = harness.connect(1)  # its connection is replaced
    assert registered_at(again) == began

    again.leave()
    harness.now += 10

    assert registered_at(harness.connect(1)) == began + 20


def test_a_link_without_a_registration_is_closed(harness: RelayHarness) -> None:
    stranger, other = harness.connect(1), harness.join(2)

    stranger.send("garbage", "{}")
    harness.tick(LIMITS.registration_timeout + 10)

    assert stranger.closed == (1008, "no registration in time")
    assert other.closed is None


def test_connections_of_one_address_are_limited() -> None:
    harness = RelayHarness(replace(LIMITS, links_per_address=2))
    peers = [harness.connect(seed, "192.0.2.1") for seed in (1, 2)]

    third = harness.connect(3, "192.0.2.1")
    elsewhere = harness.connect(4, "192.0.2.2")
    peers[0].leave()
    rejoined = harness.connect(3, "192.0.2.1")

    assert third.closed == (1013, "too many connections: try again later")
    assert elsewhere.closed is None
    assert rejoined.closed is None


def test_connections_are_limited() -> None:
    harness = RelayHarness(replace(LIMITS, links=2))
    links = [harness.connect(seed, f"192.0.2.{seed}") for seed in (1, 2, 3)]

    assert [each.closed is None for each in links] == [True, True, False]


def test_link_that_is_not_there_is_a_strangers(harness: RelayHarness) -> None:
    assert harness.relay.standing(7) is RelayStanding.STRANGER


def test_nodes_are_limited() -> None:
    harness = RelayHarness(replace(LIMITS, nodes=2))
    first = harness.join(1)
    harness.join(2)
    third = harness.connect(3)

    assert error_of(third.send(third.registration())) == "relay_full"
    first.leave()
    (answer,) = third.send(third.registration())
    assert "registerAck" in answer


def test_stored_capabilities_are_limited() -> None:
    harness = RelayHarness(replace(LIMITS, stored_size=10_000))
    much = CAPABILITIES | {"more": "x" * 6000}
    first, second = harness.join(1, capabilities=much), harness.connect(2)

    assert error_of(second.send(second.registration(capabilities=much))) == "relay_full"
    (answer,) = first.send(first.registration())
    assert "registerAck" in answer
    (answer,) = second.send(second.registration(capabilities=much))
    assert "registerAck" in answer


def test_sessions_of_a_node_are_limited() -> None:
    harness = RelayHarness(replace(LIMITS, sessions_per_node=3))
    first, second = harness.join(1), harness.join(2)
    for number in range(3):
        assert first.send(first.to("relayOpen", second, str(number))) == []

    assert (
        error_of(first.send(first.to("relayOpen", second, "3"))) == "too_many_sessions"
    )
    # The other node may still open sessions.
    assert second.send(second.to("relayOpen", first, "3")) == []
    assert first.send(first.to("relayClose", second, "0")) == []
    assert first.send(first.to("relayOpen", second, "4")) == []


def test_sessions_are_limited() -> None:
    harness = RelayHarness(replace(LIMITS, sessions=1))
    first, second = harness.pair()

    assert error_of(second.send(second.to("relayOpen", first, "x"))) == "relay_full"


@pytest.mark.parametrize("kind", ["relayOpen", "offer", "answer", "iceCandidate"])
def test_a_flood_of_openings_is_rate_limited(harness: RelayHarness, kind: str) -> None:
    harness = RelayHarness(replace(LIMITS, openings=Rate(10, 50)))
    flooder, victim, other = (harness.join(seed) for seed in (1, 2, 3))

    answers = flooder.send(
        *(flooder.to(kind, victim, str(number)) for number in range(1000))
    )

    assert {each["error"]["code"] for each in answers} == {"rate_limited"}
    assert {each["error"]["retryAfterSeconds"] for each in answers} == {1}
    assert len(victim.drain()) == 50
    assert other.send(other.to("relayOpen", victim, "honest")) == []
    assert victim.drain_kinds() == ["relayOpen"]
    harness.now += 1
    assert flooder.send(flooder.to(kind, victim, "late")) == []


@pytest.mark.parametrize(
    "message", [{"discover": {}}, {"register": {}}], ids=["discover", "register"]
)
def test_floods_of_discovery_and_registrations_are_rate_limited(
    harness: RelayHarness, message: dict[str, Any]
) -> None:
    flooder = harness.join(1)

    answers = flooder.send(*[message] * 100)

    codes = [each["error"]["code"] for each in answers if "error" in each]
    assert codes.count("rate_limited") >= 80


def test_discovery_over_many_connections_shares_one_limit() -> None:
    harness = RelayHarness(replace(LIMITS, lookups=Rate(1, 10)))
    one, two = harness.pair()
    request: dict[str, Any] = {"discover": {}}

    answers = [each for peer in (one, two) for each in peer.send(*[request] * 4)]
    other = harness.connect(3, "198.51.100.1")
    other.send(other.registration())

    codes = [each["error"]["code"] for each in answers if "error" in each]
    assert codes == ["rate_limited"] * 3
    (found,) = other.send(request)
    assert "discoverResponse" in found
    harness.now += 10
    (found,) = one.send(request)
    assert "discoverResponse" in found


def test_sessions_of_one_address_are_limited() -> None:
    harness = RelayHarness(replace(LIMITS, sessions_per_address=2))
    first, second = harness.pair()
    assert second.send(second.to("relayOpen", first, "second")) == []

    assert error_of(first.send(first.to("relayOpen", second, "third"))) == (
        "too_many_sessions"
    )
    other = harness.connect(3, "198.51.100.1")
    other.send(other.registration())
    assert other.send(other.to("relayOpen", first, "third")) == []
    first.send(first.to("relayClose", second))
    assert second.send(second.to("relayOpen", first, "fourth")) == []


def test_a_flood_of_data_is_read_more_slowly_and_loses_nothing(
    harness: RelayHarness,
) -> None:
    harness = RelayHarness(replace(LIMITS, messages=Rate(10, 100)))
    first, second = harness.pair()
    message = first.to("relayData", second, data="e30=")

    assert first.send(*[message] * 90) == []
    assert harness.relay.read_delay(first.link, harness.now) <= 0
    assert first.send(*[message] * 15) == []

    assert 0 < harness.relay.read_delay(first.link, harness.now) <= LIMITS.pause_max
    assert harness.relay.read_delay(second.link, harness.now) <= 0
    assert len(second.drain()) == 105


def test_a_flood_of_bytes_is_read_more_slowly(harness: RelayHarness) -> None:
    harness = RelayHarness(replace(LIMITS, size=Rate(1000, 10_000)))
    first, second = harness.pair()

    first.send(first.to("relayData", second, data="e30=" * 5000))

    assert harness.relay.read_delay(first.link, harness.now) == LIMITS.pause_max
    assert len(second.drain()) == 1


def test_data_of_a_closed_link_is_ignored(harness: RelayHarness) -> None:
    older, other = harness.pair()
    harness.join(1)
    assert older.closed is not None

    assert older.send(older.to("relayData", other, data="e30=")) == []
    assert harness.relay.link_closed(older.link, harness.now) == ()


def test_closed_links_leave_no_state(harness: RelayHarness) -> None:
    first, second = harness.pair()
    first.leave()
    second.leave()
    harness.tick(10)

    relay = harness.relay
    assert not relay._links._by_link
    assert not relay._links._origins
    assert not relay._sessions._of_address
    assert not relay._registry.nodes
    assert relay._registry._stored_size == 0
    assert len(relay._sessions) == 0
    assert not relay._sessions._of_node
    assert relay.deadline is None


def test_a_session_may_be_closed_after_its_other_end_has_left() -> None:
    harness = RelayHarness()
    first, second = harness.pair()
    second.leave()
    first.drain()

    assert first.send(first.to("relayClose", second)) == []
