"""The URLs that a worker dials, and what ends its attempts."""

import json
from dataclasses import replace

import pytest

from protocols.contexts import protocol_context
from protocols.tealenet.peers import heartbeat, hello_ack, signer
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
    Close,
    Notice,
    Send,
)
from shoal.protocols.tealenet import Config, endpoints
from shoal.protocols.tealenet.codec.envelope import encode
from shoal.protocols.tealenet.codec.scalars import passcode_hash
from shoal.protocols.tealenet.connections import (
    TealeDialer,
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
        ("tcp://[::1]:4011", "tcp://[::1]:4011"),
    ],
)
def test_each_scheme_has_its_url(url: str, dialled: str) -> None:
    assert TealeDialer(url, PROFILE).url == dialled


@pytest.mark.parametrize(
    "url",
    ["", "nonsense", "tls://host:1", "tcp://host", "ws://", "tcp://host:port"],
)
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        TealeDialer(url, PROFILE)


def join(dialer: TealeDialer, context: ProtocolContext, config: Config) -> list[object]:
    """Connect directly; return the outputs of the worker's session."""
    listener = next(e for e in endpoints(config, context) if isinstance(e, Listener))
    coordinator = listener.accept("127.0.0.1", 0.0)
    worker = dialer.start_session({})
    coordinator.tick(0.0)
    now = 0.0
    outputs: list[object] = [*worker.tick(0.0)]
    messages = [each.data for each in outputs if isinstance(each, Send)]
    while messages:
        replies = [*coordinator.receive(messages, now)]
        now += 0.2  # the helloAck is delayed
        replies += coordinator.tick(now)
        answers = [each.data for each in replies if isinstance(each, Send)]
        received = worker.receive(answers, now) if answers else ()
        outputs += received
        messages = [each.data for each in received if isinstance(each, Send)]
    return outputs


def test_another_passcode_of_the_peer_is_final_and_names_the_remedy() -> None:
    dialer = TealeDialer("tcp://host:4011", replace(PROFILE, passcode="a"))
    worker = dialer.start_session({})
    worker.tick(0.0)
    ack = encode(hello_ack(passcode_hash("b")))

    outputs = worker.receive([LENGTH.pack(len(ack)) + ack], 0.0)

    assert isinstance(outputs[-1], Close)
    assert Admitted() not in outputs
    final = dialer.final_reason(1000, "")
    assert final is not None
    assert "another passcode: check --passcode" in final


def test_a_worker_joins_a_coordinator_as_any_peer() -> None:
    dialer = TealeDialer("tcp://host:4011", PROFILE)

    assert Admitted() in join(dialer, protocol_context(), Config())
    assert dialer.final_reason(1006, "cut off") is None


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


REPLACED = (1012, "Replaced by newer session")


def test_a_worker_that_a_relay_replaced_rejoins_with_a_warning() -> None:
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


def test_a_peer_is_dialled_by_its_address() -> None:
    outgoing = dial_peer("host:4011", PROFILE)
    session = outgoing.new_session(0.0)

    assert outgoing.url == "tcp://host:4011"
    (hello,) = session.tick(0.0)
    assert isinstance(hello, Send)
    assert b'"loadedModels":[]' in bytes(hello.data)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        dial_peer("https://host", PROFILE)


def test_peer_and_relay_addresses_become_urls() -> None:
    assert peer_url("host:4011") == "tcp://host:4011"
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
