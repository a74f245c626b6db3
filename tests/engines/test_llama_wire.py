"""The messages between the embedded engine and its child."""

import pytest

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.domain.work import Kind
from shoal.engines.llama_wire import (
    MESSAGE_MAX,
    SIZE,
    Abort,
    Added,
    Ended,
    Load,
    Loaded,
    LoadFailed,
    Refused,
    Run,
    ToChild,
    ToEngine,
    Wrote,
    decode_to_child,
    decode_to_engine,
    frame,
    size_of,
)


@pytest.mark.parametrize(
    "message",
    [
        Load("tiny.gguf", slots=2, context=512, threads=1),
        Run(1, Kind.CHAT, {"messages": [{"role": "user"}]}, "po", 7),
        Run(2, Kind.COMPLETION, {}, "", None, 3),
        Abort(2),
    ],
)
def test_orders_arrive_as_they_were_sent(message: ToChild) -> None:
    data = frame(message)

    assert size_of(data[: SIZE.size]) == len(data) - SIZE.size
    assert decode_to_child(data[SIZE.size :]) == message


@pytest.mark.parametrize(
    "message",
    [
        Loaded(2048, embeddings=False),
        LoadFailed("no such model"),
        Wrote(1, "こ😀"),
        Added(1, 2, {"content": "é"}, {"content": [{"logprob": -0.5}]}, "stop"),
        Ended(1, "stop", 24, 5),
        Refused(1, "too long", 400),
    ],
)
def test_replies_arrive_as_they_were_sent(message: ToEngine) -> None:
    data = frame(message)

    assert decode_to_engine(data[SIZE.size :]) == message


@pytest.mark.parametrize("data", [b"", b"\xc1", b"llama.cpp says hello", b"\x80"])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(PeerError):
        decode_to_engine(data)
    with pytest.raises(PeerError):
        decode_to_child(data)


def test_a_message_larger_than_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(LimitExceeded):
        size_of(SIZE.pack(MESSAGE_MAX + 1))
