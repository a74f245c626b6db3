"""The endpoints that a configuration opens, at a coordinator and at a worker.

And what becomes of a connection from one node's endpoint to another's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import msgspec
import pytest

from protocols.calling import TOKEN, counted_bytes, fleet_context, packed, sent
from protocols.macfleet.upstream_node import called
from shoal.domain.errors import ConfigError
from shoal.domain.vocabulary import Completed, RunJob
from shoal.domain.worker import Hardware
from shoal.protocols.macfleet.codec.frames import FrameType
from shoal.protocols.macfleet.codec.hardware import HardwareProfile
from shoal.protocols.macfleet.codec.keys import fleet_key, service_type
from shoal.protocols.macfleet.gossip import FleetGossip
from shoal.protocols.macfleet.local_node import Config, hardware_profile, node_id
from shoal.protocols.macfleet.membership import NodeAddress
from shoal.protocols.macfleet.node_endpoints import endpoints, worker_endpoints
from shoal.protocols.macfleet.rate_limiter import BANNED_AFTER, FleetRateLimiter
from shoal.protocols.seam.context import ProtocolContext
from shoal.protocols.seam.endpoints import (
    Listener,
    ListenerTls,
    MembershipProber,
    OutgoingConnection,
    ServiceBrowser,
)
from shoal.protocols.seam.peer_session import (
    PeerDescribed,
    PeerJoined,
    PeerMessage,
    PeerSession,
)
from shoal.protocols.seam.protocol import Endpoint
from shoal.protocols.seam.session import Close

OpenEndpoints: TypeAlias = Callable[[Config, ProtocolContext], Sequence[Endpoint]]
OTHER = fleet_key("of the fleet", "x")


def listeners(config: Config, context: ProtocolContext) -> list[Listener]:
    return [e for e in endpoints(config, context) if isinstance(e, Listener)]


def test_both_ports_are_upstreams_defaults_unless_in_use() -> None:
    transport, heartbeat = listeners(Config(), fleet_context())

    assert (transport.label, transport.port, transport.falls_back) == (
        "transport",
        50052,
        True,
    )
    assert (heartbeat.label, heartbeat.port, heartbeat.falls_back) == (
        "heartbeat",
        50051,
        True,
    )
    assert transport.flag == "--macfleet-transport-port"
    assert heartbeat.flag == "--macfleet-heartbeat-port"


def test_a_configured_port_does_not_fall_back() -> None:
    transport, heartbeat = listeners(
        Config(heartbeat_port=0, transport_port=7), fleet_context()
    )

    assert (transport.port, transport.falls_back) == (7, False)
    assert (heartbeat.port, heartbeat.falls_back) == (0, False)


@pytest.mark.parametrize(
    ("config", "token", "key"),
    [
        (Config(), TOKEN, fleet_key(TOKEN)),
        (
            Config(token="of the fleet", fleet="x"),
            TOKEN,
            fleet_key("of the fleet", "x"),
        ),
        (Config(), "", None),
        (Config(open=True), TOKEN, None),
    ],
)
def test_a_fleet_with_a_token_speaks_tls(
    config: Config, token: str, key: bytes | None
) -> None:
    for listens in listeners(config, fleet_context(token)):
        own = listens.security is ListenerTls.SELF_SIGNED
        assert own is (key is not None)
    assert listens.service is not None
    assert listens.service.kind == service_type(key)


@pytest.mark.parametrize(("token", "is_banned"), [(TOKEN, True), ("", False)])
def test_loopback_is_banned_from_both_ports_where_there_is_a_token(
    token: str, is_banned: bool
) -> None:
    for listens in listeners(Config(), fleet_context(token)):
        gate = listens.gate
        assert isinstance(gate, FleetRateLimiter)
        for _ in range(BANNED_AFTER):
            gate.on_failure("127.0.0.1", 0.0)

        assert (gate.delay("127.0.0.1", 0.0) is None) is is_banned


def test_labels_show_which_ports_have_no_tls() -> None:
    secure = [each.advertised_label for each in listeners(Config(), fleet_context())]
    plain = [
        each.advertised_label for each in listeners(Config(open=True), fleet_context())
    ]

    assert secure == ["transport", "heartbeat"]
    assert plain == ["transport:tcp", "heartbeat:tcp"]


def test_a_join_token_too_short_for_a_fleet_is_a_warning() -> None:
    warned: list[str] = []
    context = replace(fleet_context("short"), warn=warned.append)

    assert not endpoints(Config(), context)
    (said,) = warned
    assert "--macfleet-token" in said


def test_a_short_fleet_token_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"^--macfleet-token: expected 8 char"):
        endpoints(Config(token="short"), fleet_context())


def test_an_open_fleet_with_a_token_is_rejected() -> None:
    with pytest.raises(ConfigError, match="an open fleet has no token"):
        endpoints(Config(open=True, token="long enough"), fleet_context())


def test_discovery_can_be_disabled() -> None:
    assert any(
        isinstance(e, ServiceBrowser) for e in endpoints(Config(), fleet_context())
    )
    quiet = endpoints(Config(browse=False), fleet_context())
    assert not any(isinstance(e, ServiceBrowser) for e in quiet)


def gossip_of(
    opens: OpenEndpoints, config: Config, context: ProtocolContext
) -> FleetGossip:
    """Return the gossip of a node that has a contact, after its first tick."""
    peers = replace(config, peers=("192.0.2.9:50051",))
    found = opens(peers, context)
    gossip = next(each for each in found if isinstance(each, MembershipProber))
    assert isinstance(gossip, FleetGossip)
    gossip.tick(0.0)
    return gossip


def connections_to(
    gossip: FleetGossip, peer: str, port: int = 50052, now: float = 1.0
) -> list[OutgoingConnection]:
    """Return the connections after a node has answered a ping."""
    profile = HardwareProfile(data_port=port)
    gossip._registry.on_pong(peer, NodeAddress("192.0.2.9", 50051), profile, now)
    return [each for each in gossip.tick(now) if isinstance(each, OutgoingConnection)]


def dialled(
    peer: str,
    *,
    port: int = 50052,
    config: Config | None = None,
    opens: OpenEndpoints = endpoints,
) -> list[str]:
    """Return the URLs that a node dials after another has answered its ping."""
    gossip = gossip_of(opens, config or Config(), fleet_context())
    return [each.url for each in connections_to(gossip, peer, port)]


def test_a_node_is_dialled_at_the_transport_port_that_it_states() -> None:
    assert dialled("node-b", port=60000) == ["tls-any://192.0.2.9:60000"]


def test_a_node_that_states_no_port_is_dialled_after_its_heartbeat_port() -> None:
    plain, encrypted = Config(open=True), Config(open=True, tls=True)

    assert dialled("node-b", port=0) == ["tls-any://192.0.2.9:50052"]
    assert dialled("node-b", port=0, config=plain) == ["tcp://192.0.2.9:50052"]
    assert dialled("node-b", port=0, config=encrypted) == ["tls-any://192.0.2.9:50052"]


def test_a_listening_worker_dials_as_a_coordinator_does() -> None:
    url = ["tls-any://192.0.2.9:50052"]

    assert dialled("node-b", opens=worker_endpoints) == url


def test_a_worker_listens_and_announces_as_a_coordinator_does() -> None:
    opened = [
        each
        for each in worker_endpoints(Config(), fleet_context())
        if isinstance(each, Listener)
    ]

    for worker, coordinator in zip(
        opened, listeners(Config(), fleet_context()), strict=True
    ):
        assert (worker.port, worker.label, worker.security, worker.subject) == (
            coordinator.port,
            coordinator.label,
            coordinator.security,
            coordinator.subject,
        )
    transport, heartbeat = opened
    transport.on_bound(4002)
    assert heartbeat.service is not None
    assert heartbeat.service.kind == service_type(fleet_key(TOKEN))
    assert {**heartbeat.service.text} == {
        "node_id": "coordinator",
        "pool_version": "2.2.0",
        "data_port": "4002",
    }


def test_a_worker_listens_without_a_token_only_in_an_open_fleet() -> None:
    with pytest.raises(
        ConfigError, match=r"^--listen: .* set --token, or --macfleet-o"
    ):
        worker_endpoints(Config(), fleet_context(""))
    with pytest.raises(ConfigError, match=r"^--listen: .* has 5"):
        worker_endpoints(Config(), fleet_context("short"))
    with pytest.raises(ConfigError, match=r"^--listen: .* has 5"):
        worker_endpoints(Config(token="short"), fleet_context())

    for each in worker_endpoints(Config(open=True), fleet_context("")):
        if isinstance(each, Listener):
            assert each.security is ListenerTls.NONE


def as_node(name: str, token: str = TOKEN) -> ProtocolContext:
    return replace(fleet_context(token), name=name, random_bytes=counted_bytes(name))


@dataclass
class Meeting:
    """A connection between two nodes; each dialling node is a coordinator or worker."""

    dialling: FleetGossip
    outgoing: OutgoingConnection
    accepting: PeerSession
    heard: list[object] = field(default_factory=list)  # by the accepting node
    ends: list[str] = field(default_factory=list)  # why either node closed

    def begin(self) -> None:
        """Carry all bytes until neither node sends any more."""
        client, server = self.outgoing.new_session(1.0), self.accepting
        server.tick(1.0)
        to_server: list[object] = [*client.tick(1.0)]
        while to_server:
            to_client = self._deliver(to_server, server)
            self.heard += [
                each.message for each in to_client if isinstance(each, PeerMessage)
            ]
            to_server = self._deliver(to_client, client)

    def _deliver(self, outputs: list[object], session: PeerSession) -> list[object]:
        self.ends += [each.reason for each in outputs if isinstance(each, Close)]
        return [each for data in sent(outputs) for each in session.receive([data], 1.0)]


def meeting(opens: OpenEndpoints, dialling: str, accepting: str = "worker") -> Meeting:
    """Let a node dial a listening worker."""
    gossip = gossip_of(opens, Config(), as_node(dialling))
    (outgoing,) = connections_to(gossip, accepting)
    transport, _ = (
        each
        for each in worker_endpoints(Config(), as_node(accepting))
        if isinstance(each, Listener)
    )
    return Meeting(gossip, outgoing, transport.accept("192.0.2.1", 1.0))


def test_a_coordinator_that_dials_a_listening_worker_may_submit() -> None:
    its = meeting(endpoints, "coordinator")

    its.begin()

    joined, described, probe = its.heard
    assert isinstance(joined, PeerJoined)
    assert (joined.name, joined.submits_jobs) == ("coordinator", True)
    assert isinstance(described, PeerDescribed)
    assert isinstance(probe, RunJob)
    assert its.ends == []


def test_a_listening_worker_probes_no_node_and_runs_its_tasks() -> None:
    transport, _ = (
        each
        for each in worker_endpoints(Config(open=True), as_node("worker", ""))
        if isinstance(each, Listener)
    )
    dispatcher = called(transport, "boss-1")

    (joined,) = dispatcher.heard
    assert isinstance(joined, PeerJoined)
    assert [each.type for each in dispatcher.frames] == [FrameType.CONTROL]
    (run,) = dispatcher.task("1", name="demo.add", args=[19, 23], kwargs={})
    assert isinstance(run, RunJob)
    dispatcher.send(Completed(run.job_id, run.lease, value=packed(42)))
    assert msgspec.msgpack.decode(dispatcher.frames[-1].payload) == {
        **{"task_id": "1", "ok": True, "value": 42, "error": None}
    }


def test_a_listening_worker_admits_no_node_without_the_token() -> None:
    transport, _ = (
        each
        for each in worker_endpoints(Config(), as_node("worker"))
        if isinstance(each, Listener)
    )

    stranger = called(transport, "boss-1")

    assert stranger.heard == []
    assert stranger.frames == []
    assert stranger.end


def test_a_nodes_id_is_its_name_without_white_space() -> None:
    assert node_id("my machine\n2") == "my-machine-2"
    assert node_id(" ") == "shoal"
    assert len(node_id("é" * 300).encode()) == 256


def test_the_profile_contains_the_hardware() -> None:
    hardware = Hardware("Apple M2", gpu_cores=8, memory_gb=16.0, gpu_backend="metal")

    profile = hardware_profile(hardware, 5)

    assert profile == HardwareProfile(
        "Apple M2", 8, 16.0, has_ane=True, mps=True, data_port=5
    )
