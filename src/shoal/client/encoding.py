"""Encodes a function and its arguments for workers, and decodes results."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import msgspec

from shoal.client.blobs import Blob
from shoal.client.errors import home_module
from shoal.domain.errors import InvalidRequest, TooLarge
from shoal.domain.work import Feature
from shoal.tasks.extension_types import PICKLED, REFERENCE
from shoal.tasks.limits import ARGS_MAX, BLOB_MAX, BLOB_MIN
from shoal.tasks.registry import NAME_MAX, task_name
from shoal.tasks.schemas import result_converter
from shoal.tasks.values import NO_KWARGS, PackedValue, ValueReader, load_pickle, pack

ReadResult: TypeAlias = Callable[[bytes], object]
"""Returns the value that is written in MessagePack.  Raises InvalidRequest."""


def result_reader(
    name: str, function: Callable[..., object], *, trust: bool
) -> ReadResult:
    """Return what reads the results of a task, and makes of them what its hint says."""
    read, rebuild = plain_result_reader(trust=trust), result_converter(function)
    if rebuild is None:
        return read

    def rebuilt(data: bytes) -> object:
        try:
            return rebuild(read(data))
        except ValueError as error:
            raise InvalidRequest(f"what {name} returned: {error}") from error

    return rebuilt


def plain_result_reader(*, trust: bool) -> ReadResult:
    """Return what reads values as they are; with ``trust`` they may be pickled."""
    return ValueReader(unpickle=_unpickled if trust else _not_unpickled).read


def _unpickled(data: memoryview) -> object:
    try:
        return load_pickle(data)
    except Exception as error:
        # Whatever comes of running what a worker wrote.
        raise InvalidRequest(f"the result cannot be unpickled: {error!r}") from error


def _not_unpickled(data: memoryview) -> object:
    raise InvalidRequest(
        "the result is pickled, and reading it runs code of the worker: it is not read "
        "here; return lists, dictionaries, texts, numbers or arrays, or trust the "
        "workers by shoal.Pool(trust_code=True)"
    )


NO_ARGS = b"\x90"
"""An empty array."""

FUNCTIONS_MAX = 1024  # by name, of which it is remembered how results are read
SMALL_DEPTH = 3  # levels of values in values that are looked at
SMALL_ITEMS = 16  # in each
SMALL_BYTES = 1 << 14

_FIXED_MAX = 15  # items of an array whose length is part of its first byte
_SHORT_MAX = (1 << 16) - 1

_SIMPLE = frozenset({type(None), bool, int, float, str})
"""What is always plain and never large, but for long texts."""

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class RemoteFunction:
    """What is called: by its ``name``, or sent along as ``code``.

    ``code`` is a value in MessagePack; empty: workers have it.  ``read`` makes a result
    of what comes back.  ``home`` is the module here that has it; empty: none is known.
    """

    name: str
    read: ReadResult
    code: bytes = b""
    blobs: tuple[Blob, ...] = ()
    home: str = ""


@dataclass(frozen=True, slots=True)
class EncodedArguments:
    """The arguments of a call, what a worker must know to read them, and large ones.

    ``digests`` also has those of values that were put before.
    """

    args: bytes
    kwargs: bytes
    needs: tuple[str, ...] = ()
    digests: tuple[bytes, ...] = ()
    blobs: tuple[Blob, ...] = ()


def remote_function(
    function: Callable[..., object] | str, *, trust: bool
) -> RemoteFunction:
    """Return how workers come by a function.

    A text is the name of one; so is a ``shoal.task``.  Anything else is sent along.
    With ``trust``, results may be pickled.

    Raises InvalidRequest if it is nothing to be called, or cannot be sent along.
    """
    if isinstance(function, str):
        return _named(function, trust)
    if not callable(function):
        raise InvalidRequest(
            f"{function!r:.80} cannot be called: give a function, or the name of a "
            "task as text"
        )
    if (name := task_name(function)) is not None:
        return _task(name, function, trust)
    return _code(function, plain_result_reader(trust=trust))


def encode_arguments(
    function: RemoteFunction, args: Sequence[object], kwargs: Mapping[str, object]
) -> EncodedArguments:
    """Write the arguments of a call.

    Raises InvalidRequest naming the one that cannot be sent, TooLarge.
    """
    if not function.code and not kwargs and _SIMPLE.issuperset(map(type, args)):
        with suppress(
            OverflowError, UnicodeEncodeError
        ):  # what cannot be is said below
            if len(simple := _encode(args)) <= BLOB_MIN:
                return EncodedArguments(simple, NO_KWARGS)
    large = _Large()
    coded = bool(function.code)
    packed = _pack(list(args), "args", large, coded) if args else _NO_ARGS
    named = _pack(dict(kwargs), "kwargs", large, coded) if kwargs else _NO_KWARGS
    needs: list[str] = []
    if coded:
        needs.append(Feature.CODE.value)
    if packed.first_extension or named.first_extension:
        needs.append(Feature.VALUES.value)
    if len(packed.data) + len(named.data) > ARGS_MAX:
        raise TooLarge(
            f"the arguments have more than {ARGS_MAX} bytes: give large ones by put, "
            "or less at a time"
        )
    first = tuple(each.digest for each in function.blobs)
    return EncodedArguments(
        _spliced(function.code, len(args), packed.data) if coded else packed.data,
        named.data,
        tuple(needs),
        first + packed.blobs + named.blobs,
        function.blobs + tuple(large.blobs.values()),
    )


def encode_value(value: object) -> Blob:
    """Write one value, to be given to the coordinator once and for all.

    Raises InvalidRequest naming the part that cannot be sent, TooLarge.
    """
    return _blob(pack(value, size_max=BLOB_MAX).data)


def is_small(value: object, depth: int = SMALL_DEPTH) -> bool:
    """Say whether a value is surely written in no time: few numbers and short texts."""
    match value:
        case None | bool() | int() | float():
            return True
        case str() | bytes():
            return len(value) <= SMALL_BYTES
        case list() | tuple():
            items: Iterable[object] = value
        case dict():
            items = value.values()
        case _:
            return False
    return (
        depth > 0
        and len(value) <= SMALL_ITEMS
        and all(is_small(item, depth - 1) for item in items)
    )


class _Large:
    """Collects large values, by their digests."""

    def __init__(self) -> None:
        self.blobs: dict[bytes, Blob] = {}

    def apart(self, data: bytes) -> bytes:
        blob = _blob(data)
        self.blobs[blob.digest] = blob
        return blob.digest


def _named(name: str, trust: bool) -> RemoteFunction:
    return _task_there(name, trust, home_module(name))


@lru_cache(FUNCTIONS_MAX)
def _task_there(name: str, trust: bool, home: str) -> RemoteFunction:
    return RemoteFunction(name, plain_result_reader(trust=trust), home=home)


@lru_cache(FUNCTIONS_MAX)
def _task(name: str, function: Callable[..., object], trust: bool) -> RemoteFunction:
    read = result_reader(name, function, trust=trust)
    return RemoteFunction(name, read, home=home_module(name, function))


def _pack(value: object, root: str, large: _Large, coded: bool) -> PackedValue:
    return pack(value, root, size_max=ARGS_MAX, pickles=coded, apart=large.apart)


def _blob(data: bytes) -> Blob:
    return Blob(hashlib.sha256(data).digest(), (data,))


def _code(function: Callable[..., object], read: ReadResult) -> RemoteFunction:
    import cloudpickle

    name = getattr(function, "__qualname__", type(function).__qualname__)[:NAME_MAX]
    try:
        pickled = cloudpickle.dumps(function)
    except Exception as error:
        # Whatever the objects raise that the function refers to.
        raise InvalidRequest(
            f"{name} cannot be sent along, for what it refers to cannot be pickled: "
            f"{error}"
        ) from error
    code = _encode(msgspec.msgpack.Ext(PICKLED, pickled))
    home = home_module(name, function)
    if len(code) < BLOB_MIN:
        return RemoteFunction(name, read, code, home=home)
    blob = _blob(code)
    reference = _encode(msgspec.msgpack.Ext(REFERENCE, blob.digest))
    return RemoteFunction(name, read, reference, (blob,), home)


def _spliced(first: bytes, others: int, array: bytes) -> bytes:
    """Put an item before those of an array of ``others`` items."""
    return _head(others + 1) + first + array[len(_head(others)) :]


def _head(items: int) -> bytes:
    """Return what an array begins with (MessagePack specification, array family)."""
    if items <= _FIXED_MAX:
        return bytes((0x90 | items,))
    if items <= _SHORT_MAX:
        return b"\xdc" + items.to_bytes(2, "big")
    return b"\xdd" + items.to_bytes(4, "big")


_NO_ARGS = PackedValue(NO_ARGS)
_NO_KWARGS = PackedValue(NO_KWARGS)
