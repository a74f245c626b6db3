"""The URLs that a worker dials, and what ends its attempts."""

import json
from dataclasses import replace

import pytest

from protocols.contexts import protocol_context, require_token
from protocols.tealenet.network import Network
from protocols.tealenet.network import local_coordinator as network_coordinator
from protocols.tealenet.peers import BINDING, heartbeat, hello_ack, signer
from shoal.domain.errors import ConfigError
from shoal.domain.worker import ServedModel
from shoal.protocols.seam.context import (
    ProtocolContext,
    WorkerProfile,
    unenforceable,
)
from shoal.protocols.seam.endpoints import DiscoveredService, Listener
from shoal.protocols.seam.framing import LENGTH
from shoal.protocols.seam.session import (
    Admitted,
    BoundSession,
    Close,
    Notice,
    Send,
)
from shoal.protocols.tealenet import Config, endpoints
from shoal.protocols.tealenet.codec.envelope import encode
from shoal.protocols.tealenet.connections import (
    CLOSE_RESTARTING,
    TealeDialer,
    candidate_urls,
    dial_peer,
    discovered_url,
    peer_url,
    relay_url,
)

KEY = signer("w")
NODE = KEY.public_key.hex()
PROFILE = WorkerProfile("w", ServedModel("m"), 1, identity=KEY, random_bytes=bytes)


@pytest.mark.parametrize(
    ("url", "dialled"),
    [
        ("http://host:4010", f"ws://host:4010/ws?node={NODE}"),
        ("https://host", f"wss://host/ws?node={NODE}"),
        ("https://host/shoal/", f"wss://host/shoal/ws?node={NODE}"),
        ("wss://relay.example/ws", f"wss://relay.example/ws?node={NODE}"),
        ("ws://host?node=other&a=b", f"ws://host/ws?a=b&node={NODE}"),
        ("tcp://host:4011", "noise://host:4011"),
        ("tls://[::1]:4011", "noise+tls://[::1]:4011"),
    ],
)
def test_each_scheme_has_its_url(url: str, dialled: str) -> None:
    assert TealeDialer(url, PROFILE).url == dialled


@pytest.mark.parametrize("url", ["tcp://host:4011", "tls://[::1]:4011"])
def test_a_plain_worker_dials_the_url_as_given(url: str) -> None:
    assert TealeDialer(url, replace(PROFILE, plain=True)).url == url


@pytest.mark.parametrize(
    "url", ["", "nonsense", "gopher://host", "tcp://host", "ws://", "tcp://host:port"]
)
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        candidate_urls(url, PROFILE)


def test_addresses_are_tried_in_turn_the_direct_one_first() -> None:
    profile = replace(PROFILE, direct_url="tcp://host:4011")
    dialer = TealeDialer("http://host:4010", profile)
    relay = f"ws://host:4010/ws?node={NODE}"

    tried = []
    for _ in range(4):
        tried.append(dialer.url)
        assert dialer.final_reason(1006, "refused") is None

    assert tried == ["tcp://host:4011", relay, "tcp://host:4011", relay]


def test_a_restarting_coordinator_is_tried_at_the_same_address() -> None:
    profile = replace(PROFILE, direct_url="tcp://host:4011")
    dialer = TealeDialer("http://host:4010", profile)

    for _ in range(3):
        assert dialer.final_reason(CLOSE_RESTARTING, "") is None

    assert dialer.url == "tcp://host:4011"


def join(dialer: TealeDialer, context: ProtocolContext, config: Config) -> list[object]:
    """Connect directly; return the outputs of the worker's session."""
    listener = next(e for e in endpoints(config, context) if isinstance(e, Listener))
    coordinator = listener.accept("127.0.0.1", 0.0)
    worker = dialer.start_session({})
    for end in (coordinator, worker):
        assert isinstance(end, BoundSession)
        end.bind(BINDING)
    coordinator.tick(0.0)
    outputs: list[object] = [*worker.tick(0.0)]
    messages = [each.data for each in outputs if isinstance(each, Send)]
    while messages:
        answers = [
            e.data for e in coordinator.receive(messages, 0.0) if isinstance(e, Send)
        ]
        received = worker.receive(answers, 0.0) if answers else ()
        outputs += received
        messages = [each.data for each in received if isinstance(each, Send)]
    return outputs


def test_a_url_that_admitted_the_worker_is_tried_again() -> None:
    profile = replace(PROFILE, direct_url="tcp://host:4011")
    dialer = TealeDialer("http://host:4010", profile)

    assert Admitted() in join(dialer, protocol_context(), Config())
    assert dialer.final_reason(1006, "cut off") is None
    first = dialer.url
    assert dialer.final_reason(1006, "refused") is None

    assert first == "tcp://host:4011"
    assert dialer.url != first


@pytest.mark.parametrize(
    ("profile", "config", "reason"),
    [
        (PROFILE, Config(), "--token"),
        (replace(PROFILE, token="wrong"), Config(), "Invalid token: check --token"),
        (replace(PROFILE, passcode="a"), Config(passcode="b"), "another passcode"),
        (PROFILE, Config(passcode="b"), "requires a passcode"),
    ],
)
def test_a_refusal_is_final_and_names_the_remedy(
    profile: WorkerProfile, config: Config, reason: str
) -> None:
    dialer = TealeDialer("tcp://host:4011", profile)

    outputs = join(dialer, protocol_context(admission=require_token("t")), config)

    assert isinstance(outputs[-1], Close)
    assert Admitted() not in outputs
    final = dialer.final_reason(1000, "")
    assert final is not None
    assert reason in final


def test_a_restricted_worker_does_not_serve_a_mac() -> None:
    profile = replace(PROFILE, only_for=frozenset({"al"}))
    dialer = TealeDialer("tcp://host:4011", profile)
    worker = dialer.start_session({})
    worker.tick(0.0)
    said = [encode(each) for each in (hello_ack(), heartbeat())]

    outputs = worker.receive([LENGTH.pack(len(each)) + each for each in said], 0.0)

    assert Close(unenforceable("--only-for")) in outputs
    assert Admitted() not in outputs
    assert dialer.final_reason(1000, "") == unenforceable("--only-for")


def test_a_restricted_worker_serves_a_shoal_coordinator() -> None:
    profile = replace(PROFILE, only_for=frozenset({"al"}))
    dialer = TealeDialer("tcp://host:4011", profile)

    assert Admitted() in join(dialer, protocol_context(), Config())


REPLACED = (1012, "Replaced by newer session")


def test_a_worker_that_its_coordinators_relay_replaced_does_not_rejoin() -> None:
    dialer = TealeDialer("http://host:4010", PROFILE)

    outputs = join_by_relay(dialer)
    final = dialer.final_reason(*REPLACED)

    assert Admitted() in outputs
    assert final is not None
    assert "--name" in final


def test_a_worker_that_a_foreign_relay_replaced_rejoins_with_a_warning() -> None:
    dialer = TealeDialer("wss://relay.example/ws", PROFILE)

    for _ in range(3):
        worker = dialer.start_session({})
        opening = worker.tick(0.0)
        ack = {"nodeID": NODE, "registeredAt": 0.0, "ttlSeconds": 300}
        assert Admitted() in worker.receive([json.dumps({"registerAck": ack})], 0.0)
        assert dialer.final_reason(*REPLACED) is None

    warnings = [each.text for each in opening if isinstance(each, Notice)]
    assert len(warnings) == 1
    assert "forged registration" in warnings[0]


def join_by_relay(dialer: TealeDialer) -> list[object]:
    """Join through the coordinator's relay; return the outputs of the session."""
    net = Network()
    net.attach(network_coordinator())
    link = net.attach_raw()
    worker = dialer.start_session({})
    outputs: list[object] = [*worker.tick(0.0)]
    sent = len(outputs)
    while outputs[-sent:] if sent else ():
        for each in outputs[-sent:]:
            if isinstance(each, Send):
                ((kind, payload),) = json.loads(each.data).items()
                net.send_raw(link, kind, payload)
        answers = tuple(json.dumps(each) for each in link.inbox)
        link.inbox.clear()
        received = worker.receive(answers, 0.0) if answers else ()
        outputs += received
        sent = len(received)
    return outputs


def test_a_peer_is_dialled_by_its_address() -> None:
    outgoing = dial_peer("host:4011", PROFILE)
    session = outgoing.new_session(0.0)

    assert outgoing.url == "noise://host:4011"
    (hello,) = session.tick(0.0)
    assert isinstance(hello, Send)
    assert b'"role":"coordinator"' in bytes(hello.data)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        dial_peer("https://host", PROFILE)


def test_peer_and_relay_addresses_become_urls() -> None:
    assert peer_url("host:4011") == "tcp://host:4011"
    assert peer_url("tls://host:4011") == "tls://host:4011"
    assert relay_url("wss://host/ws", "ab") == "wss://host/ws?node=ab"
    for address in ("host", "http://host:1", "host:port", ""):
        with pytest.raises(ConfigError):
            peer_url(address)
    with pytest.raises(ConfigError):
        relay_url("tcp://host:1", "ab")


def test_a_discovered_peer_is_dialled_at_its_ipv4_address() -> None:
    service = DiscoveredService("a Mac", ("fe80::1%eth0", "192.0.2.1"), 4011, {})

    assert discovered_url(service) == "tcp://192.0.2.1:4011"
    assert discovered_url(replace(service, addresses=("fe80::1%eth0",))) == (
        "tcp://[fe80::1%25eth0]:4011"
    )
    assert discovered_url(replace(service, addresses=())) is None


def test_a_discovered_pool_of_shoal_is_dialled_with_encryption() -> None:
    service = DiscoveredService("a pool", ("192.0.2.1",), 4011, {"shoal": "1"})

    assert discovered_url(service) == "noise://192.0.2.1:4011"
