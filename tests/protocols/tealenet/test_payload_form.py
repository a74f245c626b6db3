"""Peers that write, and may read, only the flat payloads of TealeNet's document."""

import json
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest

from protocols.tealenet.peers import (
    OFFER,
    RUN,
    ForeignPeer,
    heartbeat,
    hello_ack,
    local_coordinator,
    local_worker,
)
from shoal.domain.model_messages import ModelAnswer
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Completed,
    Failed,
    Rejected,
    RunJob,
)
from shoal.protocols.seam.peer_session import PeerJoined
from shoal.protocols.seam.session import Send
from shoal.protocols.tealenet.codec.envelope import PayloadForm, is_flat
from shoal.protocols.tealenet.local_node import TealeLocalNode
from shoal.protocols.tealenet.peer import (
    LAN,
    WAN,
    PeerDescription,
    PeerSoftware,
    TealeConnection,
)
from shoal.protocols.tealenet.peer_session import TealePeerSession

# TealeNet's "Cluster Messages": the examples, without the spaces between values.
DEVICE = "550e8400-e29b-41d4-a716-446655440000"
MODEL = "mlx-community/Qwen3-8B-4bit"
HELLO: dict[str, Any] = {
    "hello": {
        "deviceInfo": {
            "id": DEVICE,
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
                "gpuVRAMGB": 24.0,
            },
            "registeredAt": 798134400.0,
            "lastSeenAt": 798134400.0,
            "isCurrentDevice": True,
            "loadedModels": [],
        },
        "protocolVersion": 1,
        "clusterPasscodeHash": None,
        "loadedModels": [MODEL],
        "ownerUserID": None,
    }
}
HELLO_ACK = {"helloAck": HELLO["hello"]}
HEALTH = {
    "deviceID": DEVICE,
    "timestamp": 798134400.0,
    "thermalLevel": "nominal",
    "throttleLevel": 100,
    "loadedModels": [MODEL],
    "isGenerating": False,
    "queueDepth": 0,
    "organizationID": None,
    "ownerUserID": None,
}
HEARTBEAT = {"heartbeat": HEALTH}
HEARTBEAT_ACK = {"heartbeatAck": HEALTH}
REQUEST = {
    "inferenceRequest": {
        "requestID": DEVICE,
        "request": {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": "You are helpful."},
                {"role": "user", "content": "Hello"},
            ],
            "temperature": 0.7,
            "top_p": 0.9,
            "max_tokens": 2048,
            "stream": True,
        },
        "streaming": True,
    }
}
MODEL_QUERY = {"modelQuery": {"modelID": MODEL}}
CHUNK = {
    "id": "chatcmpl-xxx",
    "object": "chat.completion.chunk",
    "created": 1713100000,
    "model": MODEL,
    "choices": [{"index": 0, "delta": {"content": "Hello"}, "finish_reason": "stop"}],
}


def json_bytes(message: object) -> bytes:
    return json.dumps(message).encode()


class DocumentPeer(ForeignPeer):
    """A peer as in the document: it drops each message with a layer ``_0``."""

    def tell(self, message: object) -> None:
        self.deliver(json_bytes(message))

    def read(self) -> list[tuple[str, Any]]:
        """Return the messages since the last call that the peer understands."""
        sent, self.end.outbox = self.end.outbox, []
        messages = [json.loads(data) for data in sent]
        return [
            (kind, payload)
            for message in messages
            for kind, payload in message.items()
            if "_0" not in payload
        ]

    def read_kinds(self) -> list[str]:
        return [kind for kind, _ in self.read()]


def accepting_coordinator() -> DocumentPeer:
    peer = DocumentPeer(local_coordinator("a", offers=(OFFER,)))
    peer.tell(HELLO)
    peer.wait(0.2)
    return peer


def dialling(local: TealeLocalNode) -> DocumentPeer:
    peer = DocumentPeer(local, dialled=True)
    assert peer.read() == []  # the first hello is wrapped
    peer.wait(2.0)
    assert peer.read_kinds() == ["hello"]
    peer.tell(HELLO_ACK)
    return peer


def dialling_coordinator() -> DocumentPeer:
    return dialling(local_coordinator("a", offers=(OFFER,)))


def dialling_worker() -> DocumentPeer:
    return dialling(local_worker("w"))


ROLES = [accepting_coordinator, dialling_coordinator, dialling_worker]


@pytest.mark.parametrize(
    ("text", "flat"),
    [
        (json_bytes(HELLO), True),
        (json_bytes({"hello": {"_0": HELLO["hello"]}}), False),
        (b'{"modelQuery":{"modelID":"m","_0":{"modelID":"m"}}}', False),
        (b'\xef\xbb\xbf{ "x": 1, "modelQuery": {"modelID": 5}}', True),
        (b'{"agentMessage":{"data":""}}', None),
        (b'{"hello":null}', None),
        (b"null", None),
        (b"junk", None),
        (b'{"hello":{},"heartbeat":{}}', None),
    ],
)
def test_the_form_of_a_message_is_known_by_its_layer(
    text: bytes, flat: bool | None
) -> None:
    assert is_flat(text) is flat
    assert is_flat(text.decode()) is flat


@pytest.mark.parametrize("joined", ROLES)
def test_a_flat_peer_is_answered_flat(joined: Callable[[], DocumentPeer]) -> None:
    peer = joined()
    assert [kind for kind in peer.read_kinds() if kind != "helloAck"] == ["heartbeat"]

    peer.tell(HEARTBEAT)
    peer.tell(REQUEST)
    (run,) = peer.end.messages(RunJob)
    peer.send(AnswerChunk(run.job_id, run.lease, ["Hel"]))
    peer.send(AnswerChunk(run.job_id, run.lease, ["lo"]))
    peer.send(Completed(run.job_id, run.lease))
    peer.tell(REQUEST)
    (_, again) = peer.end.messages(RunJob)
    peer.send(Failed(again.job_id, again.lease, "broken"))
    peer.tell({"loadModel": {"requestID": "1", "modelID": "m"}})
    peer.send(ModelAnswer(MODEL, available=True, size=4831838208))
    peer.tell({"inferenceRequest": {"requestID": DEVICE}})

    assert len(peer.end.messages(PeerJoined)) == 1
    sent = peer.read()
    assert [kind for kind, _ in groupby(sent, lambda each: each[0])] == [
        "heartbeatAck",
        "inferenceChunk",
        "inferenceComplete",
        "inferenceError",
        "modelLoaded",
        "modelQueryResponse",
        "inferenceError",
    ]
    deltas = [
        choice["delta"].get("content", "")
        for kind, payload in sent
        if kind == "inferenceChunk"
        for choice in payload["chunk"]["choices"]
    ]
    assert "".join(deltas) == "Hello"
    peer.wait(5.0)
    assert peer.read_kinds() == ["heartbeat"]


@pytest.mark.parametrize("joined", ROLES[:2])
def test_a_flat_peer_serves(joined: Callable[[], DocumentPeer]) -> None:
    peer = joined()
    peer.tell(HEARTBEAT)
    peer.read()

    peer.send(RUN)
    ((kind, request),) = peer.read()
    peer.tell(
        {"inferenceChunk": {"requestID": request["requestID"], "chunk": CHUNK}},
    )
    peer.tell({"inferenceComplete": {"requestID": request["requestID"]}})

    assert kind == "inferenceRequest"
    (chunk,) = peer.end.messages(AnswerChunk)
    assert chunk.pieces == ["Hello"]
    assert len(peer.end.messages(Completed)) == 1


def test_a_mac_that_answers_late_is_written_to_in_its_form() -> None:
    mac = ForeignPeer(local_coordinator("a", offers=(OFFER,)), dialled=True)
    mac.wait(4.5)  # the hello was repeated in both forms
    forms = [is_flat(data) for data in mac.end.sent]
    assert forms == [False, False, True, False, True]

    mac.deliver(hello_ack())
    mac.deliver(heartbeat())
    mac.wait(5.0)

    assert not any(is_flat(data) for data in mac.end.sent[5:])


def test_each_conversation_has_its_own_form() -> None:
    local = local_coordinator("a", offers=(OFFER,))
    flat, mac = DocumentPeer(local), ForeignPeer(local)

    for peer, layer in ((flat, False), (mac, True)):
        peer.deliver(json_bytes({"hello": {"_0": HELLO["hello"]}} if layer else HELLO))
        peer.wait(0.2)

    assert flat.read_kinds() == ["helloAck", "heartbeat"]
    assert not any(is_flat(data) for data in mac.end.sent)


def first_hello(form: PayloadForm, *answers: bytes) -> bytes:
    """Dial a peer that gives some answers; return the first message it gets."""
    session = TealePeerSession(
        local_coordinator("a"), TealeConnection(dialled=True), LAN, form=form
    )
    (sent,) = session.tick(0.0)
    session.receive(answers, 0.1)
    assert isinstance(sent, Send)
    assert isinstance(sent.data, bytes)
    return sent.data


def test_a_peer_that_hangs_up_at_the_greeting_gets_the_other_form_next() -> None:
    form = PayloadForm()

    assert not is_flat(first_hello(form))
    assert is_flat(first_hello(form))
    assert not is_flat(first_hello(form))
    assert is_flat(first_hello(form, json_bytes(HELLO_ACK)))
    assert is_flat(first_hello(form, json_bytes(HELLO_ACK)))


# Through a relay: peers need not greet each other.


def node() -> DocumentPeer:
    connection = TealeConnection(
        True,
        name="ab" * 32,
        software=PeerSoftware.MAC,
        description=PeerDescription(models=(MODEL,)),
    )
    local = local_coordinator("a", offers=(OFFER,))
    return DocumentPeer(local, profile=WAN, connection=connection)


def test_a_silent_node_gets_a_heartbeat_in_both_forms() -> None:
    peer = node()
    assert peer.read() == []

    peer.wait(2.0)

    assert peer.read_kinds() == ["heartbeat"]
    peer.tell(HEARTBEAT_ACK)
    peer.send(RUN)
    assert peer.read_kinds() == ["inferenceRequest"]
    peer.wait(15.0)
    assert peer.read_kinds() == ["heartbeat"]


def test_a_flat_request_through_a_relay_is_answered_flat() -> None:
    peer = node()

    peer.tell(REQUEST)
    (run,) = peer.end.messages(RunJob)
    peer.send(Rejected(run.job_id, run.lease, "busy"))

    assert peer.read_kinds() == ["inferenceError"]


def test_a_request_that_the_node_could_not_read_is_repeated() -> None:
    peer = node()
    peer.send(RUN)  # wrapped: nothing is known about the node yet
    assert peer.read() == []

    peer.wait(2.0)
    peer.tell(HEARTBEAT_ACK)

    ((kind, request),) = [each for each in peer.read() if each[0] != "heartbeat"]
    assert kind == "inferenceRequest"
    done = {"requestID": request["requestID"]}
    peer.tell({"inferenceChunk": {**done, "chunk": CHUNK}})
    peer.tell({"inferenceComplete": done})
    assert len(peer.end.messages(Completed)) == 1


def test_a_cancelled_request_is_not_repeated() -> None:
    peer = node()
    peer.send(RUN)
    peer.send(CancelJob(RUN.job_id, RUN.lease))

    peer.wait(2.0)
    peer.tell(HEARTBEAT_ACK)

    assert peer.read_kinds() == ["heartbeat"]


def test_a_node_that_reads_both_forms_keeps_its_request() -> None:
    peer = node()
    peer.send(RUN)
    peer.tell(HEARTBEAT_ACK)  # of the heartbeat before the request

    for _ in range(4):
        peer.wait(15.0)
        peer.tell({"heartbeatAck": {**HEALTH, "isGenerating": True}})

    assert peer.end.messages(Rejected) == []
    assert "inferenceRequest" not in peer.read_kinds()
