"""What our own peers say beside what the wire has, in tasks and in their results.

It is a field ``shoal`` of the map, which real peers skip; none is sent to them.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from shoal.domain.errors import PeerError
from shoal.domain.outcome import Fault
from shoal.domain.work import Feature

BLOBS_MAX = 4096  # that a task or a result names

Digests = Annotated[
    tuple[Annotated[bytes, Meta(min_length=32, max_length=32)], ...],
    Meta(max_length=BLOBS_MAX),
]
Names = Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=64)]


class Wanting(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a task takes: features of its worker, and blobs, by their SHA-256 digests.

    A feature that we do not know is one that we do not have.
    """

    needs: Names = ()
    blobs: Digests = ()


class Ending(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a task ended.

    ``rejected``: it was not begun, and another worker may do it.  ``fault`` is whose
    fault it is that it failed, and ``blobs`` are what its value names.
    """

    rejected: bool = False
    fault: str = Fault.WORKER.value
    blobs: Digests = ()


_encode = msgspec.msgpack.Encoder().encode
_wanting = msgspec.msgpack.Decoder(Wanting)
_ending = msgspec.msgpack.Decoder(Ending)

_FEATURES = {each.value: each for each in Feature}
_FAULTS = {each.value: each for each in Fault}


def write_wanting(
    needs: frozenset[Feature], blobs: tuple[bytes, ...] = ()
) -> bytes | None:
    """Return what is said beside a task; None: nothing has to be."""
    if not needs and not blobs:
        return None
    return _encode(Wanting(tuple(sorted(each.value for each in needs)), blobs))


def read_wanting(more: Raw | None) -> tuple[frozenset[Feature], tuple[bytes, ...]]:
    """Return what a task needs, and the blobs that it names.

    Raises PeerError if it cannot be read, or needs what we have not heard of.
    """
    if more is None:
        return frozenset(), ()
    try:
        said = _wanting.decode(more)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"task: {error}") from error
    return features_of(said.needs), said.blobs


def features_of(names: Names | frozenset[str]) -> frozenset[Feature]:
    """Return features by their names.  Raises PeerError if there is one we lack."""
    if unknown := [name for name in names if name not in _FEATURES]:
        raise PeerError(f"it needs what is not known here: {unknown[0][:64]!r}")
    return frozenset(_FEATURES[name] for name in names)


def write_ending(ending: Ending) -> bytes | None:
    """Return what is said beside a result; None: nothing has to be."""
    return None if ending == _PLAIN else _encode(ending)


def read_ending(more: Raw | None) -> Ending:
    """Return what is said beside a result.  Raises PeerError if it cannot be read."""
    if more is None:
        return _PLAIN
    try:
        return _ending.decode(more)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"result: {error}") from error


def fault_of(ending: Ending) -> Fault:
    """Return whose fault it is that a task failed."""
    return _FAULTS.get(ending.fault, Fault.WORKER)


_PLAIN = Ending()
