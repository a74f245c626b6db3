"""The messages of the WebSocket of calls; ``docs/protocols/calls.md`` describes them.

Each message is a MessagePack array of items.  Each item is an array that begins with
its kind and the number of a call.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from shoal.domain.errors import PeerError

PATH: Final = "/v1/calls"
MESSAGE_MAX: Final = 64 << 20  # bytes of a message from the coordinator
REFUSALS: Final = (1007, 1009)  # close codes: invalid data, message too big
CALL: Final = 1
CANCEL: Final = 2
ACCEPTED: Final = 1
DONE: Final = 2
FAILED: Final = 3
PROGRESS: Final = 4
STARTED: Final = 5


class CallAccepted(NamedTuple):
    """The coordinator has stored the call."""

    number: int
    job_id: str


class CallDone(NamedTuple):
    """The result of a call in MessagePack, or the digest of a large one."""

    number: int
    value: bytes
    blob: str  # SHA-256 digest in hex; empty: the result is in ``value``


class CallFailed(NamedTuple):
    """A call failed; ``meta`` may name its job."""

    number: int
    kind: str
    text: str
    meta: Mapping[str, object]


class CallAdvanced(NamedTuple):
    """Progress of a call: a share from 0 to 1, and a remark."""

    number: int
    share: float | None
    remark: str


class CallStarted(NamedTuple):
    """A worker has the call; ``attempt`` counts from 1."""

    number: int
    attempt: int


CallEvent: TypeAlias = CallAccepted | CallDone | CallFailed | CallAdvanced | CallStarted

WireOptions: TypeAlias = Mapping[str, object]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[list[Any]])


def call_item(
    number: int, name: str, args: bytes, kwargs: bytes, options: WireOptions
) -> tuple[object, ...]:
    """Return the item that requests a call."""
    return CALL, number, name, args, kwargs, options


def cancel_item(number: int) -> tuple[object, ...]:
    """Return the item that cancels a call."""
    return CANCEL, number


def encode(items: Iterable[tuple[object, ...]]) -> bytes:
    """Return a message of these items."""
    return _encoder.encode(list(items))


def decode(message: bytes) -> list[CallEvent]:
    """Decode a message of the coordinator.

    Items of unknown kinds are skipped: a newer coordinator may send more kinds.

    Raises PeerError if the message is invalid.
    """
    try:
        return [
            _READERS[item[0]](*item[1:])
            for item in _decoder.decode(message)
            if item[0] in _READERS
        ]
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise PeerError(f"this is no message about calls: {error}") from error


def _accepted(number: int, job_id: str) -> CallAccepted:
    return CallAccepted(number.__index__(), job_id)


def _done(number: int, value: bytes, meta: Mapping[str, object]) -> CallDone:
    if not isinstance(value, bytes):
        raise TypeError("a value should be binary")
    return CallDone(number.__index__(), value, str(meta.get("value", "")))


def _failed(
    number: int, kind: str, text: str, meta: Mapping[str, object]
) -> CallFailed:
    return CallFailed(number.__index__(), str(kind), str(text), dict(meta))


def _advanced(number: int, share: float | None, remark: str) -> CallAdvanced:
    return CallAdvanced(number.__index__(), share, remark)


def _begun(number: int, attempt: int) -> CallStarted:
    return CallStarted(number.__index__(), attempt.__index__())


_READERS: Mapping[object, Any] = {
    ACCEPTED: _accepted,
    DONE: _done,
    FAILED: _failed,
    PROGRESS: _advanced,
    STARTED: _begun,
}
