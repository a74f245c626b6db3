"""OpenAI's older completion request: JSON in, a text to be gone on with out.

Source: OpenAI's API reference, "Create completion".
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import JSON, Completion
from shoal.gateway.http.body import BODY_MAX
from shoal.gateway.http.decoding import (
    ChoiceCount,
    Ignored,
    LogitBias,
    ModelName,
    Penalty,
    Probability,
    Seed,
    StopStrings,
    Temperature,
    TokenCount,
    decode,
    decode_field,
    given_options,
    stop_strings,
)
from shoal.gateway.openai.chat_body import StreamOptions

PROMPTS_MAX = 128  # texts to be gone on with in one request
TOKEN_IDS_MAX = 1 << 20

PASSED_THROUGH = (
    *("top_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("n", "best_of", "echo", "suffix", "logprobs"),
    *("top_k", "min_p", "repetition_penalty", "repeat_penalty"),
)

Token = Annotated[int, Meta(ge=0, lt=2**31)]


@dataclass(frozen=True, slots=True)
class PromptForm:
    """One of the forms that a prompt may have: so many at most, called ``what``."""

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
"""By how they begin: msgspec takes one kind of list in a union."""

_BEGINNING = re.compile(rb'"|\[\s*["\[]?')


class CreateCompletion(msgspec.Struct, frozen=True):
    """The body.  Fields that are not here are ignored, as OpenAI's clients expect."""

    model: ModelName
    prompt: msgspec.Raw  # one of FORMS
    max_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | UnsetType = UNSET
    stop: StopStrings | None = None
    n: ChoiceCount | None = None
    best_of: ChoiceCount | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Ignored | UnsetType = UNSET
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(ge=0, le=10)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0, le=10)] | None = None


class TextCompletionRequest(msgspec.Struct, frozen=True):
    """What a client asked for."""

    work: Completion
    stream: bool = False
    include_usage: bool = False
    session: str = ""
    tier: str = ""


_decoder = msgspec.json.Decoder(CreateCompletion)


def decode_completion_request(data: bytes) -> TextCompletionRequest:
    """Decode a body.

    Raises InvalidRequest naming the field that is no good.
    """
    body = decode(_decoder, data)
    if (body.best_of or 1) < (body.n or 1):
        raise InvalidRequest("best_of: expected at least n", "best_of")
    if (body.best_of or 1) > 1 and body.stream:
        raise InvalidRequest("best_of: cannot be streamed", "best_of")
    options = given_options(body, PASSED_THROUGH)
    if stops := stop_strings(body.stop):
        options["stop"] = stops
    for field, nothing in (("n", 1), ("best_of", 1), ("echo", False), ("suffix", "")):
        if options.get(field) == nothing:
            options.pop(field, None)
    if not options.get("logit_bias"):
        options.pop("logit_bias", None)
    streaming = body.stream_options
    return TextCompletionRequest(
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


def _prompt(raw: msgspec.Raw) -> JSON:
    """Decode the prompt by how it begins; a list of one text is that text."""
    data = bytes(raw)
    found = _BEGINNING.match(data)
    beginning = b"" if found is None else b"".join(found[0].split())
    if not beginning:
        raise _no_prompt()
    form = PROMPT_FORMS[beginning]
    # Before they are made: a list takes two bytes here, and sixty in memory.
    if beginning == b"[[" and data.count(b"[") > form.limit + 1:
        raise form.too_many()
    try:
        prompt = decode_field(form.decoder, raw, "prompt", BODY_MAX)
    except InvalidRequest as error:
        raise _no_prompt() from error
    if isinstance(prompt, str):
        return prompt
    if not prompt:
        raise _no_prompt()
    if len(prompt) > form.limit:
        raise form.too_many()
    first = prompt[0]
    return first if isinstance(first, str) and len(prompt) == 1 else prompt


def _no_prompt() -> InvalidRequest:
    return InvalidRequest(
        "prompt: expected a text, texts, tokens, or lists of tokens", "prompt"
    )
