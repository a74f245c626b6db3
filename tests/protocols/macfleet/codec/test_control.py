"""Control messages between Shoal nodes."""

import msgpack
import msgspec
import pytest

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.macfleet.codec.control import (
    CONTROL_MAX,
    NAMES_MAX,
    RECALLED_MAX,
    BlobMissingMessage,
    CancelMessage,
    CloseCallStreamMessage,
    ControlMessage,
    DismissedMessage,
    DrainingMessage,
    LoadReportMessage,
    OfferMessage,
    OpenCallStreamMessage,
    ProgressMessage,
    RecallCallsMessage,
    decode_control,
    encode_control,
)

WORDS: list[ControlMessage] = [
    OfferMessage(frozenset({"call", "lane"}), frozenset({"demo.add"}), 4, speed=0.5),
    OfferMessage(pythons=frozenset({"3.11", "3.12"}), lent=2),
    OfferMessage(
        unfit="hot", queued=3, device="desktop", only_for=frozenset({"laptop"})
    ),
    DrainingMessage("stopping"),
    DismissedMessage("revoked"),
    LoadReportMessage(12.5, 40.0, 3),
    LoadReportMessage(),
    CancelMessage("1"),
    ProgressMessage("1", 0.25, "epoch 2"),
    ProgressMessage("1"),
    OpenCallStreamMessage("1", 9, "demo.add", 5.0, frozenset({"values"}), "3.12"),
    RecallCallsMessage(9, (1, 2)),
    CloseCallStreamMessage(9),
    BlobMissingMessage(bytes(32)),
]


@pytest.mark.parametrize("word", WORDS, ids=lambda word: type(word).__name__)
def test_control_messages_round_trip(word: ControlMessage) -> None:
    assert decode_control(encode_control(word)) == word


def test_a_control_message_contains_its_name() -> None:
    written = msgpack.unpackb(encode_control(ProgressMessage("1", 0.5)))

    assert written == {"word": "progress", "task_id": "1", "share": 0.5}


def test_unknown_control_messages_and_fields_are_ignored() -> None:
    assert decode_control(msgpack.packb({"word": "sing", "song": 3})) is None
    cancel = msgpack.packb({"word": "cancel", "task_id": "1", "why": ["late"]})
    assert decode_control(cancel) == CancelMessage("1")


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        None,
        {"word": 3},
        {"word": "cancel"},
        {"word": "cancel", "task_id": 3},
        {"word": "cancel", "task_id": "x" * 300},
        {"word": "offer", "slots": -1},
        {"word": "offer", "slots": 2**60},
        {"word": "offer", "speed": 0.0},
        {"word": "offer", "speed": float("nan")},
        {"word": "offer", "tasks": ["x" * 2000]},
        {"word": "offer", "tasks": [str(each) for each in range(NAMES_MAX + 1)]},
        {"word": "progress", "task_id": "1", "share": 1.5},
        {"word": "progress", "task_id": "1", "share": float("nan")},
        {"word": "blob lacked", "digest": bytes(31)},
        {"word": "recall", "stream": 1, "numbers": [1] * (RECALLED_MAX + 1)},
        {"word": "reported", "cpu": "much"},
        {"word": "reported", "cpu": float("inf")},
        {
            "word": "open lane",
            "task_id": "1",
            "stream": 1,
            "name": "f",
            "timeout": -1.0,
        },
    ],
    ids=lambda value: repr(value)[:60],
)
def test_malformed_control_messages_are_rejected(value: object) -> None:
    with pytest.raises(PeerError, match="control message"):
        decode_control(msgspec.msgpack.encode(value))


def test_a_control_message_that_is_too_large_is_rejected() -> None:
    with pytest.raises(LimitExceeded):
        decode_control(bytes(CONTROL_MAX + 1))
