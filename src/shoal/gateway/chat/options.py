"""The options in OpenAI's request bodies: their fields, and their values.

The fields come from the table ``shoal.domain.options``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, Raw

from shoal.domain.errors import InvalidRequest
from shoal.domain.options import CHAT_OPTIONS, UNUSED, Option, OptionType
from shoal.domain.outcome import STOP_REASON
from shoal.domain.work import JSON, Chat, Completion
from shoal.gateway.http import decoding

B = TypeVar("B", bound=msgspec.Struct)

STOPS_MAX = 256
"""Stop strings of one request, in every dialect.

OpenAI takes 4; programs that were written for other servers send more.
"""

StopStrings = str | Annotated[list[str], Meta(max_length=STOPS_MAX)]

EXTRA_MAX = 64
"""Fields of one request that only its engine may know."""

DECIDED: Mapping[str, tuple[JSON, ...]] = {
    "return_progress": (False,),
    "n_predict": (),
    "encoding_format": (),
    "input": (),
    "messages": (),
    "prompt": (),
    "max_completion_tokens": (),
}
"""Fields that an engine gets from its worker alone, with their neutral values."""

Encoder = Callable[[Any], JSON]
"""Turns the decoded value of a structured option into plain JSON."""


def body_type(name: str, base: type[B], options: Iterable[Option]) -> type[B]:
    """Return the type of a request body: ``base``, with a field for each option.

    ``base`` has the fields of the structured options.
    """
    fields = [
        (each.name, *_field(each))
        for each in options
        if each.type is not OptionType.STRUCTURED
    ]
    made = msgspec.defstruct(
        name,
        fields,
        bases=(base,),
        module=base.__module__,
        namespace={"__doc__": base.__doc__},
        frozen=True,
    )
    return cast("type[B]", made)  # defstruct's result does not name its bases


def requested_options(
    body: msgspec.Struct, options: Iterable[Option], encoders: Mapping[str, Encoder]
) -> dict[str, JSON]:
    """Return the options that a body asks for, as plain JSON, in the table's order.

    ``encoders`` translate structured options that are not JSON as they are.

    Raises InvalidRequest naming an invalid field.
    """
    found: dict[str, JSON] = {}
    for option in options:
        value: Any = getattr(body, option.name)
        if value is None or value is UNSET:
            continue
        if isinstance(value, Raw):
            value = _decode_raw(option, value)
        else:
            encode: Encoder = encoders.get(option.name, msgspec.to_builtins)
            value = encode(value)
        if option.is_requested(value):
            found[option.name] = value
    return found


BEGUN: Mapping[str, bool] = {
    "add_generation_prompt": False,
    "continue_final_message": True,
}
"""Fields of a chat whose last message is the beginning of the answer."""


def extra_options(
    data: bytes, body: type[msgspec.Struct], *, begun: bool = False
) -> dict[str, JSON]:
    """Return the fields of a request that are none of its ``body``, for its engine.

    A ``begun`` chat ends with a message of the assistant.

    Raises InvalidRequest for one that no engine gets, and for too many or large ones.
    """
    extra = {
        name: raw
        for name, raw in decoding.raw_fields(data).items()
        if name not in _names_of(body) and name not in UNUSED and decoding.is_given(raw)
    }
    if not extra:  # as in most
        return {}
    for name in extra.keys() & BEGUN.keys():
        if decoding.is_requested(extra.pop(name), (BEGUN[name] is begun,)):
            raise InvalidRequest(
                f"{name}: only a last message of the assistant can be continued", name
            )
    for name in extra.keys() & DECIDED.keys():
        if decoding.is_requested(extra.pop(name), DECIDED[name]):
            raise decoding.unsupported(name)
    if (
        len(extra) > EXTRA_MAX
        or sum(map(decoding.size_of, extra.values())) > decoding.OBJECT_MAX
    ):
        name = max(extra, key=lambda each: decoding.size_of(extra[each]))
        limit = f"{EXTRA_MAX} unknown fields, or {decoding.OBJECT_MAX} bytes in them"
        raise InvalidRequest(f"{name:.64}: more than {limit}", name[:64])
    return {name: decoding.decode_value(raw, name) for name, raw in extra.items()}


def foreign_options(data: bytes, body: type[msgspec.Struct]) -> dict[str, JSON]:
    """Return the fields of a request in another API than OpenAI's chats and completions
    that are none of its ``body``, for its engine.

    Raises InvalidRequest as ``extra_options`` does, and for options of a chat: such an
    API has them in other forms, if at all.
    """
    extra = extra_options(data, body)
    for option in CHAT_OPTIONS:
        if option.name in extra and option.is_requested(extra.pop(option.name)):
            raise decoding.unsupported(option.name)
    return extra


@cache
def _names_of(body: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(each.encode_name for each in msgspec.structs.fields(body))


def stop_strings(given: str | list[str]) -> list[str]:
    """Return the stop strings without empty ones, which ask for nothing."""
    return [text for text in ([given] if isinstance(given, str) else given) if text]


def matched_stop(work: Chat | Completion, fields: Mapping[str, JSON]) -> str | None:
    """Return the stop string that ended a choice, if the engine reported it.

    ``fields`` are those of the choice, or of its last piece.
    """
    stops = work.options.get("stop")
    found = fields.get(STOP_REASON)
    if not isinstance(found, str) or not isinstance(stops, Sequence):
        return None
    # Engines also report stop tokens of the model, which the client did not request.
    return found if found in ([stops] if isinstance(stops, str) else stops) else None


def _field(option: Option) -> tuple[Any, Any]:
    """Return the type of an option's field, and its default."""
    low, high = option.minimum, option.maximum
    match option.type:
        case OptionType.NUMBER:
            return Annotated[float, Meta(ge=low, le=high)] | None, None
        case OptionType.INTEGER:
            return Annotated[int, Meta(ge=low, le=high)] | None, None
        case OptionType.FLAG:
            return bool | None, None
        case OptionType.TEXT:
            longest = None if high is None else int(high)
            return Annotated[str, Meta(max_length=longest)] | None, None
        case OptionType.OBJECT:
            return decoding.FreeObject | msgspec.UnsetType, UNSET
        case OptionType.NUMBERS:
            numbers = {"type": "number", "minimum": low, "maximum": high}
            schema = {"type": ["object", "null"], "additionalProperties": numbers}
            raw = Annotated[Raw, Meta(extra_json_schema=schema)]
            return raw | msgspec.UnsetType, UNSET
        case OptionType.STRUCTURED:
            raise AssertionError(f"{option.name} has a field in the body's base type")


def _decode_raw(option: Option, raw: Raw) -> JSON:
    """Decode an option that was skipped until now, as few bytes make many values."""
    if not decoding.is_given(raw):
        return None
    if option.type is OptionType.OBJECT:
        return decoding.decode_object(raw, option.name)
    decoder = _numbers_decoder(option.minimum, option.maximum)
    return decoding.decode_field(decoder, raw, option.name)


@cache
def _numbers_decoder(
    low: float | None, high: float | None
) -> msgspec.json.Decoder[dict[str, float]]:
    number = Annotated[float, Meta(ge=low, le=high)]
    return msgspec.json.Decoder(dict[str, number])
