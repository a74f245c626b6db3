import json
from typing import Any

import msgspec
import pytest

from protocols.tealenet.recordings import Case, recorded
from shoal.ledger.keys import Signer
from shoal.protocols.tealenet.codec.relay_messages import NodeEntry
from shoal.protocols.tealenet.codec.signatures import (
    encode_base64,
    noise_binding,
    noise_fields,
)
from shoal.protocols.tealenet.membership.node_directory import (
    COMPLETE_BELOW,
    ENTRIES_MAX,
    FORGOTTEN_AFTER,
    NODES_MAX,
    PINNED_MAX,
    KnownNode,
    NodeDirectory,
    PinnedKeys,
    is_bound,
)
from shoal.protocols.tealenet.peer import PeerSoftware

OWN = "0" * 64
ANNE, BELA = Signer.from_seed(b"a" * 32), Signer.from_seed(b"b" * 32)
A = ANNE.public_key.hex()
HARDWARE = {
    "chipFamily": "m2",
    "chipName": "x",
    "totalRAMGB": 16.0,
    "gpuCoreCount": 8,
    "memoryBandwidthGBs": 100.0,
    "tier": 2,
}
PLAIN: dict[str, Any] = {
    "hardware": HARDWARE,
    "loadedModels": ["m"],
    "maxModelSizeGB": 8.0,
    "isAvailable": True,
}


def entry(node_id: str = A, key: str | None = None, **said: Any) -> NodeEntry:
    return NodeEntry(node_id, node_id, "n", PLAIN | said, 1.0, "unknown", [], key)


def ours(signer: Signer = ANNE, **said: Any) -> dict[str, Any]:
    noise, proof = noise_fields(signer)
    return {
        "version": 1,
        "role": "worker",
        "noise": noise,
        "noise_proof": proof,
    } | said


def known(*entries: NodeEntry, pinned: PinnedKeys | None = None) -> list[KnownNode]:
    directory = NodeDirectory(OWN, pinned or PinnedKeys())
    directory.update(entries, 0.0)
    return [*directory.all()]


@recorded("node_capabilities")
def test_recorded_capabilities_are_understood(case: Case) -> None:
    said = json.loads(case["json_text"])

    (node,) = known(entry(**said))

    assert list(node.description.models) == said["loadedModels"]
    assert node.description.slots == said.get("maxConcurrentRequests", 1)
    assert node.description.context == said.get("effectiveContext", 0)


@pytest.mark.parametrize(
    ("key", "said", "breed"),
    [
        (ANNE.exchange_key.hex(), {}, PeerSoftware.MAC),
        (ANNE.exchange_key.hex(), {"shoal": {"version": 0}}, PeerSoftware.MAC),
        (ANNE.exchange_key.hex(), {"shoal": "what is that"}, PeerSoftware.MAC),
        (None, {}, PeerSoftware.RUST),
        (ANNE.exchange_key.hex(), {"maxConcurrentRequests": 2}, PeerSoftware.RUST),
        (ANNE.exchange_key.hex(), {"shoal": ours()}, PeerSoftware.SHOAL),
    ],
)
def test_the_software_of_a_node_is_guessed_from_its_fields(
    key: str | None, said: dict[str, Any], breed: PeerSoftware
) -> None:
    (node,) = known(entry(key=key, **said))

    assert node.software is breed
    assert node.teale_key == (None if key is None else ANNE.exchange_key)


def test_a_key_for_noise_is_believed_if_the_node_signed_it() -> None:
    (node,) = known(entry(shoal=ours()))

    assert node.noise_key == ANNE.exchange_key
    assert node.role == "worker"


@pytest.mark.parametrize(
    "said",
    [
        ours(BELA),
        ours(noise=BELA.exchange_key.hex()),
        ours(noise=""),
        ours(noise_proof=""),
        ours(noise_proof="no base64"),
        ours(noise_proof=encode_base64(ANNE.sign(ANNE.exchange_key))),
    ],
)
def test_a_shoal_node_with_an_unsigned_key_is_skipped(
    said: dict[str, Any],
) -> None:
    assert known(entry(shoal=said)) == []


def test_a_key_that_was_signed_once_is_believed_in_though_the_relay_hides_it() -> None:
    pinned = PinnedKeys()
    known(entry(shoal=ours()), pinned=pinned)

    (node,) = known(entry(), pinned=pinned)
    (other,) = known(entry(shoal=ours(noise="")), pinned=pinned)

    assert node.noise_key == other.noise_key == ANNE.exchange_key
    assert node.software is other.software is PeerSoftware.SHOAL


def test_only_so_many_keys_are_remembered_the_newest() -> None:
    pinned = PinnedKeys()

    for number in range(PINNED_MAX + 1):
        pinned.pin(str(number), b"key")

    assert len(pinned.keys) == PINNED_MAX
    assert "0" not in pinned.keys


@pytest.mark.parametrize("node_id", [OWN, "", "node-1", A.upper(), A + "0"])
def test_an_entry_with_an_invalid_id_is_skipped(node_id: str) -> None:
    assert known(entry(node_id)) == []


@pytest.mark.parametrize(
    "said", [{"loadedModels": 7}, {"hardware": None}, {"isAvailable": "yes"}]
)
def test_an_entry_with_invalid_capabilities_is_skipped(said: dict[str, Any]) -> None:
    nodes = known(entry(**said), entry(BELA.public_key.hex()))

    assert [node.id for node in nodes] == [BELA.public_key.hex()]


def test_a_node_missing_from_a_complete_list_is_unavailable() -> None:
    directory = NodeDirectory(OWN, PinnedKeys())
    directory.update([entry()], 0.0)

    directory.update([], 10.0)
    assert [node.description.available for node in directory.all()] == [False]
    directory.update([entry()], 20.0)

    assert [node.description.available for node in directory.all()] == [True]


def test_a_node_may_be_among_those_that_an_answer_has_no_room_for() -> None:
    directory = NodeDirectory(OWN, PinnedKeys())
    directory.update([entry()], 0.0)

    others = [entry(f"{number:064x}") for number in range(1, COMPLETE_BELOW + 1)]
    directory.update(others, 10.0)

    assert directory.get(A).description.available


def test_a_node_without_entries_is_removed_after_a_while() -> None:
    directory = NodeDirectory(OWN, PinnedKeys())
    directory.update([entry()], 0.0)

    directory.update([], FORGOTTEN_AFTER)
    assert len([*directory.all()]) == 1
    directory.update([], FORGOTTEN_AFTER + 1)

    assert not [*directory.all()]


def test_only_so_many_nodes_are_known() -> None:
    directory = NodeDirectory(OWN, PinnedKeys())
    for answer in range(NODES_MAX // 100 + 2):
        first = 1 + 100 * answer
        some = [entry(f"{number:064x}") for number in range(first, first + 100)]
        directory.update(some, 0.0)

    assert len([*directory.all()]) == NODES_MAX


def test_only_so_much_of_one_answer_is_read() -> None:
    nodes = known(*(entry(f"{number:064x}") for number in range(1, ENTRIES_MAX + 9)))

    assert len(nodes) == ENTRIES_MAX


def test_an_unknown_node_has_only_its_pinned_key() -> None:
    directory = NodeDirectory(OWN, PinnedKeys({A: b"key"}))

    assert (directory.get(A).noise_key, directory.get(A).software) == (
        b"key",
        PeerSoftware.SHOAL,
    )
    other = directory.get("f" * 64)
    assert (other.noise_key, other.software) == (None, PeerSoftware.RUST)
    assert not other.description.models


def test_a_signature_binds_one_key_to_one_node() -> None:
    signature = ANNE.sign(noise_binding(ANNE.exchange_key))

    assert is_bound(A, ANNE.exchange_key, signature)
    assert not is_bound(BELA.public_key.hex(), ANNE.exchange_key, signature)
    assert not is_bound(A, BELA.exchange_key, signature)
    assert not is_bound(A, ANNE.exchange_key, b"")
    assert not is_bound("none", ANNE.exchange_key, signature)


def test_entries_of_real_relays_are_read() -> None:
    text = msgspec.json.encode(entry(shoal=ours()))

    (node,) = known(msgspec.json.decode(text, type=NodeEntry))

    assert node.noise_key == ANNE.exchange_key
