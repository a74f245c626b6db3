"""Nodes of a fleet on real sockets: discovery and loss."""

import pytest

from gateway.serving import eventually
from protocols.macfleet.fleet_members import KEY, member
from protocols.macfleet.served_nodes import ping, served
from shoal.protocols.macfleet.codec.hardware import HardwareProfile
from shoal.protocols.macfleet.heartbeat import Pong
from shoal.protocols.macfleet.membership import NodeState

ONE, OTHER = (
    HardwareProfile(gpu_cores=8, data_port=4001),
    HardwareProfile(gpu_cores=16, data_port=4002),
)


@pytest.mark.parametrize("key", [KEY, None], ids=["secure", "open"])
async def test_a_node_is_found_at_a_configured_address(key: bytes | None) -> None:
    async with (
        served(member("one", key, ONE, nonces=1 << 60)) as one,
        served(member("other", key, OTHER, nonces=1 << 61), [one.address]) as other,
    ):
        await eventually(lambda: other.node("one") is not None)
        found = other.node("one")

        assert found is not None
        assert found.state is NodeState.ALIVE
        assert found.profile == (ONE if key else HardwareProfile())
        assert found.address == one.address
        await eventually(lambda: "answered" in one.ends)
        known = {node.id: node.state for node in one.fleet.nodes}
        assert known == ({"other": NodeState.SIGHTED} if key else {})


async def test_nodes_configured_with_each_other_become_members() -> None:
    async with served(member("one", profile=ONE, nonces=1 << 60)) as one:
        contacts = [one.address]
        other_own = member("other", profile=OTHER, nonces=1 << 61)
        async with served(other_own, contacts) as other:
            again = member("third", nonces=1 << 62)
            async with served(again, [one.address, other.address]) as third:
                await eventually(lambda: len(third.fleet.members()) == 2)
                await eventually(lambda: len(other.fleet.members()) == 1)
                rows = {each.id: each.profile for each in third.fleet.nodes}
                assert rows == {"one": ONE, "other": OTHER}


async def test_a_node_that_left_is_suspected_and_returns_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.protocols.macfleet.gossip.ROUND_INTERVAL", 0.02)
    own = member("one", nonces=1 << 60)
    async with served(own) as one:
        watcher = served(member("watcher", nonces=1 << 61), [one.address])
        watching = await watcher.__aenter__()
        await eventually(lambda: bool(watching.fleet.members()))

    def state() -> NodeState | None:
        node = watching.node("one")
        return None if node is None else node.state

    try:
        await eventually(lambda: state() is NodeState.SUSPECTED)
        async with served(own, port=one.port):
            await eventually(lambda: state() is NodeState.ALIVE)
    finally:
        await watcher.__aexit__(None, None, None)


async def test_a_ping_with_hardware_is_answered_with_hardware() -> None:
    async with served(member("one", profile=ONE)) as one:
        found = await ping(one, member("stranger", nonces=1 << 61))

        assert found == Pong("one", ONE)
