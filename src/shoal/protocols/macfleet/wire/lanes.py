"""Calls in a lane, many to a frame: a TASK frame on the lane's stream, or a RESULT.

Between our own peers only.  Values are bytes here, not spliced as in ``tasks``: what
somebody wrote badly then spoils his own call and none of the others in the frame.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.domain.vocabulary import LaneCall, LaneReturn
from shoal.protocols.macfleet.wire.frames import PAYLOAD_MAX, Payload

CALLS_MAX = 1 << 16  # calls, or returns, in one frame

Number = Annotated[int, Meta(ge=0)]
Several = Meta(max_length=CALLS_MAX)

_encode = msgspec.msgpack.Encoder().encode
_calls = msgspec.msgpack.Decoder(
    Annotated[list[tuple[Number, bytes, bytes]], Several]
).decode
_returns = msgspec.msgpack.Decoder(
    Annotated[list[tuple[Number, bytes, str]], Several]
).decode


def write_calls(calls: Sequence[LaneCall]) -> bytes:
    """Return the payload of a TASK frame with calls of a lane's function."""
    return _encode(calls)


def read_calls(payload: Payload) -> list[LaneCall]:
    """Read calls of a lane's function.

    Raises PeerError if they are none, or too many.
    """
    _check_size(payload)
    try:
        return [*map(LaneCall._make, _calls(payload))]
    except (msgspec.MsgspecError, ValueError) as error:
        raise PeerError(f"calls in a lane: {error}") from error


def write_returns(returns: Sequence[LaneReturn]) -> bytes:
    """Return the payload of a RESULT frame with what came of calls in a lane."""
    try:
        return _encode(returns)
    except UnicodeEncodeError:  # a name of a file, in a traceback
        return _encode(
            [
                each._replace(error=each.error.encode(errors="replace").decode())
                for each in returns
            ]
        )


def read_returns(payload: Payload) -> list[LaneReturn]:
    """Read what came of calls in a lane.

    Raises PeerError if it is not that, or too much.
    """
    _check_size(payload)
    try:
        return [*map(LaneReturn._make, _returns(payload))]
    except (msgspec.MsgspecError, ValueError) as error:
        raise PeerError(f"returns in a lane: {error}") from error


def _check_size(payload: Payload) -> None:
    if len(payload) > PAYLOAD_MAX:
        raise LimitExceeded("calls in a lane", len(payload), PAYLOAD_MAX)
