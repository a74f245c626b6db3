import json
from typing import Any

import msgspec
import pytest

from protocols.tealenet.recordings import Case, recorded
from shoal.ledger.keys import Signer
from shoal.protocols.tealenet.codec.relay_messages import NodeEntry
from shoal.protocols.tealenet.peer import PeerSoftware
from shoal.protocols.tealenet.relay_client import registration
from shoal.protocols.tealenet.relay_client.registration import (
    COMPLETE_BELOW,
    ENTRIES_MAX,
    FORGOTTEN_AFTER,
    KnownNode,
    NodeDirectory,
)

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


def known(*entries: NodeEntry) -> list[KnownNode]:
    directory = NodeDirectory(OWN)
    directory.update(entries, 0.0)
    return [*directory.all()]


@recorded("node_capabilities")
def test_recorded_capabilities_are_understood(case: Case) -> None:
    fields = json.loads(case["json_text"])

    (node,) = known(entry(**fields))

    assert list(node.description.models) == fields["loadedModels"]
    assert node.description.context == fields.get("effectiveContext", 0)


@pytest.mark.parametrize(
    ("key", "software"),
    [
        (ANNE.exchange_key.hex(), PeerSoftware.MAC),
        (None, PeerSoftware.RUST),
    ],
)
def test_rust_nodes_have_no_key(key: str | None, software: PeerSoftware) -> None:
    (node,) = known(entry(key=key, maxConcurrentRequests=2))

    assert node.software is software
    assert node.exchange_key == (None if key is None else ANNE.exchange_key)


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
    directory = NodeDirectory(OWN)
    directory.update([entry()], 0.0)

    directory.update([], 10.0)
    assert [node.description.available for node in directory.all()] == [False]
    directory.update([entry()], 20.0)

    assert [node.description.available for node in directory.all()] == [True]


def test_a_node_missing_from_a_full_list_stays_available() -> None:
    directory = NodeDirectory(OWN)
    directory.update([entry()], 0.0)

    others = [entry(f"{number:064x}") for number in range(1, COMPLETE_BELOW + 1)]
    directory.update(others, 10.0)

    assert directory.get(A).description.available


def test_a_node_without_entries_is_removed_after_a_while() -> None:
    directory = NodeDirectory(OWN)
    directory.update([entry()], 0.0)

    directory.update([], FORGOTTEN_AFTER)
    assert len([*directory.all()]) == 1
    directory.update([], FORGOTTEN_AFTER + 1)

    assert not [*directory.all()]


def test_an_unknown_node_has_only_its_id() -> None:
    node = NodeDirectory(OWN).get(A)

    assert (node.exchange_key, node.software) == (None, PeerSoftware.RUST)
    assert not node.description.models


def test_known_nodes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "NODES_MAX", 250)
    directory = NodeDirectory(OWN)
    for answer in range(4):
        first = 1 + 100 * answer
        some = [entry(f"{number:064x}") for number in range(first, first + 100)]
        directory.update(some, 0.0)

    assert len([*directory.all()]) == 250


def test_entries_of_one_answer_are_limited() -> None:
    nodes = known(*(entry(f"{number:064x}") for number in range(1, ENTRIES_MAX + 9)))

    assert len(nodes) == ENTRIES_MAX


def test_a_new_name_of_a_node_is_applied() -> None:
    directory = NodeDirectory(OWN)
    for name in ("n", "another"):
        directory.update([msgspec.structs.replace(entry(), display_name=name)], 0.0)

        assert directory.get(A).description.profile.name == name
