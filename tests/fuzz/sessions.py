"""State machines that are fed by peers, with a piece of real life before each input."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fuzz import corpus
from fuzz.corpus import framed
from fuzz.mutations import SEPARATOR
from protocols.settings import setting
from protocols.tealenet.network import HOST, drawn
from protocols.tealenet.network import own_side as node_side
from protocols.tealenet.peers import (
    OFFER,
    RUN,
    asked,
    chunk,
    encoded,
    heartbeat,
    hello,
    own_side,
    signer,
    worker_side,
)
from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import Completed, Offered, Progress, RunJob
from shoal.ledger.keys import Signer
from shoal.protocols.as_worker import AsWorker, Stay
from shoal.protocols.crowd import EVERYBODY, CrowdSession, From, Met, To
from shoal.protocols.session import Close, Hello, Send
from shoal.protocols.tealenet.conversation import SPOKEN
from shoal.protocols.tealenet.desk import Desk
from shoal.protocols.tealenet.encryption.channels import Numbered, Teale
from shoal.protocols.tealenet.encryption.noise import Initiator, Responder
from shoal.protocols.tealenet.encryption.secure import Ends, Secure
from shoal.protocols.tealenet.encryption.teale_channel import (
    Packets,
    TealeInitiator,
    TealeResponder,
)
from shoal.protocols.tealenet.lan import lan_session
from shoal.protocols.tealenet.node.node import Node
from shoal.protocols.tealenet.peer import Caller
from shoal.protocols.tealenet.relay.relay import Relay
from shoal.protocols.tealenet.wire.messages import encode
from shoal.protocols.tealenet.wire.proving import base64_of, noise_binding

PIECE = 1000  # bytes of a stream that are read at a time
ANNE, BELA = signer("anne"), signer("bela")
SESSION = "550E8400-E29B-41D4-A716-446655440000"
PROLOGUE = b"a session"
REQUEST = b"AAAAAAAA-0000-4000-8000-000000000001"


def stranger(data: bytes) -> None:
    """A connection on the LAN, from its first byte."""
    _stream(_accepted(), data)


def lan(data: bytes) -> None:
    """A connection of a Mac that was let in, has a job of ours, and asks for one."""
    session = _accepted()
    _stream(session, framed([encode(hello()), encode(heartbeat())]))
    outputs = [*session.tick(1.0), *session.receive([framed([encode(heartbeat())])], 1)]
    assert any(
        isinstance(each, From) and isinstance(each.word, Met) for each in outputs
    )
    asked = session.issue(To("1", RUN), 1.0)
    (sent,) = (each.data for each in asked if isinstance(each, Send))
    assert isinstance(sent, bytes)
    place = sent.index(b'"requestID":"') + 13
    data = data.replace(REQUEST, sent[place : place + 36])
    _stream(session, framed(data.split(SEPARATOR)))


def worker(data: bytes) -> None:
    """What a worker hears of the coordinator that it joined."""

    def begin(now: float) -> CrowdSession:
        own = worker_side("w", "t")
        return lan_session(own, Caller(True), Desk(own.device_id, 30.0))

    session = AsWorker(begin, SPOKEN, Stay())
    session.tick(0.0)
    for message in data.split(SEPARATOR):
        for each in session.receive([framed([message])], 1.0):
            if isinstance(each, RunJob):
                job = (each.job_id, each.lease)
                session.issue(Progress(*job, ["x"]), 1.0)
                session.issue(Completed(*job), 1.0)
            elif isinstance(each, Close):
                return
    session.tick(100.0)


def node(data: bytes) -> None:
    """What a node hears of its relay."""
    node = Node(node_side(), 0.0)
    node.tick(0.0)
    node.issue(To(EVERYBODY, Offered((OFFER,))), 0.0)
    own = node.id.encode()
    for number, line in enumerate(data.split(SEPARATOR)):
        _take(node, node.receive([line.replace(b"0" * 64, own)], float(number)))
        _take(node, node.tick(float(number)))
    node.tick(1000.0)


def relay(data: bytes) -> None:
    """What a relay hears of three nodes, of which two have registered."""
    given = replace(setting(), identity=HOST, draw=drawn(b"relay"))
    relay = Relay(given)
    for link, key in enumerate((ANNE, BELA, HOST)):
        relay.connected(link, Hello("/ws", address="here"), 0.0)
        if key is not HOST:
            relay.receive(link, [registration(key)], 0.0)
    for number, line in enumerate(data.split(SEPARATOR)):
        relay.receive(number % 3, [line], 1.0 + number)
        relay.tick(1.0 + number)
    for link in range(3):
        relay.gone(link, 100.0)
    relay.tick(1000.0)


def noise(data: bytes) -> None:
    """Each message of Noise's handshake, and what follows it."""
    initiator = Initiator(ANNE, BELA.exchange_key, PROLOGUE, drawn(b"1"))
    first = initiator.begin(b"hi")
    with suppress(PeerError):
        Responder(BELA, PROLOGUE, data)
    with suppress(PeerError):
        initiator.finish(data)
    second, theirs = Responder(BELA, PROLOGUE, first).answer(drawn(b"2"))
    _, ours = initiator.finish(second)
    for secrets in (theirs, ours):
        Numbered(secrets).open(data)


def teale(data: bytes) -> None:
    """The same of TealeNet's own channel."""
    initiator = TealeInitiator(ANNE, BELA.exchange_key, drawn(b"1"))
    first = initiator.begin(bytes(12))
    with suppress(PeerError):
        TealeResponder(BELA, data)
    with suppress(PeerError):
        initiator.finish(data)
    second, theirs = TealeResponder(BELA, first).answer(drawn(b"2"), bytes(12))
    ours = initiator.finish(second)
    for secrets in (theirs, ours):
        Teale(Packets(secrets)).open(data)


def secure(data: bytes) -> None:
    """What a session on a relay hears before and after it is protected."""
    for begins in (True, False):
        for keys in ("", "n", "t", "nt"):
            one = Secure(_ends(keys), begins=begins)
            one.open(0.0)
            for line in data.split(SEPARATOR):
                one.receive(line, 0.0)
            one.say(b"{}")
            with suppress(PeerError):
                one.tick(100.0)


# Private parts.


def _accepted() -> CrowdSession:
    own = own_side("a", offers=(OFFER,))
    session = lan_session(own, Caller(False), Desk(own.device_id, 30.0))
    session.tick(0.0)
    return session


def _stream(session: CrowdSession, data: bytes) -> None:
    for at in range(0, len(data), PIECE):
        _take(session, session.receive([data[at : at + PIECE]], 1.0))
    _take(session, session.tick(2.0))


def _take(session: CrowdSession, outputs: Iterable[Any]) -> None:
    """Do what is asked for."""
    for each in outputs:
        if isinstance(each, From) and isinstance(each.word, RunJob):
            job = (each.word.job_id, each.word.lease)
            session.issue(To(each.peer, Progress(*job, ["x"])), 1.0)
            session.issue(To(each.peer, Completed(*job)), 1.0)
        elif isinstance(each, From) and isinstance(each.word, Met):
            session.issue(To(each.peer, RUN), 1.0)


def _ends(keys: str) -> Ends:
    return Ends(
        own=ANNE,
        own_id=ANNE.public_key.hex(),
        peer_id=BELA.public_key.hex(),
        session_id=SESSION,
        draw=drawn(b"1"),
        is_bound=lambda key, signature: True,
        signature=ANNE.sign(noise_binding(ANNE.exchange_key)),
        noise_key=BELA.exchange_key if "n" in keys else None,
        teale_key=BELA.exchange_key if "t" in keys else None,
    )


def registration(key: Signer) -> bytes:
    """Return how a node becomes known to a relay."""
    own = key.public_key.hex()
    said = {
        "nodeID": own,
        "publicKey": own,
        "displayName": "a node",
        "capabilities": {"isAvailable": True, "loadedModels": ["m"]},
        "signature": key.sign(own.encode()).hex(),
    }
    return json.dumps({"register": said}).encode()


# Where to begin.


def _streams() -> list[bytes]:
    said = [*corpus.said_between(extended=True), *corpus.said_between(extended=False)]
    macs = corpus.recorded("cluster_swift_emits", "cluster_rust_emits")
    return [framed(each) for each in [*said, macs, [b"null"], [b""]]]


def _scripts() -> list[bytes]:
    asking = [encode(asked()), encoded(chunk(REQUEST.decode(), "hi"))]
    said = corpus.said_between(extended=False)
    lines = [*corpus.recorded("cluster_swift_emits", "cluster_rust_emits"), *asking]
    return [*lines, SEPARATOR.join(lines), *map(SEPARATOR.join, said)]


def _told() -> list[bytes]:
    said = corpus.said_between(extended=True)[1]
    return [SEPARATOR.join(said[: number + 1]) for number in range(len(said))]


def _on_relay() -> list[bytes]:
    """Return what two nodes say to their relay, and what it says."""
    one, two = (key.public_key.hex() for key in (ANNE, BELA))
    ends = {"fromNodeID": one, "toNodeID": two, "sessionID": SESSION}
    back = {"fromNodeID": two, "toNodeID": one, "sessionID": SESSION}
    to_us = ends | {"toNodeID": HOST.public_key.hex()}
    heard = [
        {"relayOpen": ends},
        {"relayReady": back},
        {"relayData": ends | {"data": "e30="}},
        {"relayClose": back},
        {"relayOpen": to_us},
        {"relayData": to_us | {"data": base64_of(encode(hello()))}},
        {"relayData": to_us | {"data": base64_of(encode(heartbeat()))}},
        {"relayData": to_us | {"data": base64_of(encode(asked()))}},
        {"registerAck": {"nodeID": one, "registeredAt": 1.0, "ttlSeconds": 300}},
        {"registerChallenge": {"challenge": "00" * 32}},
        {"peerLeft": {"nodeID": one, "displayName": "x"}},
        {"error": {"code": "peer_not_found", "message": f"Peer {one} is not"}},
    ]
    said = [json.dumps(each).encode() for each in heard]
    groups = ("relay_swift_emits", "relay_decode", "relay_server", "relay_server_crash")
    lines = corpus.recorded(*groups)
    ours, theirs = corpus.said_on_relay()
    return [*lines, *ours, *theirs, *said, SEPARATOR.join(said), SEPARATOR.join(lines)]


def _first_messages() -> list[bytes]:
    """Return the beginnings of both handshakes, and what may follow."""
    noise = Initiator(ANNE, BELA.exchange_key, PROLOGUE, drawn(b"1"))
    teale = TealeInitiator(ANNE, BELA.exchange_key, drawn(b"1"))
    bare = [noise.begin(b"hi"), teale.begin(bytes(12)), bytes(60), bytes(32), b"{}"]
    marked = [
        *(bytes([kind]) + each for each in bare for kind in (0x11, 0x12, 0x01, 0x02)),
        b"\x13" + bytes(8) + bytes(20),
        bytes(8) + bytes(20),
    ]
    return [*bare, *marked, SEPARATOR.join(marked)]


SESSIONS: Mapping[
    str, tuple[Callable[[bytes], None], Callable[[], Sequence[bytes]]]
] = {
    "stranger": (stranger, _streams),
    "lan": (lan, _scripts),
    "worker": (worker, _told),
    "node": (node, _on_relay),
    "relay": (relay, _on_relay),
    "noise": (noise, _first_messages),
    "teale": (teale, _first_messages),
    "secure": (secure, _first_messages),
}
