import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.tealenet.relay_harness import (
    CAPABILITIES,
    HARDWARE,
    OURS,
    SESSION,
    RelayClient,
    RelayHarness,
    cases,
    error_of,
    signer,
)
from shoal.protocols.tealenet.codec.relay_messages import KINDS, challenge_text
from shoal.protocols.tealenet.codec.scalars import to_date
from shoal.protocols.tealenet.relay.limits import Rate
from shoal.protocols.tealenet.relay.registry import BATCH_LINKS
from shoal.protocols.tealenet.relay.server import LIMITS

FROM_NODE_TO_NODE = (
    "offer",
    "answer",
    "iceCandidate",
    "relayOpen",
    "relayReady",
    "relayData",
    "relayClose",
)


@pytest.fixture
def relaying() -> RelayHarness:
    return RelayHarness()


# What was recorded of a real relay.

# Where ours answers something else, and why.
DIFFERENT: dict[str, tuple[str, str]] = {
    "relay_server/spoofed_from_is_forwarded": (
        "wrong_sender",
        "nobody speaks in another's name",
    ),
    "relay_server/string": ("invalid_message", "a text has no kind, not even '0'"),
    "relay_server/second_key_ignored": (
        "invalid_message",
        "which key is the first, readers may disagree on",
    ),
    "relay_server/takeover_with_bad_signature": (
        "invalid_register",
        "an id is that of who has its key",
    ),
    "relay_server_crash/json_null": ("invalid_message", "it kills the original"),
    "relay_server_crash/forward_null_payload": (
        "invalid_message",
        "it kills the original",
    ),
    "relay_server_crash/register_numeric_id": (
        "invalid_register",
        "it kills the original",
    ),
}
# The filter is applied, and who asks is who is registered on the connection: what both
# answers leave out.
FOUND_DIFFERENTLY = {
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
    relaying: RelayHarness, case: dict[str, Any]
) -> None:
    first, other, bystander = _recorded(relaying, case["id"])
    expected = case.get("responses", {})

    answers = first.say(case["send"])

    if case["id"] in DIFFERENT:
        assert error_of(answers) == DIFFERENT[case["id"]][0]
    elif case["id"] in FOUND_DIFFERENTLY:
        assert _found(answers) == [other.id]
    elif "error" in (expected["sender"] or {}):
        assert error_of(answers) == expected["sender"]["error"]["code"]
    elif expected["sender"]:
        assert [_timeless(each) for each in answers] == [expected["sender"]]
    if "target" in expected and case["id"] not in DIFFERENT:
        assert other.heard == [expected["target"]]
    elif "other" in expected and case["id"] not in DIFFERENT:
        assert bystander.heard == [expected["other"]]
    elif case["id"] != "relay_server/register":  # of which the one there is was told
        assert other.heard == bystander.heard == []
    assert not any(each.closed for each in relaying.peers.values())


def test_a_departure_is_announced(relaying: RelayHarness) -> None:
    (case,) = [each for each in cases("relay_server") if "action" in each]
    first, other, _ = _recorded(relaying, "relay_server/leaving")

    first.leave()

    assert other.heard == [case["responses"]["other"]]


def _recorded(
    relaying: RelayHarness, case: str
) -> tuple[RelayClient, RelayClient, RelayClient]:
    """Return the nodes of the record: who sends, whom it is for, and one more."""
    about: dict[int, dict[str, Any]] = {
        0x11: {"displayName": "Studio", "wgPublicKey": _exchange_key(0x11)},
        0x22: {"displayName": "Peer", "wgPublicKey": _exchange_key(0x22)},
    }
    about = {
        seed: said | {"capabilities": _recorded_capabilities()}
        for seed, said in about.items()
    }
    bystander = relaying.join(0x33, capabilities={"isAvailable": False})
    if case == "relay_server/register":
        return relaying.connect(0x11), relaying.connect(0x22), bystander
    if case == "relay_server/register_second_peer_broadcasts_peerJoined":
        return relaying.connect(0x22), relaying.connect(0x11), bystander
    first = relaying.join(0x11, **about[0x11])
    other = relaying.join(0x22, **about[0x22])
    for kind in ("Data", "keeps_extra"):
        if kind in case:
            first.say(first.to("relayOpen", other))
            assert other.heard
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


def _timeless(message: dict[str, Any]) -> dict[str, Any]:
    text = json.loads(json.dumps(message))
    if "registerAck" in text:
        text["registerAck"]["registeredAt"] = "<reference seconds>"
    return dict(text)


# Registering.


def test_a_node_is_acknowledged_in_the_wires_own_time(relaying: RelayHarness) -> None:
    peer = relaying.connect(1)

    (answer,) = peer.say(peer.registration())

    told = {"registeredAt": to_date(relaying.now), "ttlSeconds": 300}
    assert answer == {"registerAck": {"nodeID": peer.id, **told}}


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
        {"shoal": {"challenge": "c", "proof": "p"}},
    ],
    ids=str,
)
def test_a_wrong_registration_is_refused(
    relaying: RelayHarness, wrong: dict[str, Any]
) -> None:
    peer = relaying.connect(1)

    assert error_of(peer.say(peer.registration(**wrong))) == "invalid_register"
    assert error_of(peer.say({"discover": {}})) == "not_registered"


def test_the_copy_of_another_nodes_registration_with_its_key_replaced_is_refused(
    relaying: RelayHarness,
) -> None:
    victim, thief = relaying.join(1), relaying.connect(2)

    stolen = thief.registration(nodeID=victim.id, publicKey=victim.id)

    assert error_of(thief.say(stolen)) == "invalid_register"
    assert victim.closed is None


def test_one_connection_is_one_node(relaying: RelayHarness) -> None:
    peer = relaying.join(1)
    peer.signer = signer(2)

    assert error_of(peer.say(peer.registration())) == "invalid_register"


def test_a_node_that_knows_how_has_to_prove_its_key(relaying: RelayHarness) -> None:
    peer = relaying.connect(1)

    (answer,) = peer.say(peer.registration(capabilities=OURS))
    assert error_of(peer.say({"discover": {}})) == "not_registered"
    (ack,) = peer.prove(answer["registerChallenge"]["challenge"])

    assert "registerAck" in ack
    other = relaying.join(2)
    (found,) = other.say({"discover": {}})
    (entry,) = found["discoverResponse"]["peers"]
    assert entry["shoal"] == {"proven": True}
    assert entry["capabilities"] == OURS


def test_a_proof_counts_on_its_own_connection_only(relaying: RelayHarness) -> None:
    peer, thief = relaying.connect(1), relaying.connect(1)
    (answer,) = peer.say(peer.registration(capabilities=OURS))
    challenge = answer["registerChallenge"]["challenge"]
    thief.say(thief.registration(capabilities=OURS))

    text = challenge_text(challenge, peer.id)
    proof = {"challenge": challenge, "proof": peer.signer.sign(text).hex()}
    replayed = thief.registration(capabilities=OURS, shoal=proof)

    assert error_of(thief.say(replayed)) == "invalid_register"


def test_a_proven_node_registers_again_without_a_proof(relaying: RelayHarness) -> None:
    peer = relaying.join_proven(1)

    (answer,) = peer.say(peer.registration(capabilities=OURS, displayName="new"))

    assert "registerAck" in answer


def test_a_replayed_registration_does_not_displace_a_proven_node(
    relaying: RelayHarness,
) -> None:
    victim, thief = relaying.join_proven(1), relaying.connect(1)

    assert error_of(thief.say(thief.registration())) == "invalid_register"
    (answer,) = thief.say(thief.registration(capabilities=OURS))
    assert "registerChallenge" in answer
    assert victim.closed is None
    assert victim.heard == []


@pytest.mark.parametrize("before", ["plain", "proven"])
def test_a_proven_newcomer_takes_the_id_over(
    relaying: RelayHarness, before: str
) -> None:
    older = relaying.join(1) if before == "plain" else relaying.join_proven(1)
    bystander = relaying.join(2)

    newer = relaying.join_proven(1)

    assert older.closed == (1012, "Replaced by newer session")
    assert newer.closed is None
    assert bystander.heard == []  # it is there as before


def test_a_plain_newcomer_takes_the_id_of_a_plain_node(relaying: RelayHarness) -> None:
    older, bystander = relaying.join(1), relaying.join(2)

    newer = relaying.join(1)
    older.leave()

    assert older.closed == (1012, "Replaced by newer session")
    assert bystander.heard == []
    assert _found(bystander.say({"discover": {}})) == [newer.id]


def test_sessions_of_a_replaced_connection_are_closed_at_shoal_nodes(
    relaying: RelayHarness,
) -> None:
    one, ours, plain = relaying.join(1), relaying.join_proven(2), relaying.join(3)
    one.say(one.to("relayOpen", ours, "a"), one.to("relayOpen", plain, "b"))
    assert (ours.kinds, plain.kinds) == (["relayOpen"], ["relayOpen"])

    newer = relaying.connect(1)
    newer.say(newer.registration())

    # A real node would take a relayClose for a reason to come back again and again.
    assert (ours.kinds, plain.kinds) == (["relayClose"], [])
    for end, session in ((ours, "a"), (plain, "b")):
        late = end.to("relayData", newer, session, data="")
        assert error_of(end.say(late)) == "session_not_found"


def test_shoal_nodes_get_a_relay_close_when_the_other_end_leaves(
    relaying: RelayHarness,
) -> None:
    one, ours, plain = relaying.join(1), relaying.join_proven(2), relaying.join(3)
    one.say(one.to("relayOpen", ours, "a"), one.to("relayOpen", plain, "b"))
    assert (ours.kinds, plain.kinds) == (["relayOpen"], ["relayOpen"])

    one.leave()

    assert ours.kinds == ["relayClose", "peerLeft"]
    assert plain.kinds == ["peerLeft"]


# News.


def test_a_refresh_is_no_news(relaying: RelayHarness) -> None:
    peer, bystander = relaying.join(1), relaying.join(2)

    peer.say(peer.registration(displayName="another"))

    assert bystander.heard == []


def test_nodes_of_one_batch_get_only_later_announcements(
    relaying: RelayHarness,
) -> None:
    peers = [relaying.connect(seed) for seed in range(1, 5)]
    for peer in peers:
        peer.say(peer.registration())

    for place, peer in enumerate(peers):
        joined = [each["peerJoined"]["nodeID"] for each in peer.heard]
        assert joined == [each.id for each in peers[place + 1 :]]


def test_announcements_are_sent_in_batches_of_links(relaying: RelayHarness) -> None:
    limits = replace(LIMITS, links_per_address=10_000)
    relaying = RelayHarness(limits)
    peers = [relaying.connect(1, "a")]
    peers[0].say(peers[0].registration())
    relay = relaying.relay
    # The keys are of no matter here, and there are not as many seeds.
    registry = relay._registry
    registry._context = replace(registry._context, verify=lambda *_: True)
    for number in range(BATCH_LINKS * 2 + 1):
        peer = relaying.connect(2, "a")
        id_ = f"{number:064x}"
        peer.say(peer.registration(nodeID=id_, publicKey=id_))
        peers.append(peer)
    relaying.tick(1.0)
    for peer in peers:
        peer.said.clear()

    peers[0].leave()

    told = 0
    while told < len(peers) - 1:
        deadline = relay.deadline
        assert deadline is not None
        relaying.now = max(relaying.now, deadline)
        (spread,) = relay.tick(relaying.now)
        relaying.deliver((spread,))
        told += len(spread.links)  # type: ignore[union-attr]  # nothing else is due
        assert len(spread.links) <= BATCH_LINKS  # type: ignore[union-attr]  # as above
    assert all(
        [list(each) for each in peer.said] == [["peerLeft"]] for peer in peers[1:]
    )


# Finding.


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, [1, 2]),
        ({"modelID": "big"}, [1]),
        ({"modelID": "absent"}, []),
        ({"minRAMGB": 32}, [1]),
        ({"minTier": 2}, [1]),
        ({"minTier": 4}, [1, 2]),
        ({"maxPeers": 1}, [1]),
        ({"maxPeers": 0}, []),
        ({"modelID": None, "minRAMGB": None}, [1, 2]),
    ],
    ids=str,
)
def test_the_filter_is_applied(
    relaying: RelayHarness, wanted: dict[str, Any], found: list[int]
) -> None:
    small = HARDWARE | {"totalRAMGB": 8, "tier": 4}
    relaying.join(1, capabilities=CAPABILITIES | {"loadedModels": ["m", "big"]})
    relaying.join(2, capabilities=CAPABILITIES | {"hardware": small})
    relaying.join(3, capabilities=CAPABILITIES | {"isAvailable": False})
    asker = relaying.join(4)

    answers = asker.say({"discover": {"requestingNodeID": "x", "filter": wanted}})

    there = {signer(seed).public_key.hex() for seed in found}
    if wanted.get("maxPeers") == 1:
        assert len(_found(answers)) == 1
    else:
        assert set(_found(answers)) == there


def test_discovery_lists_fifty_nodes_unless_more_are_requested(
    relaying: RelayHarness,
) -> None:
    for seed in range(2, 72):
        peer = relaying.connect(seed)
        peer.say(peer.registration())
    asker = relaying.join(1)

    some = _found(asker.say({"discover": {}}))
    others = _found(asker.say({"discover": {}}))
    all_ = _found(asker.say({"discover": {"filter": {"maxPeers": 1000}}}))

    assert len(set(some)) == len(set(others)) == LIMITS.results == 50
    assert set(some) != set(others)  # chance decides who comes first
    assert len(set(all_)) == 70


# From node to node.


def test_both_ends_talk_once_a_session_is_open(relaying: RelayHarness) -> None:
    here, there = relaying.join(1), relaying.join(2)

    here.say(here.to("relayOpen", there))
    there.say(there.to("relayReady", here, SESSION.lower()))
    here.say(here.to("relayData", there, data="e30="))
    there.say(there.to("relayData", here, SESSION.lower(), data="e30="))
    there.say(there.to("relayClose", here))
    here.say(here.to("relayClose", there))

    assert there.kinds == ["relayOpen", "relayData"]
    assert here.kinds == ["relayReady", "relayData", "relayClose"]
    assert error_of(here.say(here.to("relayData", there, data=""))) == (
        "session_not_found"
    )


@pytest.mark.parametrize(
    "data", ["e30=", "e3 0", '\\u00e9 é "', [123, 125], "x" * 99_999]
)
def test_data_is_passed_on_as_it_is(relaying: RelayHarness, data: object) -> None:
    here, there = relaying.pair()

    message = here.to("relayData", there, data=data, more={"a": [1, 2.5, None]})
    assert here.say(message) == []

    assert there.heard == [message]


def test_messages_of_either_frame_are_taken(relaying: RelayHarness) -> None:
    here, there = relaying.pair()
    message = here.to("relayData", there, data="e30=")

    here.say(json.dumps(message).encode())

    assert there.heard == [message]


@pytest.mark.parametrize("kind", FROM_NODE_TO_NODE)
def test_an_unregistered_node_cannot_send(relaying: RelayHarness, kind: str) -> None:
    other, stranger = relaying.join(1), relaying.connect(2)

    assert error_of(stranger.say(stranger.to(kind, other))) == "not_registered"
    assert other.heard == []


@pytest.mark.parametrize("kind", FROM_NODE_TO_NODE)
def test_a_forged_sender_is_refused(relaying: RelayHarness, kind: str) -> None:
    here, there = relaying.pair()
    forger = relaying.join(3)

    message = here.to(kind, there, data="e30=")

    assert error_of(forger.say(message)) == "wrong_sender"
    assert there.heard == here.heard == []


def test_a_third_gets_nothing_into_a_session(relaying: RelayHarness) -> None:
    here, there = relaying.pair()
    third = relaying.join(3)

    for kind in ("relayData", "relayReady"):
        assert error_of(third.say(third.to(kind, there, data="e30="))) == (
            "session_not_found"
        )
    assert third.say(third.to("relayClose", there)) == []
    # Readers may go by the id alone.
    assert error_of(third.say(third.to("relayOpen", there))) == "session_taken"
    assert error_of(third.say(third.to("relayOpen", here, SESSION.lower()))) == (
        "session_taken"
    )
    assert here.heard == there.heard == []
    here.say(here.to("relayData", there, data="e30="))
    assert there.kinds == ["relayData"]


def test_a_session_is_opened_again_after_a_reconnection(relaying: RelayHarness) -> None:
    here, there = relaying.pair()
    here.leave()
    again = relaying.join(1)

    assert error_of(there.say(there.to("relayData", again, data=""))) == (
        "session_not_found"
    )
    again.say(again.to("relayOpen", there))
    there.say(there.to("relayData", again, data="e30="))

    assert there.kinds[-1] == "relayOpen"
    assert again.kinds == ["relayData"]


def test_an_open_session_may_be_opened_again(relaying: RelayHarness) -> None:
    here, there = relaying.pair()

    assert there.say(there.to("relayOpen", here)) == []
    assert here.say(here.to("relayOpen", there)) == []

    assert (here.kinds, there.kinds) == (["relayOpen"], ["relayOpen"])


@pytest.mark.parametrize("kind", FROM_NODE_TO_NODE)
@pytest.mark.parametrize("name", ["fromNodeID", "toNodeID", "sessionID"])
def test_ids_that_are_none_are_refused(
    relaying: RelayHarness, kind: str, name: str
) -> None:
    here, there = relaying.pair()

    nothing: tuple[Any, ...] = (5, None, [], {}, True)
    for value in nothing:
        answers = here.say(here.to(kind, there, data="e30=", **{name: value}))
        assert error_of(answers) == "invalid_message"

    assert here.heard == there.heard == []


def test_a_session_with_the_node_itself_is_refused(relaying: RelayHarness) -> None:
    peer = relaying.join(1)

    assert error_of(peer.say(peer.to("relayOpen", peer))) == "invalid_message"


@pytest.mark.parametrize("size", [32, 79])
def test_a_handshake_that_kills_readers_is_not_passed_on(
    relaying: RelayHarness, size: int
) -> None:
    here, there = relaying.pair()
    data = "A" + "Q" + "A" * (((size + 1) * 8 + 5) // 6 - 2)
    data += "=" * (-len(data) % 4)

    assert error_of(here.say(here.to("relayData", there, data=data))) == (
        "invalid_message"
    )
    assert there.heard == []


def test_what_comes_with_a_bad_message_still_counts(relaying: RelayHarness) -> None:
    here, there = relaying.pair()
    good = here.to("relayData", there, data="e30=")

    answers = here.say(good, "null", good, "{}", good)

    assert [each["error"]["code"] for each in answers] == ["invalid_message"] * 2
    assert there.kinds == ["relayData"] * 3


ANY = st.none() | st.integers() | st.text(max_size=4) | st.lists(st.none(), max_size=1)


@given(st.data())
def test_nodes_receive_nothing_but_their_sessions(
    data: st.DataObject,
) -> None:
    relaying = RelayHarness()
    here, there = relaying.pair()
    attacker = relaying.join(3)
    names = ["fromNodeID", "toNodeID", "sessionID", "data", "nodeID", "filter", "_0"]
    words = [here.id, there.id, attacker.id, SESSION]
    values = ANY | st.sampled_from(words)
    payloads = ANY | st.dictionaries(st.sampled_from(names), values)
    kinds = st.sampled_from([*KINDS, "x"])

    for _ in range(5):
        kind, payload = data.draw(kinds), data.draw(payloads)
        attacker.say(json.dumps({kind: payload}))

    for each in (here, there):
        assert each.closed is None
        for message in each.heard:
            ((_, payload),) = message.items()
            assert payload["fromNodeID"] == attacker.id
            assert payload["sessionID"] != SESSION


# Limits.


def test_a_silent_node_is_removed(relaying: RelayHarness) -> None:
    silent, other = relaying.join(1), relaying.join(2)

    relaying.now += LIMITS.node_ttl - 10
    other.say({"discover": {}})
    relaying.tick(20)

    assert error_of(silent.said) == "registration_expired"
    assert [list(each) for each in other.said] == [["peerLeft"]]
    assert error_of(silent.say({"discover": {}})) != "rate_limited"
    (answer,) = silent.say(silent.registration())
    assert "registerAck" in answer


def test_a_link_without_a_registration_is_closed(relaying: RelayHarness) -> None:
    stranger, other = relaying.connect(1), relaying.join(2)

    stranger.say("garbage", "{}")
    relaying.tick(LIMITS.registration_timeout + 10)

    assert stranger.closed == (1008, "no registration in time")
    assert other.closed is None


def test_connections_of_one_address_are_limited() -> None:
    relaying = RelayHarness(replace(LIMITS, links_per_address=2))
    peers = [relaying.connect(seed, "192.0.2.1") for seed in (1, 2)]

    third = relaying.connect(3, "192.0.2.1")
    elsewhere = relaying.connect(4, "192.0.2.2")
    peers[0].leave()
    again = relaying.connect(3, "192.0.2.1")

    assert third.closed == (1013, "too many connections: try again later")
    assert elsewhere.closed is None
    assert again.closed is None


def test_nodes_are_limited() -> None:
    relaying = RelayHarness(replace(LIMITS, nodes=2))
    first = relaying.join(1)
    relaying.join(2)
    third = relaying.connect(3)

    assert error_of(third.say(third.registration())) == "relay_full"
    first.leave()
    (answer,) = third.say(third.registration())
    assert "registerAck" in answer


def test_what_is_kept_of_nodes_is_limited() -> None:
    relaying = RelayHarness(replace(LIMITS, stored_size=10_000))
    much = CAPABILITIES | {"more": "x" * 6000}
    first, second = relaying.join(1, capabilities=much), relaying.connect(2)

    assert error_of(second.say(second.registration(capabilities=much))) == "relay_full"
    (answer,) = first.say(first.registration())
    assert "registerAck" in answer
    (answer,) = second.say(second.registration(capabilities=much))
    assert "registerAck" in answer


def test_sessions_of_a_node_are_limited() -> None:
    relaying = RelayHarness(replace(LIMITS, sessions_per_node=3))
    here, there = relaying.join(1), relaying.join(2)
    for number in range(3):
        assert here.say(here.to("relayOpen", there, str(number))) == []

    assert error_of(here.say(here.to("relayOpen", there, "3"))) == "too_many_sessions"
    assert there.say(there.to("relayOpen", here, "3")) == []  # they are not its own
    assert here.say(here.to("relayClose", there, "0")) == []
    assert here.say(here.to("relayOpen", there, "4")) == []


def test_sessions_are_limited() -> None:
    relaying = RelayHarness(replace(LIMITS, sessions=1))
    here, there = relaying.pair()

    assert error_of(there.say(there.to("relayOpen", here, "x"))) == "relay_full"


@pytest.mark.parametrize("kind", ["relayOpen", "offer", "answer", "iceCandidate"])
def test_a_flood_of_openings_is_rate_limited(relaying: RelayHarness, kind: str) -> None:
    relaying = RelayHarness(replace(LIMITS, openings=Rate(10, 50)))
    flooder, victim, other = (relaying.join(seed) for seed in (1, 2, 3))

    answers = flooder.say(
        *(flooder.to(kind, victim, str(number)) for number in range(1000))
    )

    assert {each["error"]["code"] for each in answers} == {"rate_limited"}
    assert {each["error"]["retryAfterSeconds"] for each in answers} == {1}
    assert len(victim.heard) == 50
    assert other.say(other.to("relayOpen", victim, "honest")) == []
    assert victim.kinds == ["relayOpen"]
    relaying.now += 1
    assert flooder.say(flooder.to(kind, victim, "late")) == []


@pytest.mark.parametrize(
    "message", [{"discover": {}}, {"register": {}}], ids=["discover", "register"]
)
def test_floods_of_discovery_and_registrations_are_rate_limited(
    relaying: RelayHarness, message: dict[str, Any]
) -> None:
    flooder = relaying.join(1)

    answers = flooder.say(*[message] * 100)

    codes = [each["error"]["code"] for each in answers if "error" in each]
    assert codes.count("rate_limited") >= 80


def test_discovery_over_many_connections_shares_one_limit() -> None:
    relaying = RelayHarness(replace(LIMITS, lookups=Rate(1, 10)))
    one, two = relaying.pair()
    question: dict[str, Any] = {"discover": {}}

    answers = [each for peer in (one, two) for each in peer.say(*[question] * 4)]
    other = relaying.connect(3, "198.51.100.1")
    other.say(other.registration())

    codes = [each["error"]["code"] for each in answers if "error" in each]
    assert codes == ["rate_limited"] * 3
    (found,) = other.say(question)
    assert "discoverResponse" in found
    relaying.now += 10
    (found,) = one.say(question)
    assert "discoverResponse" in found


def test_nodes_of_one_address_open_only_so_many_sessions() -> None:
    relaying = RelayHarness(replace(LIMITS, sessions_per_address=2))
    here, there = relaying.pair()
    assert there.say(there.to("relayOpen", here, "second")) == []

    assert error_of(here.say(here.to("relayOpen", there, "third"))) == (
        "too_many_sessions"
    )
    other = relaying.connect(3, "198.51.100.1")
    other.say(other.registration())
    assert other.say(other.to("relayOpen", here, "third")) == []
    here.say(here.to("relayClose", there))
    assert there.say(there.to("relayOpen", here, "fourth")) == []


def test_a_flood_of_data_is_read_more_slowly_and_loses_nothing(
    relaying: RelayHarness,
) -> None:
    relaying = RelayHarness(replace(LIMITS, messages=Rate(10, 100)))
    here, there = relaying.pair()
    message = here.to("relayData", there, data="e30=")

    assert here.say(*[message] * 90) == []
    assert relaying.relay.read_delay(here.link, relaying.now) <= 0
    assert here.say(*[message] * 15) == []

    assert 0 < relaying.relay.read_delay(here.link, relaying.now) <= LIMITS.pause_max
    assert relaying.relay.read_delay(there.link, relaying.now) <= 0
    assert len(there.heard) == 105


def test_a_flood_of_bytes_is_read_more_slowly(relaying: RelayHarness) -> None:
    relaying = RelayHarness(replace(LIMITS, size=Rate(1000, 10_000)))
    here, there = relaying.pair()

    here.say(here.to("relayData", there, data="e30=" * 5000))

    assert relaying.relay.read_delay(here.link, relaying.now) == LIMITS.pause_max
    assert len(there.heard) == 1


def test_data_of_a_closed_link_is_ignored(relaying: RelayHarness) -> None:
    older, other = relaying.pair()
    relaying.join(1)
    assert older.closed is not None

    assert older.say(older.to("relayData", other, data="e30=")) == []
    assert relaying.relay.link_closed(older.link, relaying.now) == ()


def test_nothing_is_left_of_nodes_that_have_gone(relaying: RelayHarness) -> None:
    here, there = relaying.pair()
    here.leave()
    there.leave()
    relaying.tick(10)

    relay = relaying.relay
    assert not relay._links._by_link
    assert not relay._links._origins
    assert not relay._sessions._of_address
    assert not relay._registry.nodes
    assert relay._registry._stored_size == 0
    assert len(relay._sessions) == 0
    assert not relay._sessions._of_node
    assert relay.deadline is None
