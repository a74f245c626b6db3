"""Nodes of a wire's membership, as operators see them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.serving import Pool
from shoal.domain.worker import Hardware
from shoal.protocols.seam.endpoints import ListedNode, OutgoingConnection, Probe

HERE = ListedNode("me", "", "here", None, 10.0, 1, 0.25)


class FixedMembership:
    """A membership prober with fixed nodes."""

    deadline = None

    def __init__(self, *found: ListedNode) -> None:
        self.found = found

    def tick(self, now: float) -> Sequence[Probe | OutgoingConnection]:
        return ()

    def dropped(self) -> Sequence[OutgoingConnection]:
        return ()

    def nodes(self) -> Sequence[ListedNode]:
        return self.found


async def get(pool: Pool, path: str) -> Any:
    async with pool.session.get(pool.url + path, headers=pool.headers()) as response:
        assert response.status == 200
        return await response.json()


async def test_nodes_are_listed_with_their_wire_and_age(pool: Pool) -> None:
    assert pool.gateway is not None
    clock = pool.gateway.clock
    there = ListedNode("b", "192.0.2.1:5", "alive", clock.now(), 30.0, 0, 0.75, True)
    there = replace(there, hardware=Hardware(chip="M2", memory_gb=24.0, gpu_cores=10))
    pool.gateway.probers.append(("wire", FixedMembership(HERE, there)))

    ours, theirs = (await get(pool, "/admin/nodes"))["data"]

    assert theirs.pop("since") == pytest.approx(clock.wall(), abs=5.0)
    assert theirs == {
        "wire": "wire",
        "name": "b",
        "address": "192.0.2.1:5",
        "state": "alive",
        "score": 30.0,
        "rank": 0,
        "weight": 0.75,
        "coordinator": True,
        "remark": "",
        "hardware": {
            "chip": "M2",
            "memory_gb": 24.0,
            "gpu_cores": 10,
            "bandwidth_gb": 0.0,
        },
    }
    assert (ours["name"], ours["since"]) == ("me", None)
    assert ours["hardware"] is None
    assert len((await get(pool, "/admin/status"))["nodes"]) == 2


async def test_lone_node_is_not_listed(pool: Pool) -> None:
    assert pool.gateway is not None
    pool.gateway.probers.append(("wire", FixedMembership(HERE)))

    assert (await get(pool, "/admin/nodes"))["data"] == []


async def test_nodes_require_a_key(pool: Pool) -> None:
    async with pool.session.get(pool.url + "/admin/nodes") as response:
        assert response.status == 401
