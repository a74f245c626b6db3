"""What Shoal nodes add to tasks and results: requirements, details, call streams.

Requirements and details are a field ``shoal`` of the TASK or RESULT map, which
MacFleet's own programs skip.  The calls of a call stream, and their returns, share TASK
and RESULT frames on a frame stream of their own.  Their values are bytes, not spliced
as in ``tasks``: a malformed value then fails its own call and no other call in the
frame. Neither is sent to MacFleet's own programs.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.domain.outcome import Fault
from shoal.domain.vocabulary import CallResult, StreamedCall
from shoal.domain.work import Feature
from shoal.protocols.macfleet.codec.frames import PAYLOAD_MAX, Payload

BLOBS_MAX = 4096  # that a task or a result names

Digests = Annotated[
    tuple[Annotated[bytes, Meta(min_length=32, max_length=32)], ...],
    Meta(max_length=BLOBS_MAX),
]
Names = Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=64)]


class TaskRequirements(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a task takes: features of its worker, and blobs, by their SHA-256 digests.

    A feature that we do not know is one that we do not have.
    """

    needs: Names = ()
    blobs: Digests = ()


class ResultDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a task ended.

    ``rejected``: it was not begun, and another worker may do it.  ``fault`` is whose
    fault it is that it failed, and ``blobs`` are what its value names.
    """

    rejected: bool = False
    fault: str = Fault.WORKER.value
    blobs: Digests = ()


_encode = msgspec.msgpack.Encoder().encode
_requirements = msgspec.msgpack.Decoder(TaskRequirements)
_result_details = msgspec.msgpack.Decoder(ResultDetails)

_FEATURES = {each.value: each for each in Feature}
_FAULTS = {each.value: each for each in Fault}


def encode_requirements(
    needs: frozenset[Feature], blobs: tuple[bytes, ...] = ()
) -> bytes | None:
    """Return what is said beside a task; None: nothing has to be."""
    if not needs and not blobs:
        return None
    return _encode(TaskRequirements(tuple(sorted(each.value for each in needs)), blobs))


def decode_requirements(
    extension: Raw | None,
) -> tuple[frozenset[Feature], tuple[bytes, ...]]:
    """Return what a task needs, and the blobs that it names.

    Raises PeerError if it cannot be read, or needs what we have not heard of.
    """
    if extension is None:
        return frozenset(), ()
    try:
        said = _requirements.decode(extension)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"task: {error}") from error
    return features_of(said.needs), said.blobs


def features_of(names: Names | frozenset[str]) -> frozenset[Feature]:
    """Return features by their names.  Raises PeerError if there is one we lack."""
    if unknown := [name for name in names if name not in _FEATURES]:
        raise PeerError(f"it needs what is not known here: {unknown[0][:64]!r}")
    return frozenset(_FEATURES[name] for name in names)


def encode_result_details(details: ResultDetails) -> bytes | None:
    """Return what is said beside a result; None: nothing has to be."""
    return None if details == _DEFAULT_DETAILS else _encode(details)


def decode_result_details(extension: Raw | None) -> ResultDetails:
    """Return what is said beside a result.  Raises PeerError if it cannot be read."""
    if extension is None:
        return _DEFAULT_DETAILS
    try:
        return _result_details.decode(extension)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"result: {error}") from error


def fault_of(details: ResultDetails) -> Fault:
    """Return whose fault it is that a task failed."""
    return _FAULTS.get(details.fault, Fault.WORKER)


_DEFAULT_DETAILS = ResultDetails()


CALLS_MAX = 1 << 16  # calls, or returns, in one frame

CallNumber = Annotated[int, Meta(ge=0)]
BatchSize = Meta(max_length=CALLS_MAX)

_decode_calls = msgspec.msgpack.Decoder(
    Annotated[list[tuple[CallNumber, bytes, bytes]], BatchSize]
).decode
_decode_returns = msgspec.msgpack.Decoder(
    Annotated[list[tuple[CallNumber, bytes, str]], BatchSize]
).decode


def encode_calls(calls: Sequence[StreamedCall]) -> bytes:
    """Return the payload of a TASK frame with calls of a lane's function."""
    return _encode(calls)


def decode_calls(payload: Payload) -> list[StreamedCall]:
    """Read calls of a lane's function.

    Raises PeerError if they are none, or too many.
    """
    _check_size(payload)
    try:
        return [*map(StreamedCall._make, _decode_calls(payload))]
    except (msgspec.MsgspecError, ValueError) as error:
        raise PeerError(f"calls in a lane: {error}") from error


def encode_returns(returns: Sequence[CallResult]) -> bytes:
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


def decode_returns(payload: Payload) -> list[CallResult]:
    """Read what came of calls in a lane.

    Raises PeerError if it is not that, or too much.
    """
    _check_size(payload)
    try:
        return [*map(CallResult._make, _decode_returns(payload))]
    except (msgspec.MsgspecError, ValueError) as error:
        raise PeerError(f"returns in a lane: {error}") from error


def _check_size(payload: Payload) -> None:
    if len(payload) > PAYLOAD_MAX:
        raise LimitExceeded("calls in a lane", len(payload), PAYLOAD_MAX)
