"""Encoding of the items of calls."""

import msgspec
import pytest

from shoal.client import messages
from shoal.domain.errors import PeerError

encode = msgspec.msgpack.encode


def test_call_and_cancel_are_as_documented() -> None:
    items = [
        messages.call_item(7, "add", b"\x90", b"\x80", {"kept": False}),
        messages.cancel_item(7),
    ]

    assert msgspec.msgpack.decode(messages.encode(items)) == [
        [1, 7, "add", b"\x90", b"\x80", {"kept": False}],
        [2, 7],
    ]


def test_events_are_decoded() -> None:
    data = encode(
        [
            [1, 7, "job7"],
            [2, 7, b"\x01", {}],
            [2, 8, b"", {"value": "ab" * 32}],
            [3, 9, "raised", "zap", {"job": "j"}],
            [4, 7, None, "half"],
            [5, 7, 1],
            [99, 1, "from the future"],
        ]
    )

    assert messages.decode(data) == [
        messages.CallAccepted(7, "job7"),
        messages.CallDone(7, b"\x01", ""),
        messages.CallDone(8, b"", "ab" * 32),
        messages.CallFailed(9, "raised", "zap", {"job": "j"}),
        messages.CallAdvanced(7, None, "half"),
        messages.CallStarted(7, 1),
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encode(1),
        encode([1]),
        encode([[]]),
        encode([[1]]),
        encode([[[1], 2, 3]]),
        encode([[2, 7, b"", None]]),
        encode([[2, "7", b"", {}]]),
        encode([[1, [7], "job"]]),
        encode([[3, 7, "raised"]]),
        encode([[1, 7, "job", "more"]]),
    ],
)
def test_garbage_is_rejected(data: bytes) -> None:
    with pytest.raises(PeerError):
        messages.decode(data)
