"""Decodes request bodies and queries; errors name the field."""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterable
from typing import Annotated, Any, TypeGuard, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from shoal.domain.errors import InvalidRequest
from shoal.domain.ids import JobId
from shoal.domain.json_limits import (
    NESTING_MAX,
    VALUES_MAX,
    has_more_values,
    is_too_deep,
)
from shoal.domain.work import JSON
from shoal.gateway.http.ids import job_id_of
from shoal.gateway.http.responses import well_formed

T = TypeVar("T")

MODEL_MAX = 256  # characters of a model's name
TOKENS_MAX = 2**31 - 1

ModelName = Annotated[str, Meta(min_length=1, max_length=MODEL_MAX)]
TokenCount = Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
Temperature = Annotated[float, Meta(ge=0, le=2)]

FreeObject = Annotated[
    msgspec.Raw, Meta(extra_json_schema={"type": ["object", "null"]})
]
"""An object of any form, which only engines know; ``decode_object`` decodes it.

Few bytes can make many values, so free objects have a limit of their own.
"""

Metadata = Annotated[
    dict[
        Annotated[str, Meta(max_length=64)],
        Annotated[str, Meta(max_length=512)],
    ],
    Meta(max_length=16),
]
"""What clients note about an object of OpenAI's API, with its limits."""

Ignored = msgspec.Raw
"""A field that is never read."""

EndUser = msgspec.Raw
"""OpenAI's ``user``: a text, or Open WebUI's object."""


def end_user(given: EndUser | msgspec.UnsetType) -> str:
    """Return a client's name for its user; empty: it gives none."""
    if given is msgspec.UNSET or (written := bytes(given)) == b"null":
        return ""
    if written.startswith(b'"'):
        return str(_values.decode(written))
    return written.decode("utf-8", "replace")


OBJECT_MAX = 1 << 20  # bytes of all free objects in one field
SURROGATES_MAX = 2 << 20  # bytes of a body to repair, which is slow
SMALL = 64  # bytes: neutral values are smaller

_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_objects = msgspec.json.Decoder(dict[str, Any])
_values = msgspec.json.Decoder()
_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<field>.*)`$")


def decode(
    decoder: msgspec.json.Decoder[T], data: bytes, values_max: int = VALUES_MAX
) -> T:
    """Decode a body of at most ``values_max`` values.

    Raises InvalidRequest naming the invalid field.
    """
    data = data.removeprefix(BOM_UTF8)  # Windows begins files with it
    if not data:
        raise InvalidRequest("the body is empty: send a JSON object")
    try:
        text = data.decode()
        # Few bytes can make many values.
        if len(data) > values_max and has_more_values(text, values_max):
            raise InvalidRequest(f"the body: more than {values_max} values")
        return _decode_leniently(decoder, data)
    except msgspec.ValidationError as error:
        raise validation_error(str(error)) from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: {error.reason}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error


def raw_fields(data: bytes) -> dict[str, msgspec.Raw]:
    """Return the fields of a body that ``decode`` has accepted."""
    return _decode_leniently(_raw_fields, data.removeprefix(BOM_UTF8))


def decode_object(raw: msgspec.Raw, path: str) -> dict[str, JSON]:
    """Decode an object of any form, found at ``path``.

    Raises InvalidRequest if it is not an object, larger than ``OBJECT_MAX``, or nested
    more deeply than ``NESTING_MAX``.
    """
    value = decode_field(_objects, raw, path)
    if is_too_deep(value):
        raise _too_deep(path)
    return value


def decode_value(raw: msgspec.Raw, path: str) -> JSON:
    """Decode a value of any form, found at ``path``.

    Raises InvalidRequest if it is nested more deeply than ``NESTING_MAX``.
    """
    value: JSON = decode_field(_values, raw, path, size_of(raw))
    if is_too_deep(value):
        raise _too_deep(path)
    return value


def decode_field(
    decoder: msgspec.json.Decoder[T],
    raw: msgspec.Raw,
    path: str,
    size_max: int = OBJECT_MAX,
) -> T:
    """Decode the raw field at ``path``.

    Raises InvalidRequest if it is invalid, or longer than ``size_max`` bytes.
    """
    if size_of(raw) > size_max:
        raise InvalidRequest(f"{path}: more than {size_max} bytes", path)
    try:
        return _decode_leniently(decoder, bytes(raw))
    except msgspec.ValidationError as error:
        raise validation_error(str(error), path) from error
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"{path}: not JSON: {error}", path) from error
    except RecursionError as error:
        raise _too_deep(path) from error


def size_of(raw: msgspec.Raw | UnsetType) -> int:
    """Return the length of a raw field in bytes."""
    return 0 if raw is UNSET else memoryview(raw).nbytes


def is_given(raw: msgspec.Raw | UnsetType) -> TypeGuard[msgspec.Raw]:
    """Say whether a raw field is present, and not null."""
    return raw is not UNSET and not (size_of(raw) == 4 and bytes(raw) == b"null")


def is_requested(raw: msgspec.Raw | UnsetType, neutral: Iterable[JSON] = ()) -> bool:
    """Say whether a raw field is given, and not one of the ``neutral`` values."""
    if not is_given(raw):
        return False
    return size_of(raw) > SMALL or msgspec.json.decode(raw) not in neutral


def validation_error(text: str, within: str = "") -> InvalidRequest:
    """Translate msgspec's message, which puts the field last and calls the body ``$``.

    ``within`` is the path to the decoded part; empty: the body.
    """
    found = _AT.match(text)
    assert found is not None  # it matches anything
    what, path = found["what"], (found["path"] or "").removeprefix("$")
    path = f"{within}{path}".lstrip(".")
    if lacking := _MISSING.match(what):
        return missing(f"{path}.{lacking['field']}".lstrip("."))
    if not path:
        return InvalidRequest(f"the body: {what[0].lower()}{what[1:]}")
    return InvalidRequest(f"{path}: {what[0].lower()}{what[1:]}", path)


def missing(field: str) -> InvalidRequest:
    """Return the error for a field that a request has to have."""
    return InvalidRequest(f"{field}: required, but missing", field)


def required(value: T | UnsetType | None, field: str) -> T:
    """Return the value of a field.  Raises InvalidRequest if it is missing or null."""
    if value is None or isinstance(value, UnsetType):
        raise missing(field)
    return value


def unsupported(field: str, value: str = "") -> InvalidRequest:
    """Return the error for a field or value that Shoal does not support."""
    what = f"{field}: {value}" if value else field
    return InvalidRequest(f"{what} is not supported", field)


def _decode_leniently(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    """Decode JSON; lone surrogates become U+FFFD.

    JavaScript writes them where it cuts a text inside a character.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        if not _ESCAPED_SURROGATE.search(data):
            raise
        if len(data) > SURROGATES_MAX:
            raise ValueError("contains half a character (\\ud800 to \\udfff)") from None
        text = json.dumps(json.loads(data), ensure_ascii=False)
        return decoder.decode(well_formed(text))


def _too_deep(path: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: nested more than {NESTING_MAX} deep", path)


Q = TypeVar("Q", bound=msgspec.Struct)


def job_id_in(request: web.Request) -> JobId:
    """Return the job id in the path, which may be that of its answer."""
    return job_id_of(request.match_info["id"])


def read_query(request: web.Request, kind: type[Q]) -> Q:
    """Decode the query as a ``kind``.

    Raises InvalidRequest for unknown, invalid or repeated parameters.
    """
    given: dict[str, str] = {}
    for name, value in request.query.items():
        if name in given:
            raise InvalidRequest(f"{name}: given more than once", name)
        given[name] = value
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        invalid = validation_error(str(error))
        text = str(invalid).replace("the body: object contains", "the query has an")
        raise InvalidRequest(text, invalid.field) from error
