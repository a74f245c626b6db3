"""Calls in a call stream, and their results."""

import msgspec
import pytest
from msgspec import Raw

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.domain.vocabulary import CallResult, StreamedCall
from shoal.protocols.macfleet.codec import task_extension
from shoal.protocols.macfleet.codec.task_extension import (
    CALLS_MAX,
    EXCEPTION_MAX,
    ResultDetails,
    decode_calls,
    decode_result_details,
    decode_returns,
    encode_calls,
    encode_result_details,
    encode_returns,
)


def test_calls_round_trip() -> None:
    calls = [StreamedCall(n, b"\x91\x01", b"\x81\xa1a\x02") for n in range(300)]

    assert decode_calls(encode_calls(calls)) == calls
    assert decode_calls(encode_calls([])) == []


def test_returns_round_trip() -> None:
    returns = [CallResult(1, b"\x2a"), CallResult(2, b"", "Traceback: boom")]

    assert decode_returns(encode_returns(returns)) == returns


def test_a_malformed_value_fails_only_its_own_call() -> None:
    calls = [StreamedCall(1, b"\x92\x01", b""), StreamedCall(2, b"\x90", b"\x80")]

    assert decode_calls(encode_calls(calls)) == calls


def test_a_traceback_may_contain_lone_surrogates() -> None:
    (read,) = decode_returns(encode_returns([CallResult(1, b"", "no file \udcff")]))

    assert read.error == "no file ?"


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [1],
        [[1, b""]],
        [[-1, b"", b""]],
        [["1", b"", b""]],
        [[1, "", ""]],
        [[1, b"", b"", b""]],
        [[1, b"", b""]] * (CALLS_MAX + 1),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_malformed_calls_and_returns_are_rejected(value: object) -> None:
    data = msgspec.msgpack.encode(value)

    with pytest.raises(PeerError, match="calls: "):
        decode_calls(data)
    with pytest.raises(PeerError, match="returns: "):
        decode_returns(data)


def test_calls_beyond_the_size_limit_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(task_extension, "PAYLOAD_MAX", 10)

    with pytest.raises(LimitExceeded):
        decode_calls(bytes(11))
    with pytest.raises(LimitExceeded):
        decode_returns(bytes(11))


def test_details_of_a_failure_round_trip() -> None:
    details = ResultDetails(exception=b"a record")

    encoded = encode_result_details(details)

    assert encoded is not None
    assert decode_result_details(Raw(encoded)) == details


def test_record_of_an_exception_beyond_the_size_limit_is_rejected() -> None:
    record = bytes(EXCEPTION_MAX + 1)
    encoded = encode_result_details(ResultDetails(exception=record))
    assert encoded is not None

    with pytest.raises(PeerError, match="result"):
        decode_result_details(Raw(encoded))
    with pytest.raises(PeerError, match="returns"):
        decode_returns(encode_returns([CallResult(1, record, "ValueError")]))
