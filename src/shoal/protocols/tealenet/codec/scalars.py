"""The wire's names, ids, dates and numbers, and the hash of a passcode.

Source: TealeNet's "Cluster Messages", and what real peers do: dates are doubles since
2001, Macs write UUIDs in upper case and others in lower case.
"""

import hashlib
import re
from enum import StrEnum
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Raw, UnsetType

from shoal.domain.errors import PeerError

REFERENCE_DATE = 978307200.0  # Unix time of 2001-01-01T00:00:00Z, in seconds

ID_MAX = 128  # characters of an id; a UUID has 36
NAME_MAX = 256  # characters of the name of a model, a machine or a key
MODELS_MAX = 1024  # models that a peer may name
TEXT_MAX = 4096  # characters of an error or a reason that are taken
EXACT_MAX = 2**53  # up to here a relay written in JavaScript keeps integers as they are

_UUID = "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"

Id: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=ID_MAX)]
"""What names a request or a device, as its peer wrote it: see ``normalized_id``."""

Uuid: TypeAlias = Annotated[str, msgspec.Meta(pattern=f"^{_UUID}$", max_length=36)]
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=NAME_MAX)]
Names: TypeAlias = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MODELS_MAX)]
Int: TypeAlias = Annotated[int, msgspec.Meta(ge=-EXACT_MAX, le=EXACT_MAX)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=EXACT_MAX)]
WholeNumber: TypeAlias = int | float
"""An integer that may be written as 100.0, where a fraction is no reason to refuse."""

Date: TypeAlias = float
"""Seconds since ``REFERENCE_DATE``."""

ShoalField: TypeAlias = Raw | UnsetType
"""Our field, which ``extension`` reads: other peers ignore it.

It keeps the bytes of the whole message alive, so it is to be read at once.
"""

_LONE = re.compile("[\ud800-\udfff]")
_WORDS = {
    "id": "ID",
    "ids": "IDs",
    "gb": "GB",
    "gbs": "GBs",
    "ram": "RAM",
    "vram": "VRAM",
    "ac": "AC",
}


class ThermalLevel(StrEnum):
    """How hot a machine is, in the order of the document."""

    NOMINAL = "nominal"
    FAIR = "fair"
    SERIOUS = "serious"
    CRITICAL = "critical"


_LEVELS = {level.value: level for level in ThermalLevel}


class ErrorCode(StrEnum):
    """Why a request was not done, for programs.

    A Rust peer ignores the whole error if its code is another.
    """

    MODEL_NOT_LOADED = "model_not_loaded"
    QUEUE_FULL = "queue_full"
    UNAVAILABLE = "unavailable"
    INTERNAL_ERROR = "internal_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


def wire_name(field: str) -> str:
    """Return what the wire calls a field: ``loaded_models`` is ``loadedModels``."""
    first, *rest = field.split("_")
    return first + "".join(_WORDS.get(word, word.capitalize()) for word in rest)


def thermal_level(word: str) -> ThermalLevel:
    """Return the level that a word means; one that is not known counts as fair.

    A newer peer then still gets work, and others get it first.
    """
    return _LEVELS.get(word, ThermalLevel.FAIR)


def normalized_id(text: str) -> str:
    """Return what to compare ids by: a Mac answers a request's id in upper case.

    Messages hold ids as they came, and answers repeat them so: Rust peers compare them
    as texts.
    """
    return text.upper()


def to_date(unix: float) -> Date:
    """Return the date of a Unix time, both in seconds."""
    return unix - REFERENCE_DATE


def passcode_hash(passcode: str) -> str:
    """Return what a peer shows of its passcode: lower-case hex of the SHA-256.

    There is neither salt nor nonce, so that whoever sees it can show it as well.
    """
    return hashlib.sha256(well_formed(passcode).encode()).hexdigest()


def well_formed(text: str) -> str:
    """Return ``text`` with whatever UTF-8 cannot carry replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _LONE.sub("\ufffd", text)
    return text


def encode_json(value: object) -> bytes:
    """Return a value or message of our own as JSON; texts are made well formed.

    Raises PeerError if it is nested too deeply, for the other end refuses that.
    """
    try:
        try:
            return _encode(value)
        except UnicodeEncodeError:  # half a character
            return _encode(
                _well_formed_tree(msgspec.to_builtins(value, enc_hook=_to_builtin))
            )
    except RecursionError as error:
        raise PeerError("nested too deeply to be sent") from error


def _to_builtin(value: Any) -> Any:
    return msgspec.json.decode(value) if isinstance(value, Raw) else dict(value)


def _well_formed_tree(value: Any) -> Any:
    match value:
        case str():
            return well_formed(value)
        case dict():
            return {
                _well_formed_tree(name): _well_formed_tree(inner)
                for name, inner in value.items()
            }
        case list() | tuple():
            return [_well_formed_tree(inner) for inner in value]
        case _:
            return value


# The hook is for mappings that are no dict.
_encode = msgspec.json.Encoder(enc_hook=dict).encode
