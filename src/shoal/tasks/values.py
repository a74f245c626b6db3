"""Encodes Python values in MessagePack and decodes them (``docs/tasks.md``)."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, TypeAlias

import msgspec

from shoal.domain.errors import InvalidRequest
from shoal.tasks import errors
from shoal.tasks.class_instances import instance_contents, reduce_instance
from shoal.tasks.extension_types import (
    ARRAY,
    BUFFERED,
    EXACT,
    INSTANCE,
    PICKLED,
    REFERENCE,
    SCALAR,
    TAGGED,
    TRANSPOSED,
    compose,
    decompose,
    is_array,
    is_transposed,
    read_array,
    read_scalar,
    write_array,
)
from shoal.tasks.limits import BLOB_MAX, BLOB_MIN, DEPTH_MAX, RESULT_MAX

StoreBlob: TypeAlias = Callable[[bytes], bytes]
"""Stores a large value in MessagePack as a blob; returns its SHA-256 digest."""

NO_KWARGS = b"\x80"
"""An empty map."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a value that the coordinator stores, returned by ``Pool.put``."""

    digest: bytes
    """SHA-256 of the encoded value, 32 bytes."""


@dataclass(frozen=True, slots=True)
class PackedValue:
    """A value in MessagePack.

    ``first_extension`` is the path of the first value that uses one of Shoal's
    extension types; empty: all values are plain.  ``pickled`` is whether any part is
    pickled, and ``blobs`` are the digests of its blobs.
    """

    data: bytes
    first_extension: str = ""
    pickled: bool = False
    blobs: tuple[bytes, ...] = ()


class Form(Enum):
    """What becomes of values that are not plain data, arrays or the like.

    That is: of instances of classes, and of whatever else pickle could send.
    """

    EXACT = "exact"  # instances as in ``class_instances``; others are refused
    PICKLED = "pickled"  # for who runs our code anyway: it imports their modules
    EXACT_OR_PICKLED = "exact or pickled"
    CONTENTS = "contents"  # for peers without classes: fields by name, tuples as lists


def pack(
    value: object,
    root: str = "value",
    *,
    size_max: int = RESULT_MAX,
    form: Form = Form.EXACT,
    store_blob: StoreBlob | None = None,
) -> PackedValue:
    """Encode a value; ``root`` is its name in errors.

    Large arrays, bytes and pickles are passed to ``store_blob``.

    Raises InvalidRequest naming the part that cannot be encoded, TooLarge if the result
    is larger than ``size_max`` bytes, or a blob is too large.
    """
    kind = _ContentsPacking if form is Form.CONTENTS else _Packing
    packing = kind(form, store_blob)
    try:
        data = _encode(packing.convert_value(value, (None, root)))
    except (OverflowError, UnicodeEncodeError):
        # Checking for such numbers and texts first would slow down all other values.
        packing = kind(form, store_blob, checks_scalars=True)
        data = _encode(packing.convert_value(value, (None, root)))
    if len(data) > size_max:
        raise errors.value_too_large(root, len(data), size_max)
    return PackedValue(
        data, packing.first_extension, packing.pickled, tuple(packing.blobs)
    )


def mark_exact(data: bytes) -> bytes:
    """Return a value in MessagePack that its reader is not to convert."""
    marked = _encode((EXACT, [msgspec.Raw(data)]))
    return _encode(msgspec.msgpack.Ext(TAGGED, marked))


_encode = msgspec.msgpack.Encoder().encode

_SCALARS = frozenset({type(None), bool, int, float, str})

_SIMPLE: tuple[type[Any], ...] = (int, float, str, list, dict)

_Path: TypeAlias = tuple[Any, object]
"""The path of the container or None, and the key or index in it."""


class _Packing:
    """Converts one value to types that MessagePack has."""

    def __init__(
        self, form: Form, store_blob: StoreBlob | None, *, checks_scalars: bool = False
    ) -> None:
        self._pickles = form in (Form.PICKLED, Form.EXACT_OR_PICKLED)
        self._has_classes = form is not Form.PICKLED
        self._store_blob = store_blob
        # Whether some may be none that MessagePack has.
        self._checks_scalars = checks_scalars
        self._depth = 0
        self.first_extension = ""
        self.pickled = False
        self.blobs: list[bytes] = []

    def convert_value(self, value: Any, path: _Path) -> Any:
        """Return a value in the form that the encoder accepts."""
        kind = type(value)
        if kind in _SCALARS and not self._checks_scalars:
            return value
        if kind is list:
            # Fast path: most lists hold only scalars.
            if not self._checks_scalars and _SCALARS.issuperset(map(type, value)):
                return value
            return self._within(
                path,
                lambda: [
                    self.convert_value(item, (path, number))
                    for number, item in enumerate(value)
                ],
            )
        if (
            kind is dict
            and all(type(key) is str for key in value)
            and (not self._checks_scalars or all(map(_is_encodable, value)))
        ):
            return self._map(value, path)
        return self._other(value, kind, path)

    def _map(self, value: Mapping[str, Any], path: _Path) -> Any:
        return self._within(
            path,
            lambda: {
                key: self.convert_value(item, (path, key))
                for key, item in value.items()
            },
        )

    def _within(self, path: _Path, convert: Callable[[], Any]) -> Any:
        if self._depth == DEPTH_MAX:
            raise InvalidRequest(
                f"{format_path(path):.200}: nested more than {DEPTH_MAX} levels deep; "
                "does a value contain itself?"
            )
        self._depth += 1
        converted = convert()
        self._depth -= 1
        return converted

    def _other(self, value: Any, kind: type, path: _Path) -> Any:
        """Convert a value that is not a list, map, text or number."""
        if kind is bytes:
            self._check_size(len(value), path)
            return self._inline_or_blob(value, path)
        if kind is Ref:
            self._record_extension(path)
            self.blobs.append(value.digest)
            return msgspec.msgpack.Ext(REFERENCE, value.digest)
        if kind is datetime and value.tzinfo is UTC and not value.fold:
            return value
        if is_array(value):
            return self._array(value, path)
        if kind in _SCALARS and _is_encodable(value):
            return value
        if (decomposed := decompose(value)) is not None:
            tag, parts = decomposed
            return self._tagged(tag, parts, path)
        if self._has_classes and (reduced := reduce_instance(value)) is not None:
            return self._tagged(INSTANCE, reduced, path)
        return self._pickle(value, kind, path)

    def _tagged(self, tag: str, parts: Any, path: _Path) -> Any:
        self._record_extension(path)
        if isinstance(parts, list):
            # Under the path of the value: its parts have no names of their own.
            parts = self._within(
                path, lambda: [self.convert_value(part, path) for part in parts]
            )
        return msgspec.msgpack.Ext(TAGGED, _encode((tag, parts)))

    def _array(self, value: Any, path: _Path) -> Any:
        self._check_size(value.nbytes, path)
        try:
            if is_transposed(value):
                return self._tagged(TRANSPOSED, [value.T], path)
            encoded = write_array(value)
        except InvalidRequest as error:
            if self._pickles:
                return self._pickle(value, type(value), path)
            raise InvalidRequest(f"{format_path(path)}: {error}") from error
        self._record_extension(path)
        return self._inline_or_blob(encoded, path, raw=True)

    def _pickle(self, value: object, kind: type, path: _Path) -> Any:
        if not self._pickles:
            raise errors.unsupported_type(format_path(path), kind)
        from shoal.tasks.class_instances import dump_pickle

        self._record_extension(path)
        self.pickled = True
        buffers: list[Any] = []

        def stays(buffer: Any) -> bool:
            """Keep what is large apart: it is stored as a blob of its own."""
            numpy, data = sys.modules.get("numpy"), buffer.raw()
            if numpy is None or self._store_blob is None or data.nbytes < BLOB_MIN:
                return True
            buffers.append(numpy.frombuffer(data, numpy.uint8))
            return False

        try:
            dumped = dump_pickle(value, stays)
        except Exception as error:
            # It may raise anything: parts of it are the user's code.
            raise errors.unpicklable(format_path(path), kind, error) from error
        if buffers:
            return self._tagged(BUFFERED, [dumped, *buffers], path)
        pickled = msgspec.msgpack.Ext(PICKLED, dumped)
        return self._inline_or_blob(_encode(pickled), path, raw=True)

    def _check_size(self, size: int, path: _Path) -> None:
        """Raise TooLarge for a part that cannot be a blob, before it is copied."""
        if self._store_blob is not None and size > BLOB_MAX:
            raise errors.blob_too_large(format_path(path), size, BLOB_MAX)

    def _inline_or_blob(self, data: bytes, path: _Path, *, raw: bool = False) -> Any:
        """Return the data, or a reference to it if it is stored as a blob.

        ``raw`` data is already MessagePack.
        """
        if self._store_blob is None or len(data) < BLOB_MIN:
            return msgspec.Raw(data) if raw else data
        encoded = data if raw else _encode(data)
        self._check_size(len(encoded), path)
        digest = self._store_blob(encoded)
        self._record_extension(path)
        self.blobs.append(digest)
        return msgspec.msgpack.Ext(REFERENCE, digest)

    def _record_extension(self, path: _Path) -> None:
        self.first_extension = self.first_extension or format_path(path)


def _is_encodable(scalar: object) -> bool:
    """Return whether MessagePack has a number or a text."""
    try:
        _encode(scalar)
    except (
        OverflowError,
        UnicodeEncodeError,
    ):  # such as the name of a file that is not UTF-8
        return False
    return True


class _ContentsPacking(_Packing):
    """Converts one value to plain data, as far as it has such contents."""

    def _other(self, value: Any, kind: type, path: _Path) -> Any:
        if kind is str and not _is_encodable(value):
            raise InvalidRequest(f"{format_path(path)}: a text that is not Unicode")
        if isinstance(value, tuple):
            return self.convert_value([*value], path)
        if isinstance(value, bytearray | memoryview):
            return self._inline_or_blob(bytes(value), path)
        if isinstance(value, datetime) and value.tzinfo is not None:
            return value
        if (contents := instance_contents(value)) is not None:
            return self.convert_value(contents, path)
        if isinstance(value, str) or not is_array(value):
            for simple in _SIMPLE:
                if isinstance(value, simple) and kind is not simple:
                    return self.convert_value(simple(value), path)
        return super()._other(value, kind, path)


def format_path(path: _Path) -> str:
    """Return a path in Python notation: ``args[0].epochs``."""
    within, name = path
    if within is None:
        return str(name)
    if isinstance(name, int):
        return f"{format_path(within)}[{name}]"
    key = str(name)
    return f"{format_path(within)}" + (
        f".{key}" if key.isidentifier() else f"[{key!r:.40}]"
    )


DIGEST_SIZE = 32  # bytes of SHA-256

GetBlob: TypeAlias = Callable[[bytes], memoryview | bytes]
"""Returns a blob by its digest."""

Unpickle: TypeAlias = Callable[[memoryview, Sequence[Any]], object]
"""Unpickles a value that refers to buffers."""


def reject_blobs(digest: bytes) -> memoryview:
    """Reject a reference to a blob."""
    raise InvalidRequest("a value refers to a blob that is not available here")


class ValueReader:
    """Decodes values.

    Args:
        blob: returns blobs.
        unpickle: unpickles values; ``load_pickle`` if the sender is trusted.  The
            default rejects them.
    """

    def __init__(
        self, blob: GetBlob = reject_blobs, unpickle: Unpickle | None = None
    ) -> None:
        self._blob = blob
        self._unpickle = reject_pickle if unpickle is None else unpickle
        self._decode = msgspec.msgpack.Decoder(ext_hook=self._extension).decode
        self._decode_shared = msgspec.msgpack.Decoder(ext_hook=self._shared).decode

    def read(self, data: bytes | bytearray | memoryview) -> Any:
        """Decode a value.

        Arrays are writable: views of ``data`` if that is writable, otherwise copies.
        Arrays of blobs are views of the blob, which may be read-only.

        Raises InvalidRequest if the data is invalid or must not be read here.
        """
        return self._read(self._decode, data)

    def _read(
        self, decode: Callable[[Any], Any], data: bytes | bytearray | memoryview
    ) -> Any:
        try:
            return decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidRequest(
                f"a value is not valid MessagePack: {error}"
            ) from error
        except RecursionError as error:
            raise InvalidRequest("values are nested too deeply") from error

    def _extension(self, code: int, data: memoryview) -> object:
        return self._extended(code, data, self._decode, shared=False)

    def _shared(self, code: int, data: memoryview) -> object:
        return self._extended(code, data, self._decode_shared, shared=True)

    def _extended(
        self, code: int, data: memoryview, decode: Callable[[Any], Any], *, shared: bool
    ) -> object:
        if code == ARRAY:
            return read_array(data, shared=shared)
        if code == SCALAR:
            return read_scalar(data)
        if code == TAGGED:
            pair = decode(data)
            if type(pair) is not list or len(pair) != 2:
                raise InvalidRequest("a tagged value is malformed")
            tag, parts = pair
            if tag != BUFFERED:
                return compose(tag, parts)
            match parts:
                case [bytes(pickled), *buffers]:
                    return self._unpickle(memoryview(pickled), buffers)
                case _:
                    raise InvalidRequest("a pickle with buffers is malformed")
        if code == REFERENCE:
            if len(data) != DIGEST_SIZE:
                raise InvalidRequest("a reference to a value is malformed")
            return self._read(self._decode_shared, self._blob(bytes(data)))
        if code == PICKLED:
            return self._unpickle(data, ())
        raise InvalidRequest(f"a value has the unknown extension type {code}")


def load_pickle(data: memoryview, buffers: Sequence[Any] = ()) -> object:
    """Unpickle a value: this runs arbitrary code of its sender."""
    import cloudpickle

    views = [memoryview(each) for each in buffers]
    # Buffers of this process are writable; others share a blob.
    own = [bytearray(view) if view.readonly else view for view in views]
    return cloudpickle.loads(data, buffers=own)


def load_worker_pickle(data: memoryview, buffers: Sequence[Any] = ()) -> object:
    """Unpickle what a trusted worker sent.  Raises InvalidRequest if that fails."""
    try:
        return load_pickle(data, buffers)
    except Exception as error:
        # Unpickling runs arbitrary code of the worker.
        raise InvalidRequest(f"the result cannot be unpickled: {error!r}") from error


def reject_pickle(data: memoryview, buffers: Sequence[Any]) -> object:
    """Raise InvalidRequest with the option that trusts the sender."""
    raise InvalidRequest(
        "a value is pickled, and unpickling it would run its sender's code; to allow "
        "this on a worker, start it with `shoal join --trust-code`"
    )
