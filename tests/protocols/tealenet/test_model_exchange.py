"""Model sharing: messages between peers, and raw chunks of files."""

from uuid import UUID

import pytest

from protocols.contexts import require_token
from protocols.tealenet.peers import (
    ForeignPeer,
    PeerPair,
    heartbeat,
    hello,
    joined_mac,
    local_coordinator,
    local_worker,
)
from shoal.domain.model_messages import (
    ModelAnswer,
    ModelChunk,
    ModelDone,
    ModelMessage,
    ModelPull,
    ModelQuery,
    ModelRequest,
)
from shoal.protocols.seam.peer_session import PeerJoined
from shoal.protocols.tealenet.codec.envelope import encode
from shoal.protocols.tealenet.codec.messages import (
    ModelQueryResponse,
    ModelTransferChunk,
    ModelTransferComplete,
)
from shoal.protocols.tealenet.link_profile import WAN
from shoal.protocols.tealenet.local_node import TealeRole
from shoal.protocols.tealenet.peer import PeerSoftware, TealeConnection

ID = str(UUID(int=7))
DATA = bytes(range(256)) * 16
PIECE = ModelChunk(ID, "model.gguf", 4096, DATA, last=True)


def joined_pair() -> PeerPair:
    """Return two Shoal peers that have joined each other."""
    return PeerPair(local_worker("w"), local_coordinator("a")).until(1)


@pytest.mark.parametrize(
    "message",
    [
        ModelQuery("m"),
        ModelAnswer("m", available=True, size=5),
        ModelRequest(ID, "m"),
        ModelRequest(ID, "m", window=1 << 20),
        ModelPull(ID, 1 << 20),
        ModelPull(ID, 0),
        PIECE,
        ModelChunk(ID, "empty", 0, b""),
        ModelDone(ID, "m"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_model_messages_round_trip_between_shoal_peers(message: ModelMessage) -> None:
    pair = joined_pair()

    for one, other in ((pair.acceptor, pair.dialler), (pair.dialler, pair.acceptor)):
        one.send(message, pair.now)
        pair.settle()

        assert other.messages(ModelMessage) == [message]


def test_only_shoal_peers_send_models_at_the_pace_of_the_receiver() -> None:
    pair = joined_pair()
    mac = ForeignPeer(local_coordinator("a"))
    mac.deliver(hello())
    mac.wait(0.2)
    mac.deliver(heartbeat())

    (worker,) = pair.acceptor.messages(PeerJoined)
    assert (worker.exclusive, worker.paces_models) == (True, True)
    (joined,) = mac.end.messages(PeerJoined)
    assert (joined.exclusive, joined.paces_models) == (False, False)


@pytest.mark.parametrize("shoal", ['{"window":0}', '{"window":-1}', '"x"', "null"])
def test_an_invalid_window_is_ignored(shoal: str) -> None:
    pair = joined_pair()
    payload = f'{{"transferID":"{ID}","modelID":"m","shoal":{shoal}}}'

    text = f'{{"modelTransferRequest":{{"_0":{payload}}}}}'
    pair.dialler.receive([text.encode()], pair.now)

    assert pair.dialler.messages(ModelMessage) == [ModelRequest(ID, "m")]


def test_a_chunk_for_a_shoal_peer_is_sent_raw() -> None:
    pair = joined_pair()
    before = len(pair.acceptor.sent)

    pair.acceptor.send(PIECE, pair.now)

    head, piece = pair.acceptor.sent[before:]
    assert b'"data":""' in head
    assert b'"shoal":{"raw":4096}' in head
    assert piece is DATA


def test_a_chunk_for_a_plain_peer_is_base64_in_json() -> None:
    mac = joined_mac()

    mac.send(PIECE)

    ((kind, payload),) = mac.drain()
    assert kind == "modelTransferChunk"
    assert len(payload["data"]) > len(DATA)
    assert "shoal" not in payload


def test_a_raw_chunk_that_looks_like_a_message_is_data() -> None:
    pair = joined_pair()
    piece = ModelChunk(ID, "f", 0, b'{"modelQuery":{"_0":{"modelID":"m"}}}')

    pair.acceptor.send(piece, pair.now)
    pair.settle()

    assert pair.dialler.messages(ModelMessage) == [piece]


def test_a_raw_chunk_of_a_wrong_size_closes_the_connection() -> None:
    pair = joined_pair()
    pair.acceptor.send(PIECE, pair.now)
    head, _ = pair.acceptor.outbox

    pair.dialler.receive([head, DATA[1:]], pair.now)

    assert pair.dialler.closed == "model.gguf: expected 4096 raw bytes, got 4095"
    assert not pair.dialler.messages(ModelMessage)


@pytest.mark.parametrize("size", [0, -1, (4 << 20) + 1, "x"])
def test_an_invalid_announced_size_is_ignored(size: object) -> None:
    pair = joined_pair()
    head = encode(ModelTransferChunk(ID, "f", 0, b"", False))
    shoal = f',"shoal":{{"raw":{size!r}}}}}}}}}'.replace("'", '"').encode()

    data = head.removesuffix(b"}}}") + shoal
    pair.dialler.receive([data], pair.now)

    assert pair.dialler.messages(ModelMessage) == [ModelChunk(ID, "f", 0, b"")]


def test_a_plain_peer_cannot_announce_a_raw_chunk() -> None:
    mac = joined_mac()
    head = encode(ModelTransferChunk(ID, "f", 0, b"", False))
    data = head.removesuffix(b"}}}") + b',"shoal":{"raw":5}}}}'

    mac.deliver(data)
    mac.deliver(hello())

    assert mac.end.messages(ModelMessage) == [ModelChunk(ID, "f", 0, b"")]
    assert mac.end.closed is None


@pytest.mark.parametrize("role", TealeRole)
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
    role: TealeRole, question: bytes, admitted: bool
) -> None:
    local = local_worker("w") if role is TealeRole.WORKER else local_coordinator("a")
    if role is TealeRole.COORDINATOR:
        admission = None if admitted else require_token("t")
        local = local_coordinator("a", open=admitted, admission=admission)
    connection = TealeConnection(False, name="ab", software=PeerSoftware.RUST)
    node = ForeignPeer(local, profile=WAN, connection=connection)
    node.drain()

    node.deliver(question)

    assert node.drain() == [
        (
            "modelQueryResponse",
            {"modelID": "mlx-community/Qwen3-8B-4bit", "available": False},
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
