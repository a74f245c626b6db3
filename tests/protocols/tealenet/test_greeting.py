"""Introductions, as the document's example writes them."""

from dataclasses import replace

import pytest

from protocols.tealenet.peers import (
    ForeignPeer,
    PeerPair,
    local_coordinator,
    local_worker,
)
from shoal.domain.errors import ConfigError
from shoal.domain.worker import Hardware, ServedModel
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.seam.peer_session import PeerDescribed, PeerJoined
from shoal.protocols.seam.session import PeerProfile
from shoal.protocols.tealenet.codec.scalars import passcode_hash
from shoal.protocols.tealenet.local_node import Config, worker_node

# "hello" and "heartbeat" of TealeNet's document, whose acknowledgements are alike.
INTRODUCTION = b"""{
"deviceInfo": {
"id": "550e8400-e29b-41d4-a716-446655440000",
"name": "Linux Server",
"hardware": {
"chipFamily": "nvidiaGPU",
"chipName": "NVIDIA RTX 4090",
"totalRAMGB": 64.0,
"gpuCoreCount": 16384,
"memoryBandwidthGBs": 1008.0,
"tier": 1,
"gpuBackend": "cuda",
"platform": "linux",
"gpuVRAMGB": 24.0
},
"registeredAt": 798134400.0,
"lastSeenAt": 798134400.0,
"isCurrentDevice": true,
"loadedModels": []
},
"protocolVersion": 1,
"clusterPasscodeHash": null,
"loadedModels": ["mlx-community/Qwen3-8B-4bit"],
"ownerUserID": null
}"""
HEARTBEAT = b"""{
"heartbeat": {
"deviceID": "550e8400-e29b-41d4-a716-446655440000",
"timestamp": 798134400.0,
"thermalLevel": "nominal",
"throttleLevel": 100,
"loadedModels": ["mlx-community/Qwen3-8B-4bit"],
"isGenerating": false,
"queueDepth": 0,
"organizationID": null,
"ownerUserID": null
}
}"""
ROLES = ["coordinator", "worker"]
OWNER = "6BA7B810-9DAD-41D1-80B4-00C04FD430C8"
SERVER = Hardware(
    chip="NVIDIA RTX 4090",
    chip_family="nvidiaGPU",
    memory_gb=64.0,
    gpu_cores=16384,
    bandwidth_gb=1008.0,
    tier=1,
    gpu_backend="cuda",
    platform="linux",
    gpu_memory_gb=24.0,
)


def greeted(role: str, introduction: bytes = INTRODUCTION) -> ForeignPeer:
    """Return the session of the document's peer with a coordinator or a worker."""
    dialled = role == "worker"
    local = local_worker("w") if dialled else local_coordinator("a")
    peer = ForeignPeer(local, dialled=dialled)
    kind = b"helloAck" if dialled else b"hello"
    peer.deliver(b'{"%s":%s}' % (kind, introduction))
    peer.wait(0.2)
    return peer


@pytest.mark.parametrize("role", ROLES)
def test_a_peer_is_described_after_it_has_joined(role: str) -> None:
    peer = greeted(role)

    peer.deliver(HEARTBEAT)
    peer.deliver(HEARTBEAT)

    assert isinstance(peer.end.received[0], PeerJoined)
    assert isinstance(peer.end.received[1], PeerDescribed)
    (described,) = peer.end.messages(PeerDescribed)
    assert described.profile == PeerProfile(
        "Linux Server", SERVER, protocol_version=1, registered_at=1776441600.0
    )


def test_both_ends_are_described_to_each_other() -> None:
    pair = PeerPair(local_worker("w"), local_coordinator("a")).until(1.0)

    for end, name in ((pair.dialler, "a"), (pair.acceptor, "w")):
        (described,) = end.messages(PeerDescribed)
        assert described.profile.name == name
        assert described.profile.hardware is not None


@pytest.mark.parametrize("role", ROLES)
def test_the_owner_and_the_organization_are_shown(role: str) -> None:
    owned = b'"ownerUserID": "%s"' % OWNER.encode()
    peer = greeted(role, INTRODUCTION.replace(b'"ownerUserID": null', owned))

    peer.deliver(HEARTBEAT)
    peer.deliver(
        HEARTBEAT.replace(b'"organizationID": null', b'"organizationID": "a lab"')
    )

    first, last = peer.end.messages(PeerDescribed)
    assert (first.profile.owner, first.profile.organization) == (OWNER, "")
    assert (last.profile.owner, last.profile.organization) == (OWNER, "a lab")


@pytest.mark.parametrize(
    ("passcode", "shown"), [("p", "this cluster"), ("q", "another cluster")]
)
def test_the_hash_of_a_passcode_is_never_shown(passcode: str, shown: str) -> None:
    peer = ForeignPeer(local_coordinator("a", passcode="p"))
    known = b'"clusterPasscodeHash": "%s"' % passcode_hash("p").encode()
    introduction = INTRODUCTION.replace(b'"clusterPasscodeHash": null', known)
    sent = b'"organizationID": "%s"' % passcode_hash(passcode).upper().encode()
    if passcode == "p":
        sent = sent.lower().replace(b"organizationid", b"organizationID")

    peer.deliver(b'{"hello":%s}' % introduction)
    peer.wait(0.2)
    peer.deliver(HEARTBEAT.replace(b'"organizationID": null', sent))

    *_, described = peer.end.messages(PeerDescribed)
    assert described.profile.organization == shown


@pytest.mark.parametrize("role", ROLES)
def test_a_newer_version_of_the_protocol_is_warned_of_once(role: str) -> None:
    newer = INTRODUCTION.replace(b'"protocolVersion": 1', b'"protocolVersion": 2')
    peer = greeted(role, newer)

    peer.deliver(HEARTBEAT)
    peer.deliver(HEARTBEAT)

    warning = "speaks version 2 of the protocol; this end speaks 1"
    assert [each for each in peer.end.notices if "version" in each] == [
        f"'Linux Server' (550E8400-E29B-41D4-A716-446655440000) {warning}"
    ]
    (described,) = peer.end.messages(PeerDescribed)
    assert described.profile.protocol_version == 2
    assert described.profile.remark == warning


@pytest.mark.parametrize("role", ROLES)
def test_an_own_introduction_has_the_owner_and_the_time_of_the_identity(
    role: str,
) -> None:
    dialled = role == "worker"
    local = local_worker("w") if dialled else local_coordinator("a")
    local = replace(local, owner=OWNER, registered_at=1776441600.0)
    peer = ForeignPeer(local, dialled=dialled)

    kind = b"helloAck" if dialled else b"hello"
    peer.deliver(b'{"%s":%s}' % (kind, INTRODUCTION))
    peer.wait(0.2)

    introduction, heartbeat = (payload for _, payload in peer.drain())
    device = introduction["deviceInfo"]
    assert introduction["ownerUserID"] == heartbeat["ownerUserID"] == OWNER
    assert introduction["protocolVersion"] == 1
    assert device["registeredAt"] == 798134400.0
    assert device["lastSeenAt"] != device["registeredAt"]


def test_an_owner_that_is_no_uuid_is_refused_because_macs_do() -> None:
    with pytest.raises(ConfigError, match="--tealenet-owner me: expected a UUID"):
        Config(owner="me")
    with pytest.raises(ConfigError, match="--owner me: expected a UUID"):
        worker_node(WorkerProfile("w", ServedModel("m"), 1, owner="me"))
    assert Config(owner=OWNER.lower()).owner == OWNER.lower()


@pytest.mark.parametrize("tier", [b"0", b"5", b"-1", b"1e300"])
def test_an_unknown_tier_is_the_lowest(tier: bytes) -> None:
    odd = INTRODUCTION.replace(b'"tier": 1', b'"tier": ' + tier)
    peer = greeted("coordinator", odd)

    peer.deliver(HEARTBEAT)

    (described,) = peer.end.messages(PeerDescribed)
    assert described.profile.hardware.tier == 4


def test_a_peer_that_is_not_admitted_is_named_in_the_notice() -> None:
    peer = ForeignPeer(local_coordinator("a", passcode="p"))

    peer.deliver(b'{"hello":%s}' % INTRODUCTION)

    (notice,) = peer.end.notices
    expected = "'Linux Server' (550E8400-E29B-41D4-A716-446655440000) is not admitted"
    assert notice.startswith(expected)
