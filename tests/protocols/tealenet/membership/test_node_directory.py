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
from shoal.protocols.tealenet.membership import node_directory
from shoal.protocols.tealenet.membership.node_directory import (
    COMPLETE_BELOW,
    ENTRIES_MAX,
    FORGOTTEN_AFTER,
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


def entry(node_id: str = A, key: str | None = None, **fields: Any) -> NodeEntry:
    return NodeEntry(node_id, node_id, "n", PLAIN | fields, 1.0, "unknown", [], key)


def introduction(signer: Signer = ANNE, **fields: Any) -> dict[str, Any]:
    noise, proof = noise_fields(signer)
    return {
        "version": 1,
        "role": "worker",
        "noise": noise,
        "noise_proof": proof,
    } | fields


def known(
    *entries: NodeEntry, pinned_keys: PinnedKeys | None = None
) -> list[KnownNode]:
    directory = NodeDirectory(OWN, pinned_keys or PinnedKeys())
    directory.update(entries, 0.0)
    return [*directory.all()]


@recorded("node_capabilities")
def test_recorded_capabilities_are_understood(case: Case) -> None:
    fields = json.loads(case["json_text"])

    (node,) = known(entry(**fields))

    assert list(node.description.models) == fields["loadedModels"]
    assert node.description.context == fields.get("effectiveContext", 0)


@pytest.mark.parametrize(
    ("key", "fields", "software"),
    [
        (ANNE.exchange_key.hex(), {}, PeerSoftware.MAC),
        (ANNE.exchange_key.hex(), {"shoal": {"version": 0}}, PeerSoftware.MAC),
        (ANNE.exchange_key.hex(), {"shoal": "invalid"}, PeerSoftware.MAC),
        (None, {}, PeerSoftware.RUST),
        (ANNE.exchange_key.hex(), {"maxConcurrentRequests": 2}, PeerSoftware.RUST),
        (ANNE.exchange_key.hex(), {"effectiveContext": 4096}, PeerSoftware.RUST),
        (ANNE.exchange_key.hex(), {"onACPower": True}, PeerSoftware.RUST),
        (ANNE.exchange_key.hex(), {"shoal": introduction()}, PeerSoftware.SHOAL),
    ],
)
def test_the_software_of_a_node_is_guessed_from_its_fields(
    key: str | None, fields: dict[str, Any], software: PeerSoftware
) -> None:
    (node,) = known(entry(key=key, **fields))

    assert node.software is software
    assert node.teale_key == (None if key is None else ANNE.exchange_key)


def test_a_signed_noise_key_is_accepted() -> None:
    (node,) = known(entry(shoal=introduction()))

    assert node.noise_key == ANNE.exchange_key
    assert node.role == "worker"


@pytest.mark.parametrize(
    "fields",
    [
        introduction(BELA),
        introduction(noise=BELA.exchange_key.hex()),
        introduction(noise=""),
        introduction(noise_proof=""),
        introduction(noise_proof="no base64"),
        introduction(noise_proof=encode_base64(ANNE.sign(ANNE.exchange_key))),
    ],
)
def test_a_shoal_node_with_an_unsigned_key_is_skipped(
    fields: dict[str, Any],
) -> None:
    assert known(entry(shoal=fields)) == []


def test_a_pinned_key_is_used_if_the_relay_hides_it() -> None:
    pinned_keys = PinnedKeys()
    known(entry(shoal=introduction()), pinned_keys=pinned_keys)

    (node,) = known(entry(), pinned_keys=pinned_keys)
    (other,) = known(entry(shoal=introduction(noise="")), pinned_keys=pinned_keys)

    assert node.noise_key == other.noise_key == ANNE.exchange_key
    assert node.software is other.software is PeerSoftware.SHOAL


def test_the_oldest_pinned_keys_are_evicted() -> None:
    pinned_keys = PinnedKeys()

    for number in range(PINNED_MAX + 1):
        pinned_keys.pin(str(number), b"key")

    assert len(pinned_keys.keys) == PINNED_MAX
    assert "0" not in pinned_keys.keys


@pytest.mark.parametrize("node_id", [OWN, "", "node-1", A.upper(), A + "0"])
def test_an_entry_with_an_invalid_id_is_skipped(node_id: str) -> None:
    assert known(entry(node_id)) == []


@pytest.mark.parametrize(
    "fields", [{"loadedModels": 7}, {"hardware": None}, {"isAvailable": "yes"}]
)
def test_an_entry_with_invalid_capabilities_is_skipped(fields: dict[str, Any]) -> None:
    nodes = known(entry(**fields), entry(BELA.public_key.hex()))

    assert [node.id for node in nodes] == [BELA.public_key.hex()]


def test_a_node_missing_from_a_complete_list_is_unavailable() -> None:
    directory = NodeDirectory(OWN, PinnedKeys())
    directory.update([entry()], 0.0)

    directory.update([], 10.0)
    assert [node.description.available for node in directory.all()] == [False]
    directory.update([entry()], 20.0)

    assert [node.description.available for node in directory.all()] == [True]


def test_a_node_missing_from_a_full_list_stays_available() -> None:
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


def test_known_nodes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_directory, "NODES_MAX", 250)
    directory = NodeDirectory(OWN, PinnedKeys())
    for answer in range(4):
        first = 1 + 100 * answer
        some = [entry(f"{number:064x}") for number in range(first, first + 100)]
        directory.update(some, 0.0)

    assert len([*directory.all()]) == 250


def test_entries_of_one_answer_are_limited() -> None:
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
    text = msgspec.json.encode(entry(shoal=introduction()))

    (node,) = known(msgspec.json.decode(text, type=NodeEntry))

    assert node.noise_key == ANNE.exchange_key


def test_a_new_name_of_a_node_is_applied() -> None:
    directory = NodeDirectory(OWN, PinnedKeys())
    for name in ("n", "another"):
        directory.update([msgspec.structs.replace(entry(), display_name=name)], 0.0)

        assert directory.get(A).description.profile.name == name
