"""Model sharing: messages between peers, on the local network only."""

from uuid import UUID

import pytest

from protocols.contexts import require_token
from protocols.tealenet.peers import (
    ForeignPeer,
    PeerPair,
    joined_mac,
    local_coordinator,
    local_worker,
)
from shoal.domain.model_messages import (
    ModelAnswer,
    ModelChunk,
    ModelDone,
    ModelMessage,
    ModelQuery,
    ModelRequest,
)
from shoal.protocols.tealenet.codec.messages import (
    ModelQueryResponse,
    ModelTransferChunk,
    ModelTransferComplete,
)
from shoal.protocols.tealenet.peer import WAN, PeerSoftware, TealeConnection

ID = str(UUID(int=7))
DATA = bytes(range(256)) * 16
PIECE = ModelChunk(ID, "model.gguf", 4096, DATA, last=True)


@pytest.mark.parametrize(
    "message",
    [
        ModelQuery("m"),
        ModelAnswer("m", available=True, size=5),
        ModelRequest(ID, "m"),
        PIECE,
        ModelChunk(ID, "empty", 0, b""),
        ModelDone(ID, "m"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_model_messages_round_trip(message: ModelMessage) -> None:
    pair = PeerPair(local_worker("w"), local_coordinator("a")).joined()

    for one, other in ((pair.acceptor, pair.dialler), (pair.dialler, pair.acceptor)):
        one.send(message, pair.now)
        pair.settle()

        assert other.messages(ModelMessage) == [message]


def test_a_chunk_is_base64_in_json() -> None:
    mac = joined_mac()

    mac.send(PIECE)

    ((kind, payload),) = mac.drain()
    assert kind == "modelTransferChunk"
    assert len(payload["data"]) > len(DATA)


@pytest.mark.parametrize("role", ["coordinator", "worker"])
@pytest.mark.parametrize(
    "question",
    [
        b"""{
"modelQuery": {
"modelID": "mlx-community/Qwen3-8B-4bit"
}
}""",
        b"""{
"modelTransferRequest": {
"transferID": "550e8400-e29b-41d4-a716-446655440000",
"modelID": "mlx-community/Qwen3-8B-4bit"
}
}""",
    ],
    ids=["modelQuery", "modelTransferRequest"],
)
@pytest.mark.parametrize("admitted", [True, False])
def test_models_are_not_available_through_a_relay(
    role: str, question: bytes, admitted: bool
) -> None:
    local = local_worker("w") if role == "worker" else local_coordinator("a")
    if role == "coordinator":
        admission = None if admitted else require_token("t")
        local = local_coordinator("a", open=admitted, admission=admission)
    connection = TealeConnection(False, name="ab", software=PeerSoftware.RUST)
    node = ForeignPeer(local, profile=WAN, connection=connection)
    node.drain()

    node.deliver(question)

    assert node.drain() == [
        (
            "modelQueryResponse",
            {
                "modelID": "mlx-community/Qwen3-8B-4bit",
                "available": False,
                "totalSizeBytes": 0,
            },
        )
    ]
    assert not node.end.messages(ModelMessage)


def test_model_messages_through_a_relay_that_ask_nothing_get_no_answer() -> None:
    connection = TealeConnection(False, name="ab", software=PeerSoftware.RUST)
    node = ForeignPeer(local_worker("w"), profile=WAN, connection=connection)
    node.drain()

    for message in (
        ModelTransferChunk(ID, "f", 0, b"x", False),
        ModelQueryResponse("m", True, 5),
        ModelTransferComplete(ID, "m"),
    ):
        node.deliver(message)

    assert node.drain() == []
    assert not node.end.messages(ModelMessage)
