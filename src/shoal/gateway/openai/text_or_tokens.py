"""Prompts and inputs: a text, texts, tokens, or lists of tokens.

Source: OpenAI's API reference, "Create completion" and "Create embeddings".
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from shoal.domain.errors import InvalidRequest
from shoal.domain.json_limits import VALUES_MAX
from shoal.gateway.http.body import BODY_MAX
from shoal.gateway.http.decoding import decode_field

TOKENS_MAX = 1 << 20
BODY_VALUES_MAX = TOKENS_MAX + VALUES_MAX  # in a body with tokens

TextOrTokens: TypeAlias = str | list[str] | list[int] | list[list[int]]

Token = Annotated[int, Meta(ge=0, lt=2**31)]

_TOKENS = {"type": "array", "items": {"type": "integer"}}
_FORMS = [
    {"type": "string"},
    {"type": "array", "items": {"type": "string"}},
    _TOKENS,
    {"type": "array", "items": _TOKENS},
]

RawTextOrTokens = Annotated[msgspec.Raw, Meta(extra_json_schema={"anyOf": _FORMS})]
"""A field of a body, for ``decode_text_or_tokens``."""


@dataclass(frozen=True, slots=True)
class _Form:
    decoder: msgspec.json.Decoder[Any]
    what: str


_BY_BEGINNING = {
    b'"': _Form(msgspec.json.Decoder(str), "text"),
    b'["': _Form(msgspec.json.Decoder(list[str]), "texts"),
    b"[": _Form(msgspec.json.Decoder(list[Token]), "tokens"),
    b"[[": _Form(msgspec.json.Decoder(list[list[Token]]), "lists of tokens"),
}
"""Forms by their first characters: msgspec allows one list type in a union."""

_BEGINNING = re.compile(rb'"|\[\s*["\[]?')


def decode_text_or_tokens(raw: msgspec.Raw, field: str, count_max: int) -> TextOrTokens:
    """Decode a field: at most ``count_max`` texts or lists; an empty list is invalid.

    Raises InvalidRequest.
    """
    data = bytes(raw)
    found = _BEGINNING.match(data)
    beginning = b"" if found is None else b"".join(found[0].split())
    if not beginning:
        raise _invalid(field)
    form = _BY_BEGINNING[beginning]
    limit = TOKENS_MAX if beginning == b"[" else count_max
    # Check before decoding: a list takes two bytes in JSON, and sixty in memory.
    if beginning == b"[[" and data.count(b"[") > limit + 1:
        raise _too_many(field, limit, form.what)
    try:
        value: TextOrTokens = decode_field(form.decoder, raw, field, BODY_MAX)
    except InvalidRequest as error:
        raise _invalid(field) from error
    if not isinstance(value, str):
        if not value:
            raise _invalid(field)
        if len(value) > limit:
            raise _too_many(field, limit, form.what)
    return value


def _invalid(field: str) -> InvalidRequest:
    return InvalidRequest(
        f"{field}: expected a text, texts, tokens, or lists of tokens", field
    )


def _too_many(field: str, limit: int, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: more than {limit} {what}", field)
