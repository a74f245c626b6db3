"""State machines that are fed by peers, with a piece of real life before each input."""

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fuzz import corpus
from fuzz.corpus import framed
from fuzz.mutations import SEPARATOR
from protocols.contexts import protocol_context
from protocols.tealenet.network import HOST, deterministic_bytes
from protocols.tealenet.network import local_coordinator as relay_coordinator
from protocols.tealenet.peers import (
    OFFER,
    RUN,
    chunk,
    encoded,
    heartbeat,
    hello,
    inference_request,
    local_coordinator,
    local_worker,
    signer,
)
from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import AnswerChunk, Completed, OffersChanged, RunJob
from shoal.ledger.keys import Signer
from shoal.protocols.seam.endpoints import UpgradeRequest
from shoal.protocols.seam.peer_session import (
    ALL_PEERS,
    PeerJoined,
    PeerMessage,
    PeerSession,
    ToPeer,
)
from shoal.protocols.seam.session import Close, Send
from shoal.protocols.seam.worker_session import MembershipState, WorkerSession
from shoal.protocols.tealenet.codec.envelope import encode
from shoal.protocols.tealenet.connections import lan_session
from shoal.protocols.tealenet.handshake import DeviceConnections
from shoal.protocols.tealenet.peer import TealeConnection
from shoal.protocols.tealenet.peer_session import SENDABLE
from shoal.protocols.tealenet.relay_client.encryption import (
    SecureSession,
    SessionParties,
    TealeInitiator,
    TealePackets,
    TealeResponder,
)
from shoal.protocols.tealenet.relay_client.node import RelayNode
from shoal.protocols.tealenet.relay_server.server import RelayServer

PIECE = 1000  # bytes of a stream that are read at a time
ANNE, BELA = signer("anne"), signer("bela")
SESSION = "550E8400-E29B-41D4-A716-446655440000"
REQUEST = b"AAAAAAAA-0000-4000-8000-000000000001"


def stranger(data: bytes) -> None:
    """A connection on the LAN, from its first byte."""
    _stream(_accepted(), data)


def lan(data: bytes) -> None:
    """A connection of an admitted Mac that runs a job and submits one."""
    session = _accepted()
    _stream(session, framed([encode(hello())]))
    outputs = [*session.tick(1.0), *session.receive([framed([encode(heartbeat())])], 1)]
    assert any(
        isinstance(each, PeerMessage) and isinstance(each.message, PeerJoined)
        for each in outputs
    )
    outputs = [*session.send(ToPeer("1", RUN), 1.0)]
    (sent,) = (each.data for each in outputs if isinstance(each, Send))
    assert isinstance(sent, bytes)
    offset = sent.index(b'"requestID":"') + 13
    data = data.replace(REQUEST, sent[offset : offset + 36])
    _stream(session, framed(data.split(SEPARATOR)))


def worker(data: bytes) -> None:
    """The messages to a worker from the coordinator that it joined."""

    def open_session(now: float) -> PeerSession:
        local = local_worker("w")
        return lan_session(
            local, TealeConnection(True), DeviceConnections(local.device_id, 30.0)
        )

    session = WorkerSession(open_session, SENDABLE, MembershipState())
    session.tick(0.0)
    for message in data.split(SEPARATOR):
        for each in session.receive([framed([message])], 1.0):
            if isinstance(each, RunJob):
                job = (each.job_id, each.lease)
                session.send(AnswerChunk(*job, ["x"]), 1.0)
                session.send(Completed(*job), 1.0)
            elif isinstance(each, Close):
                return
    session.tick(100.0)


def node(data: bytes) -> None:
    """The messages to a node from its relay."""
    node = RelayNode(relay_coordinator(), 0.0)
    node.tick(0.0)
    node.send(ToPeer(ALL_PEERS, OffersChanged((OFFER,))), 0.0)
    node_id = node.id.encode()
    for number, line in enumerate(data.split(SEPARATOR)):
        _answer(node, node.receive([line.replace(b"0" * 64, node_id)], float(number)))
        _answer(node, node.tick(float(number)))
    node.tick(1000.0)


def relay(data: bytes) -> None:
    """The messages to a relay from three nodes, of which two have registered."""
    context = replace(
        protocol_context(),
        identity=HOST,
        random_bytes=deterministic_bytes(b"relay"),
        relay_open=True,
    )
    relay = RelayServer(context)
    for link, key in enumerate((ANNE, BELA, HOST)):
        path = "" if key is HOST else "/ws"
        relay.link_opened(link, UpgradeRequest(path, address="192.0.2.1"), 0.0)
        if key is not HOST:
            relay.receive(link, [registration(key)], 0.0)
    for number, line in enumerate(data.split(SEPARATOR)):
        relay.receive(number % 3, [line], 1.0 + number)
        relay.tick(1.0 + number)
    for link in range(3):
        relay.link_closed(link, 100.0)
    relay.tick(1000.0)


def teale(data: bytes) -> None:
    """Each message of the handshake of a relay session, and transport messages."""
    initiator = TealeInitiator(ANNE, BELA.exchange_key, deterministic_bytes(b"1"))
    first = initiator.write_first(bytes(12))
    with suppress(PeerError):
        TealeResponder(BELA, data)
    with suppress(PeerError):
        initiator.read_second(data)
    second, responder_keys = TealeResponder(BELA, first).write_second(
        deterministic_bytes(b"2"), bytes(12)
    )
    initiator_keys = initiator.read_second(second)
    for keys in (responder_keys, initiator_keys):
        TealePackets(keys).open(data)


def secure(data: bytes) -> None:
    """The data of a relay session during and after the handshake."""
    for initiates in (True, False):
        for keyed in (False, True):
            one = SecureSession(_ends(keyed=keyed), initiates=initiates)
            one.start(0.0)
            for line in data.split(SEPARATOR):
                one.receive(line, 0.0)
            one.send(b"{}")
            one.tick(100.0)


# Private parts.


def _accepted() -> PeerSession:
    local = local_coordinator("a", offers=(OFFER,))
    session = lan_session(
        local, TealeConnection(False), DeviceConnections(local.device_id, 30.0)
    )
    session.tick(0.0)
    return session


def _stream(session: PeerSession, data: bytes) -> None:
    for at in range(0, len(data), PIECE):
        _answer(session, session.receive([data[at : at + PIECE]], 1.0))
    _answer(session, session.tick(2.0))


def _answer(session: PeerSession, outputs: Iterable[Any]) -> None:
    """Answer jobs, and submit one to each peer that joins."""
    for each in outputs:
        if isinstance(each, PeerMessage) and isinstance(each.message, RunJob):
            job = (each.message.job_id, each.message.lease)
            session.send(ToPeer(each.peer, AnswerChunk(*job, ["x"])), 1.0)
            session.send(ToPeer(each.peer, Completed(*job)), 1.0)
        elif isinstance(each, PeerMessage) and isinstance(each.message, PeerJoined):
            session.send(ToPeer(each.peer, RUN), 1.0)


def _ends(*, keyed: bool) -> SessionParties:
    return SessionParties(
        identity=ANNE,
        peer_id=BELA.public_key.hex(),
        session_id=SESSION,
        random_bytes=deterministic_bytes(b"1"),
        peer_key=BELA.exchange_key if keyed else None,
    )


def registration(key: Signer) -> bytes:
    """Return a node's registration."""
    node_id = key.public_key.hex()
    payload = {
        "nodeID": node_id,
        "publicKey": node_id,
        "displayName": "a node",
        "capabilities": {"isAvailable": True, "loadedModels": ["m"]},
        "signature": key.sign(node_id.encode()).hex(),
    }
    return json.dumps({"register": payload}).encode()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# Initial corpora.


def _streams() -> list[bytes]:
    sent = corpus.lan_exchange()
    macs = corpus.recorded("cluster_swift_emits", "cluster_rust_emits")
    return [framed(each) for each in [*sent, macs, [b"null"], [b""]]]


def _scripts() -> list[bytes]:
    requests = [encode(inference_request()), encoded(chunk(REQUEST.decode(), "hi"))]
    messages = corpus.lan_exchange()
    lines = [*corpus.recorded("cluster_swift_emits", "cluster_rust_emits"), *requests]
    return [*lines, SEPARATOR.join(lines), *map(SEPARATOR.join, messages)]


def _on_relay() -> list[bytes]:
    """Return the messages of two nodes to their relay, and those of the relay."""
    one, two = (key.public_key.hex() for key in (ANNE, BELA))
    ends = {"fromNodeID": one, "toNodeID": two, "sessionID": SESSION}
    back = {"fromNodeID": two, "toNodeID": one, "sessionID": SESSION}
    to_host = ends | {"toNodeID": HOST.public_key.hex()}
    payloads = [
        {"relayOpen": ends},
        {"relayReady": back},
        {"relayData": ends | {"data": "e30="}},
        {"relayClose": back},
        {"relayOpen": to_host},
        {"relayData": to_host | {"data": _base64(encode(hello()))}},
        {"relayData": to_host | {"data": _base64(encode(heartbeat()))}},
        {"relayData": to_host | {"data": _base64(encode(inference_request()))}},
        {"registerAck": {"nodeID": one, "registeredAt": 1.0, "ttlSeconds": 300}},
        {"peerLeft": {"nodeID": one, "displayName": "x"}},
        {"error": {"code": "peer_not_found", "message": f"Peer {one} is not"}},
    ]
    messages = [json.dumps(each).encode() for each in payloads]
    groups = ("relay_swift_emits", "relay_decode", "relay_server", "relay_server_crash")
    lines = corpus.recorded(*groups)
    to_relay, from_relay = corpus.relay_exchange()
    return [
        *lines,
        *to_relay,
        *from_relay,
        *messages,
        SEPARATOR.join(messages),
        SEPARATOR.join(lines),
    ]


def _first_messages() -> list[bytes]:
    """Return the first message of a handshake, and data that may follow."""
    teale = TealeInitiator(ANNE, BELA.exchange_key, deterministic_bytes(b"1"))
    bare = [
        teale.write_first(bytes(12)),
        bytes(60),
        bytes(32),
        b"{}",
    ]
    marked = [
        *(bytes([kind]) + each for each in bare for kind in (0x01, 0x02)),
        bytes(8) + bytes(20),
    ]
    return [*bare, *marked, SEPARATOR.join(marked)]


SESSIONS: Mapping[
    str, tuple[Callable[[bytes], None], Callable[[], Sequence[bytes]]]
] = {
    "stranger": (stranger, _streams),
    "lan": (lan, _scripts),
    "worker": (worker, _scripts),
    "node": (node, _on_relay),
    "relay": (relay, _on_relay),
    "teale": (teale, _first_messages),
    "secure": (secure, _first_messages),
}
