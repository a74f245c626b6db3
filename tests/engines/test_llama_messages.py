"""The messages between the embedded engine and its child."""

import pytest

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.domain.work import JobKind
from shoal.engines.llama_messages import (
    MESSAGE_MAX,
    SIZE,
    AbortJob,
    AnswerEnded,
    FieldsPiece,
    JobRefused,
    LoadFailed,
    ModelOpened,
    OpenModel,
    StartJob,
    TextPiece,
    ToChild,
    ToEngine,
    decode_to_child,
    decode_to_engine,
    encode_message,
    message_size,
)


@pytest.mark.parametrize(
    "message",
    [
        OpenModel("tiny.gguf", slots=2, context=512, threads=1),
        StartJob(1, JobKind.CHAT, {"messages": [{"role": "user"}]}, "po", 7),
        StartJob(2, JobKind.COMPLETION, {}, "", None, 3),
        AbortJob(2),
    ],
)
def test_commands_round_trip(message: ToChild) -> None:
    data = encode_message(message)

    assert message_size(data[: SIZE.size]) == len(data) - SIZE.size
    assert decode_to_child(data[SIZE.size :]) == message


@pytest.mark.parametrize(
    "message",
    [
        ModelOpened(2048, embeddings=False),
        LoadFailed("no such model"),
        TextPiece(1, "こ😀"),
        FieldsPiece(1, 2, {"content": "é"}, {"content": [{"logprob": -0.5}]}, "stop"),
        AnswerEnded(1, "stop", 24, 5),
        JobRefused(1, "too long", 400),
    ],
)
def test_replies_round_trip(message: ToEngine) -> None:
    data = encode_message(message)

    assert decode_to_engine(data[SIZE.size :]) == message


@pytest.mark.parametrize("data", [b"", b"\xc1", b"llama.cpp says hello", b"\x80"])
def test_invalid_message_is_rejected(data: bytes) -> None:
    with pytest.raises(PeerError):
        decode_to_engine(data)
    with pytest.raises(PeerError):
        decode_to_child(data)


def test_oversized_message_is_rejected_before_it_is_read() -> None:
    with pytest.raises(LimitExceeded):
        message_size(SIZE.pack(MESSAGE_MAX + 1))
