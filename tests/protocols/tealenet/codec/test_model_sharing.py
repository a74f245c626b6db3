"""Model sharing: messages between peers, and raw chunks of files."""

from uuid import UUID

import pytest

from protocols.tealenet.peers import (
    PeerPair,
    coordinator_side,
    hello,
    met_mac,
    worker_side,
)
from shoal.domain.model_messages import (
    ModelAnswer,
    ModelChunk,
    ModelDone,
    ModelMessage,
    ModelQuery,
    ModelRequest,
)
from shoal.protocols.tealenet.codec.envelope import encode
from shoal.protocols.tealenet.codec.messages import ModelTransferChunk

ID = str(UUID(int=7))
DATA = bytes(range(256)) * 16
PIECE = ModelChunk(ID, "model.gguf", 4096, DATA, last=True)


def ours() -> PeerPair:
    """Return two Shoal peers that have joined each other."""
    return PeerPair(worker_side("w", "t"), coordinator_side("a")).until(1)


@pytest.mark.parametrize(
    "word",
    [
        ModelQuery("m"),
        ModelAnswer("m", available=True, size=5),
        ModelRequest(ID, "m"),
        PIECE,
        ModelChunk(ID, "empty", 0, b""),
        ModelDone(ID, "m"),
    ],
    ids=lambda word: type(word).__name__,
)
def test_model_messages_round_trip_between_shoal_peers(word: ModelMessage) -> None:
    two = ours()

    for one, other in ((two.acceptor, two.dialler), (two.dialler, two.acceptor)):
        one.take(one.conversation.send(word, two.now))
        two.settle()

        assert other.of(ModelMessage) == [word]


def test_a_chunk_for_a_shoal_peer_is_sent_raw() -> None:
    two = ours()
    before = len(two.acceptor.sent)

    two.acceptor.take(two.acceptor.conversation.send(PIECE, two.now))

    head, piece = two.acceptor.sent[before:]
    assert b'"data":""' in head
    assert b'"shoal":{"raw":4096}' in head
    assert piece is DATA


def test_a_chunk_for_a_plain_peer_is_base64_in_json() -> None:
    mac = met_mac()

    mac.send(PIECE)

    ((kind, payload),) = mac.said
    assert kind == "modelTransferChunk"
    assert len(payload["data"]) > len(DATA)
    assert "shoal" not in payload


def test_a_raw_chunk_that_looks_like_a_message_is_data() -> None:
    two = ours()
    piece = ModelChunk(ID, "f", 0, b'{"modelQuery":{"_0":{"modelID":"m"}}}')

    two.acceptor.take(two.acceptor.conversation.send(piece, two.now))
    two.settle()

    assert two.dialler.of(ModelMessage) == [piece]


def test_a_raw_chunk_of_a_wrong_size_ends_the_connection() -> None:
    two = ours()
    conversation = two.acceptor.conversation
    head, _ = [each.data for each in conversation.send(PIECE, 1.0)]  # type: ignore[union-attr]

    two.dialler.take(two.dialler.conversation.receive([head, DATA[1:]], two.now))

    assert two.dialler.closed == "model.gguf: expected 4096 raw bytes, got 4095"
    assert not two.dialler.of(ModelMessage)


@pytest.mark.parametrize("size", [0, -1, (4 << 20) + 1, "x"])
def test_an_invalid_announced_size_is_ignored(size: object) -> None:
    two = ours()
    head = encode(ModelTransferChunk(ID, "f", 0, b"", False))
    shoal = f',"shoal":{{"raw":{size!r}}}}}}}}}'.replace("'", '"').encode()

    said = head.removesuffix(b"}}}") + shoal
    two.dialler.take(two.dialler.conversation.receive([said], two.now))

    assert two.dialler.of(ModelMessage) == [ModelChunk(ID, "f", 0, b"")]


def test_a_plain_peer_cannot_announce_a_raw_chunk() -> None:
    mac = met_mac()
    head = encode(ModelTransferChunk(ID, "f", 0, b"", False))
    said = head.removesuffix(b"}}}") + b',"shoal":{"raw":5}}}}'

    mac.say(said)
    mac.say(hello())

    assert mac.end.of(ModelMessage) == [ModelChunk(ID, "f", 0, b"")]
    assert mac.end.closed is None
