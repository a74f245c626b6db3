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
from shoal.domain.work import Call, Feature, Task
from shoal.protocols.macfleet.codec.frames import PAYLOAD_MAX, Payload

BLOBS_MAX = 4096  # referenced by a task or a result

Digests = Annotated[
    tuple[Annotated[bytes, Meta(min_length=32, max_length=32)], ...],
    Meta(max_length=BLOBS_MAX),
]
GRANT_MAX = 512  # characters
EXCEPTION_MAX = 1 << 16  # bytes of the record of an exception
Names = Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=64)]


class TaskRequirements(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a task requires: features of its worker, and blobs by their SHA-256 digests.

    ``python`` and ``exact`` are as in ``Call``.  ``names_timeout``: the timeout of the
    task is its caller's; else it is what remains of the job's total limit, and the
    function's own timeout applies.  ``grant`` is as in ``RunJob``.

    A worker rejects a task that requires a feature unknown to it.
    """

    needs: Names = ()
    blobs: Digests = ()
    python: Annotated[str, Meta(max_length=64)] = ""
    names_timeout: bool = True
    exact: bool = False
    grant: Annotated[str, Meta(max_length=GRANT_MAX)] = ""


class ResultDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    """Details of a task's end.

    ``rejected``: it was not started, and another worker may run it.  ``fault`` is the
    cause of a failure, ``blobs`` are the digests that the value references, and
    ``exception`` is as in ``JobError``.
    """

    rejected: bool = False
    fault: str = Fault.WORKER.value
    blobs: Digests = ()
    exception: Annotated[bytes, Meta(max_length=EXCEPTION_MAX)] = b""


_encode = msgspec.msgpack.Encoder().encode
_requirements = msgspec.msgpack.Decoder(TaskRequirements)
_result_details = msgspec.msgpack.Decoder(ResultDetails)

_FEATURES = {each.value: each for each in Feature}
_FAULTS = {each.value: each for each in Fault}


def encode_requirements(work: Call | Task, grant: str = "") -> bytes | None:
    """Encode the requirements of a task; None if there are none."""
    if isinstance(work, Task):
        return _encode(TaskRequirements(names_timeout=False, grant=grant))
    needs = tuple(sorted(each.value for each in work.needs))
    names_timeout = work.timeout is not None
    required = TaskRequirements(
        needs, work.blobs, work.python, names_timeout, work.exact, grant
    )
    return None if required == _NO_REQUIREMENTS else _encode(required)


def decode_requirements(extension: Raw | None) -> TaskRequirements:
    """Return what a task requires; ``features_of`` reads its features.

    Raises PeerError if the extension is malformed.
    """
    if extension is None:
        return _NO_REQUIREMENTS
    try:
        return _requirements.decode(extension)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"task: {error}") from error


_NO_REQUIREMENTS = TaskRequirements()


def features_of(names: Names | frozenset[str]) -> frozenset[Feature]:
    """Return features by name.  Raises PeerError if one is unknown."""
    if unknown := [name for name in names if name not in _FEATURES]:
        raise PeerError(f"the task requires an unknown feature: {unknown[0][:64]!r}")
    return frozenset(_FEATURES[name] for name in names)


def encode_result_details(details: ResultDetails) -> bytes | None:
    """Encode details; None if there are none."""
    return None if details == _DEFAULT_DETAILS else _encode(details)


def decode_result_details(extension: Raw | None) -> ResultDetails:
    """Decode details.  Raises PeerError if they are malformed."""
    if extension is None:
        return _DEFAULT_DETAILS
    try:
        return _result_details.decode(extension)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"result: {error}") from error


def fault_of(details: ResultDetails) -> Fault:
    """Return the cause of a task's failure."""
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
    """Encode calls of a call stream, for a TASK frame."""
    return _encode(calls)


def decode_calls(payload: Payload) -> list[StreamedCall]:
    """Decode calls of a call stream.

    Raises PeerError if they are malformed or too many.
    """
    _check_size(payload)
    try:
        return [*map(StreamedCall._make, _decode_calls(payload))]
    except (msgspec.MsgspecError, ValueError) as error:
        raise PeerError(f"calls: {error}") from error


def encode_returns(returns: Sequence[CallResult]) -> bytes:
    """Encode results of calls in a call stream, for a RESULT frame."""
    try:
        return _encode(returns)
    except UnicodeEncodeError:  # a traceback may quote a file's name
        return _encode(
            [
                each._replace(error=each.error.encode(errors="replace").decode())
                for each in returns
            ]
        )


def decode_returns(payload: Payload) -> list[CallResult]:
    """Decode results of calls in a call stream.

    Raises PeerError if they are malformed or too many.
    """
    _check_size(payload)
    try:
        returns = [*map(CallResult._make, _decode_returns(payload))]
    except (msgspec.MsgspecError, ValueError) as error:
        raise PeerError(f"returns: {error}") from error
    if any(each.error and len(each.value) > EXCEPTION_MAX for each in returns):
        raise PeerError(f"returns: an exception has more than {EXCEPTION_MAX} bytes")
    return returns


def _check_size(payload: Payload) -> None:
    if len(payload) > PAYLOAD_MAX:
        raise LimitExceeded("calls", len(payload), PAYLOAD_MAX)
