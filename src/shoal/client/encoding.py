"""Encodes a function and its arguments for workers, and decodes results."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TypeAlias

import msgspec

from shoal.client.connection import Blob
from shoal.client.errors import PlainValuesOnly
from shoal.client.remote_exceptions import home_module
from shoal.domain.errors import InvalidRequest, TooLarge
from shoal.domain.work import Feature
from shoal.tasks import registry
from shoal.tasks.class_instances import MAIN
from shoal.tasks.extension_types import PICKLED, REFERENCE, is_extension
from shoal.tasks.limits import ARGS_MAX, BLOB_MAX, BLOB_MIN
from shoal.tasks.schemas import result_converter
from shoal.tasks.sent_task import SentTask, call_name, task_in_main
from shoal.tasks.values import (
    NO_KWARGS,
    Form,
    PackedValue,
    ValueReader,
    load_worker_pickle,
    pack,
)

ReadResult: TypeAlias = Callable[[bytes], object]
"""Decodes a value in MessagePack.  Raises InvalidRequest."""


def result_reader(
    name: str, function: Callable[..., object], *, trust: bool
) -> ReadResult:
    """Return a decoder of a task's results.

    It converts what workers of other programs return to the return hint.
    """
    read, rebuild = plain_result_reader(trust=trust), result_converter(function)
    if rebuild is None:
        return read

    def rebuilt(data: bytes) -> object:
        value = read(data)
        if is_extension(data):  # only Shoal's workers have those, which keep all types
            return value
        try:
            return rebuild(value)
        except ValueError as error:
            raise InvalidRequest(f"what {name} returned: {error}") from error

    return rebuilt


def plain_result_reader(*, trust: bool) -> ReadResult:
    """Return a decoder of values; with ``trust`` they may be pickled."""
    return ValueReader(unpickle=load_worker_pickle if trust else _reject_pickled).read


def _reject_pickled(data: memoryview, buffers: Sequence[object]) -> object:
    raise InvalidRequest(
        "the result is pickled, and unpickling it would run the worker's code: return "
        "lists, dictionaries, texts, numbers or arrays, or trust the workers with "
        "shoal.Pool(trust_code=True)"
    )


NO_ARGS = b"\x90"
"""An empty array."""

FUNCTIONS_MAX = 1024  # whose result decoders are cached
SMALL_DEPTH = 3  # nesting levels to inspect
SMALL_ITEMS = 16  # per container
SMALL_BYTES = 1 << 14

_FIXED_MAX = 15  # items of a fixarray: the first byte holds the length
_SHORT_MAX = (1 << 16) - 1

_SIMPLE = frozenset({type(None), bool, int, float, str})
"""Types that are always plain, and small except for long texts."""

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class RemoteFunction:
    """A function to call: by its ``name``, or sent as ``code``.

    ``code`` is a value in MessagePack; empty: workers have the function.  ``read``
    decodes results.  ``home`` is the local module that defines it; empty: unknown.
    ``trust`` says whether what workers send may be unpickled.  ``timeout`` is that of
    a task sent as code, in seconds.  ``as_code`` returns the function as code, if
    workers may have no way to import it; None: they should have it.
    """

    name: str
    read: ReadResult
    code: bytes = b""
    blobs: tuple[Blob, ...] = ()
    home: str = ""
    trust: bool = False
    timeout: float | None = None
    as_code: "Callable[[], RemoteFunction] | None" = None


@dataclass(frozen=True, slots=True)
class EncodedArguments:
    """The arguments of a call, the features that they need, and their blobs.

    ``digests`` includes those of values uploaded earlier by ``put``.  ``not_plain`` is
    the path of the first value that a worker for plain values cannot read; empty: all
    are plain.
    """

    args: bytes
    kwargs: bytes
    needs: tuple[str, ...] = ()
    digests: tuple[bytes, ...] = ()
    blobs: tuple[Blob, ...] = ()
    not_plain: str = ""


def remote_function(
    function: Callable[..., object] | str, *, trust: bool
) -> RemoteFunction:
    """Return a function in the form in which it is called remotely.

    A string is a task name, and a ``shoal.task`` is called by its name.  Any other
    function is sent as code.  With ``trust``, results may be pickled.

    Raises InvalidRequest if it is not callable or cannot be pickled.
    """
    if isinstance(function, str):
        return _named(function, trust)
    if not callable(function):
        raise InvalidRequest(
            f"{function!r:.80} cannot be called: give a function, or the name of a "
            "task as text"
        )
    if (name := registry.task_name(function)) is not None:
        task = _task(name, function, trust)
        sent = task_in_main(name)
        if sent is None or sent.function is not function:
            return task
        as_code = cache(lambda: _task_as_code(task, sent))
        if registry.main_module_name() == MAIN and name.startswith(f"{MAIN}."):
            return as_code()  # a notebook: no worker can import it
        return replace(task, as_code=as_code)
    return _code(function, trust)


def encode_arguments(
    function: RemoteFunction, args: Sequence[object], kwargs: Mapping[str, object]
) -> EncodedArguments:
    """Encode the arguments of a call.

    Raises InvalidRequest naming the argument that cannot be sent, TooLarge.
    """
    if not function.code and not kwargs and _SIMPLE.issuperset(map(type, args)):
        # The general path below raises these errors, naming the argument.
        with suppress(OverflowError, UnicodeEncodeError):
            if len(simple := _encode(args)) <= BLOB_MIN:
                return EncodedArguments(simple, NO_KWARGS)
    collector = _BlobCollector()
    as_code = bool(function.code)
    form = Form.PICKLED if as_code else Form.EXACT
    packed = _pack_all(list(args), "args", collector, form) if args else _NO_ARGS
    named = _pack_all(dict(kwargs), "kwargs", collector, form) if kwargs else _NO_KWARGS
    needs: list[str] = []
    if as_code:
        needs.append(Feature.CODE.value)
    if packed.first_extension or named.first_extension:
        needs.append(Feature.VALUES.value)
    if len(packed.data) + len(named.data) > ARGS_MAX:
        raise TooLarge(
            f"args and kwargs have more than {ARGS_MAX} bytes; upload large parts with "
            "pool.put, or send less at a time"
        )
    first = tuple(each.digest for each in function.blobs)
    return EncodedArguments(
        _prepend_item(function.code, len(args), packed.data)
        if as_code
        else packed.data,
        named.data,
        tuple(needs),
        first + packed.blobs + named.blobs,
        function.blobs + tuple(collector.blobs.values()),
        packed.first_extension or named.first_extension,
    )


def as_code_arguments(
    function: RemoteFunction, arguments: EncodedArguments, count: int
) -> EncodedArguments:
    """Return the arguments of a call by name for a function that is sent as code.

    ``count`` is the number of positional arguments.
    """
    return EncodedArguments(
        _prepend_item(function.code, count, arguments.args),
        arguments.kwargs,
        (Feature.CODE.value, *arguments.needs),
        tuple(each.digest for each in function.blobs) + arguments.digests,
        function.blobs + arguments.blobs,
    )


def inline_arguments(arguments: EncodedArguments) -> EncodedArguments:
    """Return arguments with their blobs in place, for workers that take plain values.

    Raises PlainValuesOnly naming an argument that is not plain even so, and TooLarge
    naming the largest.
    """
    blobs = {each.digest: b"".join(each.pieces) for each in arguments.blobs}
    if not blobs.keys() >= set(arguments.digests):  # stored by ``put``
        raise PlainValuesOnly(arguments.not_plain)
    reader = ValueReader(blobs.__getitem__)
    args = _pack_inline(reader.read(arguments.args), "args")
    kwargs = _pack_inline(reader.read(arguments.kwargs), "kwargs")
    return EncodedArguments(args, kwargs)


def _pack_inline(values: list[object] | dict[str, object], root: str) -> bytes:
    packed = _pack_all(values, root, None, Form.CONTENTS)
    if packed.first_extension:
        raise PlainValuesOnly(packed.first_extension)
    return packed.data


def encode_value(value: object) -> Blob:
    """Encode one value as a blob for the coordinator to store.

    Raises InvalidRequest naming the part that cannot be sent, TooLarge.
    """
    return _blob(pack(value, size_max=BLOB_MAX).data)


def is_small(value: object, depth: int = SMALL_DEPTH) -> bool:
    """Return whether a value encodes quickly: few numbers and short texts."""
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


class _BlobCollector:
    """Collects blobs, by their digests."""

    def __init__(self) -> None:
        self.blobs: dict[bytes, Blob] = {}

    def store_blob(self, data: bytes) -> bytes:
        blob = _blob(data)
        self.blobs[blob.digest] = blob
        return blob.digest


def _named(name: str, trust: bool) -> RemoteFunction:
    return _named_task(name, trust, home_module(name))


@lru_cache(FUNCTIONS_MAX)
def _named_task(name: str, trust: bool, home: str) -> RemoteFunction:
    return RemoteFunction(
        name, plain_result_reader(trust=trust), home=home, trust=trust
    )


@lru_cache(FUNCTIONS_MAX)
def _task(name: str, function: Callable[..., object], trust: bool) -> RemoteFunction:
    read = result_reader(name, function, trust=trust)
    return RemoteFunction(name, read, home=home_module(name, function), trust=trust)


def _task_as_code(
    task: RemoteFunction, sent: registry.RegisteredTask
) -> RemoteFunction:
    code = _code(SentTask(sent), task.trust, task.name)
    return replace(code, home=task.home, timeout=sent.timeout)


def _pack_all(
    values: list[object] | dict[str, object],
    root: str,
    collector: _BlobCollector | None,
    form: Form,
) -> PackedValue:
    """Encode arguments; without a collector, large values stay in place.

    If they are too large, the error names the largest.
    """
    try:
        return _pack(values, root, collector, form)
    except TooLarge as error:
        named = (
            {f"{root}.{name}": value for name, value in values.items()}
            if isinstance(values, dict)
            else {f"{root}[{at}]": value for at, value in enumerate(values)}
        )
        sizes = {
            name: len(_pack(value, name, collector, form).data)
            for name, value in named.items()
        }
        largest = max(sizes, key=sizes.__getitem__)
        raise TooLarge(
            f"{error}: the largest, {largest}, has {sizes[largest]}"
        ) from error


def _pack(
    value: object, root: str, collector: _BlobCollector | None, form: Form
) -> PackedValue:
    store_blob = None if collector is None else collector.store_blob
    return pack(value, root, size_max=ARGS_MAX, form=form, store_blob=store_blob)


def _blob(data: bytes) -> Blob:
    return Blob(hashlib.sha256(data).digest(), (data,))


def _code(function: object, trust: bool, name: str = "") -> RemoteFunction:
    from shoal.tasks.class_instances import dump_pickle

    read = plain_result_reader(trust=trust)
    name = (name or call_name(function))[: registry.NAME_MAX]
    try:
        pickled = dump_pickle(function)
    except Exception as error:
        # Objects that the function refers to may raise anything.
        raise InvalidRequest(
            f"{name} cannot be sent: an object that it refers to cannot be pickled: "
            f"{error}"
        ) from error
    code = _encode(msgspec.msgpack.Ext(PICKLED, pickled))
    home = home_module(name, function)
    if len(code) < BLOB_MIN:
        return RemoteFunction(name, read, code, home=home, trust=trust)
    blob = _blob(code)
    reference = _encode(msgspec.msgpack.Ext(REFERENCE, blob.digest))
    return RemoteFunction(name, read, reference, (blob,), home, trust)


def _prepend_item(first: bytes, others: int, array: bytes) -> bytes:
    """Prepend an item to an encoded array of ``others`` items."""
    return _array_header(others + 1) + first + array[len(_array_header(others)) :]


def _array_header(items: int) -> bytes:
    """Return the header of an array (MessagePack specification, array family)."""
    if items <= _FIXED_MAX:
        return bytes((0x90 | items,))
    if items <= _SHORT_MAX:
        return b"\xdc" + items.to_bytes(2, "big")
    return b"\xdd" + items.to_bytes(4, "big")


_NO_ARGS = PackedValue(NO_ARGS)
_NO_KWARGS = PackedValue(NO_KWARGS)
