"""The machines that a coordinator's status is about."""

from collections.abc import Mapping
from typing import Any

from shoal.cli.pool.machines import machines

WORKER: Mapping[str, Any] = {
    "models": [],
    "tasks": [],
    "kinds": ["chat"],
    "slots": 2,
    "busy": 1,
    "draining": "",
    "suspension": None,
    "unfit": "",
    "public_key": None,
    "proven": False,
    "peer_name": "",
    "connected_at": 100.0,
    "engine": "",
}
ORDER: Mapping[str, Any] = {"since": 50.0, "by": "al", "workers": [], "running": 0}
NODE: Mapping[str, Any] = {
    "wire": "lan",
    "name": "otter",
    "address": "192.0.2.1:5",
    "state": "suspect",
    "since": 7.0,
}


def worker(id_: str, **fields: object) -> dict[str, Any]:
    return {**WORKER, "id": id_, **fields}


PEER = {"id": "mesh:a", "name": "", "pending": False}


def listed(**status: object) -> list[dict[str, Any]]:
    """Return what the machines of a status are, without what is empty."""
    parts = ("workers", "peers", "refused", "orders", "nodes")
    found = machines({part: status.get(part, []) for part in parts})
    return [
        {name: value for name, value in each.as_json().items() if value}
        for each in found
    ]


def test_workers_with_one_proven_key_are_one_machine() -> None:
    key = {"public_key": "ab", "proven": True}
    calls = {"kinds": ["call"], "tasks": ["add", "mul"], "slots": 1, "busy": 0}

    found = listed(
        workers=[
            worker("mesh:otter/m1", models=["m1"], tasks=["summarize"], **key),
            worker("mesh:otter/m2", models=["m2"], engine="e", **key),
            worker("mesh:otter/m3", models=["m3"], engine="e", **key),
            worker("lan:otter", connected_at=90.0, **calls, **key),
            worker("lan:thief", public_key="ab"),
        ]
    )

    assert found == [
        {
            "name": "otter",
            "names": ["mesh:otter", "lan:otter"],
            "states": ["active"],
            "wires": ["lan", "mesh"],
            "models": ["m1", "m2", "m3"],
            "functions": ["add", "mul"],
            "running": 3,
            "slots": 5,
            "since": 90.0,
        },
        {
            "name": "thief",
            "names": ["lan:thief"],
            "states": ["active"],
            "wires": ["lan"],
            "running": 1,
            "slots": 2,
            "since": 100.0,
        },
    ]


def test_a_machine_has_the_states_of_its_workers() -> None:
    workers = [
        worker("mesh:a/m1", suspension="paused", draining="x", unfit="y"),
        worker("mesh:a/m2"),
        worker("mesh:a/m3", draining="going home", unfit="y"),
        worker("mesh:a/m4", unfit="is too hot"),
        worker("mesh:a/m5"),
    ]

    (found,) = listed(workers=workers, peers=[PEER | {"name": "Studio"}])

    assert found["states"] == ["paused", "active", "leaving", "unfit"]
    assert found["name"] == "Studio"


def test_orders_are_shown_also_of_machines_that_are_away() -> None:
    orders = [
        {**ORDER, "name": "mesh:a", "state": "paused"},
        {**ORDER, "name": "mesh:b/m1", "state": "draining"},
        {**ORDER, "name": "mesh:c", "state": "removed"},
        {**ORDER, "name": "mesh:d", "state": "drained"},
    ]
    workers = [worker("mesh:a/m1", suspension="paused"), worker("mesh:b/m2")]

    found = listed(workers=workers, orders=orders)

    shown = [(each["name"], each["states"], each["since"]) for each in found]
    assert shown == [
        ("a", ["paused"], 50.0),
        ("b", ["active"], 100.0),
        ("c", ["removed"], 50.0),
        ("d", ["drained"], 50.0),
    ]


def test_peers_and_monitored_nodes_without_workers_are_machines() -> None:
    found = listed(
        workers=[worker("lan:beaver")],
        peers=[PEER, PEER | {"id": "mesh:e", "pending": True}],
        refused=[{"id": "mesh:b", "name": "Laptop"}],
        nodes=[
            NODE,
            {**NODE, "name": "beaver"},
            {**NODE, "name": "", "address": "192.0.2.2:5"},
            {**NODE, "name": "us", "address": ""},
        ],
    )

    assert [(each["name"], each["states"]) for each in found] == [
        ("192.0.2.2:5", ["suspect"]),
        ("a", ["active"]),
        ("Laptop", ["not admitted"]),
        ("beaver", ["active"]),
        ("e", ["pending"]),
        ("otter", ["suspect"]),
    ]
