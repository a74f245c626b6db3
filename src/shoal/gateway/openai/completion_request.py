"""Decodes OpenAI's older completion requests.

Source: OpenAI's API reference, "Create completion".
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shoal.domain.errors import InvalidRequest
from shoal.domain.json_limits import VALUES_MAX
from shoal.domain.options import COMPLETION_OPTIONS
from shoal.domain.work import JSON, Completion
from shoal.gateway.generation.options import (
    StopStrings,
    body_type,
    requested_options,
    stop_strings,
)
from shoal.gateway.generation.request import GenerationRequest
from shoal.gateway.http.body import BODY_MAX
from shoal.gateway.http.decoding import (
    Ignored,
    ModelName,
    Temperature,
    TokenCount,
    decode,
    decode_field,
)
from shoal.gateway.openai.generation import StreamOptions

PROMPTS_MAX = 128  # prompts in one request
TOKEN_IDS_MAX = 1 << 20

Token = Annotated[int, Meta(ge=0, lt=2**31)]


@dataclass(frozen=True, slots=True)
class PromptForm:
    """A form of a prompt: at most ``limit`` of ``what``."""

    decoder: msgspec.json.Decoder[Any]
    limit: int
    what: str

    def too_many(self) -> InvalidRequest:
        return InvalidRequest(f"prompt: more than {self.limit} {self.what}", "prompt")


PROMPT_FORMS = {
    b'"': PromptForm(msgspec.json.Decoder(str), 1, "text"),
    b'["': PromptForm(msgspec.json.Decoder(list[str]), PROMPTS_MAX, "texts"),
    b"[": PromptForm(msgspec.json.Decoder(list[Token]), TOKEN_IDS_MAX, "tokens"),
    b"[[": PromptForm(
        msgspec.json.Decoder(list[list[Token]]), PROMPTS_MAX, "lists of tokens"
    ),
}
"""Forms by their first characters: msgspec allows one list type in a union."""

_BEGINNING = re.compile(rb'"|\[\s*["\[]?')


class CompletionBody(msgspec.Struct, frozen=True):
    """A completion request; unknown fields are ignored, as clients expect."""

    # Its other options are added from the table ``COMPLETION_OPTIONS``.

    model: ModelName
    prompt: msgspec.Raw  # one of PROMPT_FORMS
    max_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    stop: StopStrings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Ignored | UnsetType = UNSET


CreateCompletion = body_type("CreateCompletion", CompletionBody, COMPLETION_OPTIONS)


_decoder = msgspec.json.Decoder(CreateCompletion)


def decode_completion_request(data: bytes) -> GenerationRequest[Completion]:
    """Decode a body.

    Raises InvalidRequest naming the invalid field.
    """
    body: CompletionBody = decode(_decoder, data, TOKEN_IDS_MAX + VALUES_MAX)
    options = requested_options(body, COMPLETION_OPTIONS, {"stop": stop_strings})
    best_of = _count(options, "best_of")
    if best_of < _count(options, "n"):
        raise InvalidRequest("best_of: expected at least n", "best_of")
    if best_of > 1 and body.stream:
        raise InvalidRequest("best_of: cannot be streamed", "best_of")
    streaming = body.stream_options
    return GenerationRequest(
        Completion(
            body.model,
            _prompt(body.prompt),
            body.max_tokens,
            body.temperature,
            options,
        ),
        bool(body.stream),
        streaming is not None and bool(streaming.include_usage),
    )


def _count(options: Mapping[str, JSON], name: str) -> int:
    value = options.get(name)
    return value if isinstance(value, int) else 1


def _prompt(raw: msgspec.Raw) -> JSON:
    """Decode the prompt by its first characters; a list of one text is that text."""
    data = bytes(raw)
    found = _BEGINNING.match(data)
    beginning = b"" if found is None else b"".join(found[0].split())
    if not beginning:
        raise _invalid_prompt()
    form = PROMPT_FORMS[beginning]
    # Check before decoding: a list takes two bytes in JSON, and sixty in memory.
    if beginning == b"[[" and data.count(b"[") > form.limit + 1:
        raise form.too_many()
    try:
        prompt = decode_field(form.decoder, raw, "prompt", BODY_MAX)
    except InvalidRequest as error:
        raise _invalid_prompt() from error
    if isinstance(prompt, str):
        return prompt
    if not prompt:
        raise _invalid_prompt()
    if len(prompt) > form.limit:
        raise form.too_many()
    first = prompt[0]
    return first if isinstance(first, str) and len(prompt) == 1 else prompt


def _invalid_prompt() -> InvalidRequest:
    return InvalidRequest(
        "prompt: expected a text, texts, tokens, or lists of tokens", "prompt"
    )
