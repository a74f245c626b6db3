"""Writes Python's values in MessagePack (``docs/tasks.md``); ``reading`` reads them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from enum import Enum
from typing import Any, TypeAlias

import msgspec

from shoal.domain.errors import InvalidRequest
from shoal.tasks.limits import BLOB_MIN, DEPTH_MAX, RESULT_MAX
from shoal.tasks.rich import (
    PICKLED,
    REFERENCE,
    TAGGED,
    is_array,
    take_apart,
    write_array,
)
from shoal.tasks.unsendable import of_no_known_type, too_large

Apart: TypeAlias = Callable[[bytes], bytes]
"""Takes a large value in MessagePack, to be sent apart; returns its SHA-256 digest."""

NO_KWARGS = b"\x80"
"""An empty map."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a value that the coordinator stores, returned by ``Pool.put``."""

    digest: bytes
    """SHA-256 of the encoded value, 32 bytes."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A value in MessagePack.

    ``rich`` is where in it the first value is that only our own peers know; empty: all
    is plain.  ``pickled`` says whether something of it is pickled, and ``blobs`` names
    what of it is sent apart.
    """

    data: bytes
    rich: str = ""
    pickled: bool = False
    blobs: tuple[bytes, ...] = ()


def pack(
    value: object,
    root: str = "value",
    *,
    size_max: int = RESULT_MAX,
    pickles: bool = False,
    apart: Apart | None = None,
) -> Packed:
    """Write a value; ``root`` is what it is called in errors.

    Tuples become lists, and dataclasses, Structs and Pydantic's models maps of their
    fields.  With ``pickles``, what is of no known type is pickled.  Arrays, bytes and
    what is pickled are given to ``apart``, if they are large.

    Raises InvalidRequest naming the part that cannot be written, TooLarge if the whole
    is larger than ``size_max`` bytes.
    """
    packing = _Packing(pickles, apart)
    try:
        data = _encode(packing.plain(value, (None, root)))
    except OverflowError:
        # Looking for such numbers beforehand would cost all others.
        packing = _Packing(pickles, apart, wide=True)
        data = _encode(packing.plain(value, (None, root)))
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{root}: a text in it is not valid Unicode") from error
    if len(data) > size_max:
        raise too_large(root, len(data), size_max)
    return Packed(data, packing.rich, packing.pickled, tuple(packing.blobs))


_encode = msgspec.msgpack.Encoder().encode

_SCALARS = frozenset({type(None), bool, int, float, str})

_SIMPLE: tuple[type[Any], ...] = (int, float, str, list, tuple, dict)

_Path: TypeAlias = tuple[Any, object]
"""The path to what holds a value, or None, and its name or number there."""


class _Packing:
    """Makes what MessagePack has of one value."""

    def __init__(
        self, pickles: bool, apart: Apart | None, *, wide: bool = False
    ) -> None:
        self._pickles = pickles
        self._apart = apart
        self._wide = wide  # whether whole numbers of more than 64 bits are looked for
        self._depth = 0
        self.rich = ""
        self.pickled = False
        self.blobs: list[bytes] = []

    def plain(self, value: Any, path: _Path) -> Any:
        """Return a value as the encoder takes it."""
        kind = type(value)
        if kind in _SCALARS and not self._wide:
            return value
        if kind is list or kind is tuple:
            # Most lists are of one simple type, and long ones need not be walked.
            if not self._wide and _SCALARS.issuperset(map(type, value)):
                return value
            return self._within(
                path,
                lambda: [
                    self.plain(item, (path, number))
                    for number, item in enumerate(value)
                ],
            )
        if kind is dict and all(type(key) is str for key in value):
            return self._map(value, path)
        return self._other(value, kind, path)

    def _map(self, value: Mapping[str, Any], path: _Path) -> Any:
        return self._within(
            path,
            lambda: {key: self.plain(item, (path, key)) for key, item in value.items()},
        )

    def _within(self, path: _Path, walk: Callable[[], Any]) -> Any:
        if self._depth == DEPTH_MAX:
            raise InvalidRequest(
                f"{shown(path):.200}: values in values, more than {DEPTH_MAX} deep; is "
                "there one that holds itself?"
            )
        self._depth += 1
        walked = walk()
        self._depth -= 1
        return walked

    def _other(self, value: Any, kind: type, path: _Path) -> Any:
        """Return what is not made of lists, maps, texts and numbers."""
        match value:
            case bytes() | bytearray() | memoryview():
                return self._or_apart(bytes(value))
            case Enum():
                return self.plain(value.value, path)
            case Ref():
                self._note(path)
                self.blobs.append(value.digest)
                return msgspec.msgpack.Ext(REFERENCE, value.digest)
            case datetime() if value.tzinfo is not None:
                return value
        if is_array(value):
            return self._array(value, path)
        if (members := _members(value, kind)) is not None:
            return self._map(members, path)
        if kind in _SCALARS and (kind is not int or -(1 << 63) <= value < 1 << 64):
            return value
        if (taken := take_apart(value)) is not None:
            self._note(path)
            tag, parts = taken
            parts = self._within(
                path,
                lambda: (
                    [self.plain(part, path) for part in parts]
                    if isinstance(parts, list)
                    else parts
                ),
            )
            return msgspec.msgpack.Ext(TAGGED, _encode((tag, parts)))
        for simple in _SIMPLE:
            if isinstance(value, simple):  # of a class made from it
                return self.plain(simple(value), path)
        return self._pickle(value, kind, path)

    def _array(self, value: Any, path: _Path) -> Any:
        if value.dtype.kind == "U" and not value.shape and isinstance(value, str):
            return str(value)
        try:
            written = write_array(value)
        except InvalidRequest as error:
            if self._pickles:
                return self._pickle(value, type(value), path)
            raise InvalidRequest(f"{shown(path)}: {error}") from error
        self._note(path)
        return self._or_apart(written, raw=True)

    def _pickle(self, value: object, kind: type, path: _Path) -> Any:
        if not self._pickles:
            raise of_no_known_type(shown(path), kind)
        import cloudpickle

        self._note(path)
        self.pickled = True
        pickled = msgspec.msgpack.Ext(PICKLED, cloudpickle.dumps(value))
        return self._or_apart(_encode(pickled), raw=True)

    def _or_apart(self, data: bytes, *, raw: bool = False) -> Any:
        """Return bytes, or with ``raw`` MessagePack, as it is or by a reference."""
        if self._apart is None or len(data) < BLOB_MIN:
            return msgspec.Raw(data) if raw else data
        digest = self._apart(data if raw else _encode(data))
        self.rich = self.rich or "a value that is sent apart"
        self.blobs.append(digest)
        return msgspec.msgpack.Ext(REFERENCE, digest)

    def _note(self, path: _Path) -> None:
        self.rich = self.rich or shown(path)


def _members(value: Any, kind: type) -> Mapping[str, Any] | None:
    """Return the fields of what has fields, by name."""
    if is_dataclass(kind):
        return {each.name: getattr(value, each.name) for each in fields(kind)}
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    if hasattr(kind, "model_dump") and hasattr(kind, "model_validate"):
        dumped: Mapping[str, Any]
        try:
            dumped = value.model_dump(mode="json")
        except ValueError:  # it holds what JSON has no word for, such as an array
            dumped = value.model_dump()
        return dumped
    return None


def shown(path: _Path) -> str:
    """Return a path as people write it: ``args[0].epochs``."""
    within, name = path
    if within is None:
        return str(name)
    if isinstance(name, int):
        return f"{shown(within)}[{name}]"
    key = str(name)
    return f"{shown(within)}" + (f".{key}" if key.isidentifier() else f"[{key!r:.40}]")
