"""Bodies of requests: JSON into types, with errors that name the field."""

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import JSON
from shoal.gateway.text import well_formed

T = TypeVar("T")

MODEL_MAX = 256  # characters of a model's name
TOKENS_MAX = 2**31 - 1

Name = Annotated[str, Meta(min_length=1, max_length=MODEL_MAX)]
Tokens = Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Choices = Annotated[int, Meta(ge=1, le=128)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Stops = str | Annotated[list[str], Meta(max_length=4)]

_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<field>.*)`$")


def decode(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    """Decode a body.

    Raises InvalidRequest naming the field that is no good.
    """
    if not data:
        raise InvalidRequest("the body is empty: send a JSON object")
    try:
        data.decode()
        try:
            return decoder.decode(data)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            if not _ESCAPED_HALF.search(data):
                raise
            # JavaScript writes half a character where it cut a text in two.
            text = json.dumps(json.loads(data), ensure_ascii=False)
            return decoder.decode(well_formed(text))
    except msgspec.ValidationError as error:
        raise misfit(str(error)) from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: {error.reason}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error


def misfit(text: str) -> InvalidRequest:
    """Translate msgspec's words, which put the field last and call the body ``$``."""
    found = _AT.match(text)
    assert found is not None  # it matches anything
    what, path = found["what"], (found["path"] or "").removeprefix("$").lstrip(".")
    if missing := _MISSING.match(what):
        path = f"{path}.{missing['field']}".lstrip(".")
        what = "required, but missing"
    if not path:
        return InvalidRequest(f"the body: {what[0].lower()}{what[1:]}")
    return InvalidRequest(f"{path}: {what[0].lower()}{what[1:]}", path)


def options_of(body: msgspec.Struct, names: Iterable[str]) -> dict[str, JSON]:
    """Return the fields of ``body`` that were given, as plain JSON."""
    options: dict[str, JSON] = {}
    for name in names:
        value: Any = getattr(body, name)
        if value is not None:
            options[name] = msgspec.to_builtins(value)
    return options


def stops_of(given: str | list[str] | None) -> list[str]:
    """Return the stop strings; empty ones ask for nothing."""
    return [
        text for text in ([given] if isinstance(given, str) else given or []) if text
    ]


def unsupported(field: str, value: str = "") -> InvalidRequest:
    """Return the error for something that nothing here can carry out."""
    what = f"{field}: {value}" if value else field
    return InvalidRequest(f"{what} is not supported", field)
