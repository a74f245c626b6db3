"""The wire's names, ids, dates and numbers, and the hash of a passcode.

Source: TealeNet's "Cluster Messages", and what real peers do: dates are doubles since
2001, Macs write UUIDs in upper case and others in lower case.
"""

import hashlib
import re
from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec

from shoal.domain.worker import ThermalLevel
from shoal.protocols.seam.json_text import encode_json as encode_json  # re-exported
from shoal.protocols.seam.json_text import well_formed as well_formed

REFERENCE_DATE = 978307200.0  # Unix time of 2001-01-01T00:00:00Z, in seconds

ID_MAX = 128  # characters of an id; a UUID has 36
CONTEXT_MAX = 2**31 - 1  # tokens
NAME_MAX = 256  # characters of the name of a model, a machine or a key
MODELS_MAX = 1024  # models that a peer may name
TEXT_MAX = 4096  # characters of an error or a reason
EXACT_MAX = 2**53  # the largest integer that a relay written in JavaScript preserves

_UUID = "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"

Id: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=ID_MAX)]
"""The id of a request or a device, as its peer wrote it: see ``normalized_id``."""

Uuid: TypeAlias = Annotated[str, msgspec.Meta(pattern=f"^{_UUID}$", max_length=36)]
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=NAME_MAX)]
Names: TypeAlias = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MODELS_MAX)]
Int: TypeAlias = Annotated[int, msgspec.Meta(ge=-EXACT_MAX, le=EXACT_MAX)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=EXACT_MAX)]
WholeNumber: TypeAlias = int | float
"""An integer that may be written as 100.0; a fraction is accepted, too."""

Date: TypeAlias = float
"""Seconds since ``REFERENCE_DATE``."""

HEX_KEY = re.compile("[0-9a-f]{64}")
"""A public key as nodes write it; the Ed25519 key is the node's id."""

_WORDS = {
    "id": "ID",
    "ids": "IDs",
    "gb": "GB",
    "gbs": "GBs",
    "ram": "RAM",
    "vram": "VRAM",
    "ac": "AC",
    "ip": "IP",
}


_LEVELS = {level.value: level for level in ThermalLevel}


class ErrorCode(StrEnum):
    """Why a request failed or was refused.

    A Rust peer ignores an error with any other code.
    """

    MODEL_NOT_LOADED = "model_not_loaded"
    QUEUE_FULL = "queue_full"
    UNAVAILABLE = "unavailable"
    INTERNAL_ERROR = "internal_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


def wire_name(field: str) -> str:
    """Return the wire's name of a field: ``loaded_models`` is ``loadedModels``."""
    first, *rest = field.split("_")
    return first + "".join(_WORDS.get(word, word.capitalize()) for word in rest)


def thermal_level(name: str) -> ThermalLevel:
    """Return the level with a name; an unknown name counts as fair.

    A newer peer then still gets work, with lower priority.
    """
    return _LEVELS.get(name, ThermalLevel.FAIR)


def normalized_id(text: str) -> str:
    """Return the form in which ids are compared.

    A Mac answers a request with its id in upper case.  Shoal's answers repeat an id as
    it was received, because Rust peers compare ids as text.
    """
    return text.upper()


def to_date(unix: float) -> Date:
    """Return the date of a Unix time, both in seconds."""
    return unix - REFERENCE_DATE


def passcode_hash(passcode: str) -> str:
    """Return the hash that a peer presents: lower-case hex of the passcode's SHA-256.

    It has neither salt nor nonce: anyone who sees it can present it as well.
    """
    return hashlib.sha256(well_formed(passcode).encode()).hexdigest()


def from_date(date: Date) -> float:
    """Return the Unix time of a date, both in seconds."""
    return date + REFERENCE_DATE


def is_uuid(text: str) -> bool:
    """Return whether a text is a UUID: Macs refuse any other owner."""
    return re.fullmatch(_UUID, text) is not None


def is_derived_id(text: str) -> bool:
    """Return whether an id is a UUID that was derived from something (version 8).

    Shoal's devices have such ids; others draw theirs at random (version 4).
    """
    return is_uuid(text) and text[14] == "8"
