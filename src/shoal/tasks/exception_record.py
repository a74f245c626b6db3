"""Exceptions as data: what the text of a traceback loses.

A record has the arguments, attributes and notes of an exception, as far as they can be
encoded, its cause, and the members of a group.  Workers write records and clients read
them; everything in between passes them on as bytes.
"""

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from shoal.tasks.class_instances import slot_values
from shoal.tasks.limits import EXCEPTION_MAX
from shoal.tasks.values import pack

DEPTH_MAX = 8  # causes of causes, and groups within groups
RECORDS_MAX = 64  # an exception, its causes and members
NOTES_MAX = 16
TEXT_MAX = 4096  # characters of a text or a note


class ExceptionRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """An exception; ``name`` is that of its class in tracebacks.

    ``args`` is an array in MessagePack, as a value is encoded; empty: it cannot be
    encoded.  ``fields`` are the attributes that can be encoded.  ``pickled`` is the
    exception without its cause; empty unless its function was sent as code.
    ``machine`` is where it was raised.
    """

    name: str
    text: str = ""
    args: bytes = b""
    fields: Mapping[str, bytes] = {}
    notes: tuple[str, ...] = ()
    cause: "ExceptionRecord | None" = None
    members: "tuple[ExceptionRecord, ...]" = ()
    pickled: bytes = b""
    machine: str = ""


ReducedException: TypeAlias = tuple[
    tuple[object, ...], Mapping[str, object], Sequence[str]
]
"""The arguments, attributes and notes of an exception."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ExceptionRecord).decode


def encode_exception(error: BaseException, *, pickles: bool = False) -> bytes:
    """Return the record of an exception, at most ``EXCEPTION_MAX`` bytes.

    What cannot be encoded is left out, and so is what exceeds the limit.  With
    ``pickles``, the exceptions themselves are added.
    """
    writer = _RecordWriter(pickles)
    record = msgspec.structs.replace(
        writer.record(error), machine=platform.node()[:TEXT_MAX]
    )
    encoded = _encode(record)
    return encoded if len(encoded) <= EXCEPTION_MAX else b""


def decode_exception(data: bytes) -> ExceptionRecord | None:
    """Return the exception of a record; None if there is none, or it is invalid."""
    if not data:
        return None
    try:
        return _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None  # the traceback says what happened


def class_name(kind: type) -> str:
    """Return the name of an exception's class in tracebacks."""
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


class _RecordWriter:
    """Writes the record of an exception and of those that belong to it."""

    def __init__(self, pickles: bool) -> None:
        self._pickles = pickles
        # Half: the rest is for names, and for the frames of MessagePack.
        self._left = EXCEPTION_MAX // 2
        self._records = 0

    def record(self, error: BaseException, depth: int = 0) -> ExceptionRecord:
        """Return the record of an exception."""
        self._records += 1
        args, fields, notes = _reduce(error)
        return ExceptionRecord(
            class_name(type(error))[:TEXT_MAX],
            self._text(_text_of(error)),
            self._packed([*args]),
            {
                name: packed
                for name, value in fields.items()
                if name.isidentifier() and (packed := self._packed(value))
            },
            tuple(map(self._text, notes[:NOTES_MAX])),
            next(self._records_of([error.__cause__], depth + 1), None),
            tuple(self._records_of(_members(error), depth + 1)),
            self._pickled(error) if self._pickles else b"",
        )

    def _records_of(
        self, errors: Iterable[BaseException | None], depth: int
    ) -> Iterator[ExceptionRecord]:
        for error in errors:
            if depth > DEPTH_MAX or self._records >= RECORDS_MAX:
                return
            if error is not None:
                yield self.record(error, depth)

    def _text(self, text: str) -> str:
        text = text.encode(errors="replace").decode()[: min(TEXT_MAX, self._left)]
        self._left -= len(text)
        return text

    def _packed(self, value: object) -> bytes:
        """Encode a value; return nothing if that is impossible."""
        try:
            return self._within(pack(value, size_max=EXCEPTION_MAX).data)
        except Exception:
            # Encoding an object may run its code.
            return b""

    def _pickled(self, error: BaseException) -> bytes:
        from shoal.tasks.class_instances import dump_pickle

        try:
            return self._within(dump_pickle(error))
        except Exception:
            # So does pickling it.
            return b""

    def _within(self, data: bytes) -> bytes:
        if len(data) > self._left:
            return b""
        self._left -= len(data)
        return data


def _reduce(error: BaseException) -> ReducedException:
    """Return the arguments, attributes and notes of an exception.

    Its own ``__reduce__``, if any, returns those of its constructor, which is not
    called when it is rebuilt.
    """
    if is_validation_error(type(error)):
        return _validation_args(error), {}, getattr(error, "__notes__", [])
    base: Any = builtin_base(type(error))
    _, args, *states = base.__reduce__(error)
    if isinstance(error, BaseExceptionGroup):
        args = (error.message,)
    state: Mapping[str, object] = next((each for each in states if each), {})
    fields = {name: value for name, value in state.items() if name[:2] != "__"}
    fields |= slot_values(error)
    notes = state.get("__notes__", ())
    notes = notes if isinstance(notes, list | tuple) else ()
    return args, fields, [note for note in notes if isinstance(note, str)]


def is_validation_error(kind: type) -> bool:
    """Return whether a class is Pydantic's ``ValidationError``, which C code makes."""
    return hasattr(kind, "from_exception_data") and hasattr(kind, "error_count")


def _validation_args(error: Any) -> tuple[object, ...]:
    """Return the title of a ``ValidationError``, and each of its lines as data."""
    lines = error.errors(include_url=False, include_context=False)
    return error.title, [
        [line["type"], line["loc"], line["msg"], line["input"]] for line in lines
    ]


def builtin_base(kind: type) -> type:
    """Return the closest class of an exception that is built into Python."""
    return next(each for each in kind.__mro__ if each.__module__ == "builtins")


def _members(error: BaseException) -> tuple[BaseException, ...]:
    return error.exceptions if isinstance(error, BaseExceptionGroup) else ()


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        # It may be user code.
        return ""
