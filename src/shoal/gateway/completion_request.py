"""OpenAI's older completion request: JSON in, a text to be gone on with out.

Source: OpenAI's API reference, "Create completion".
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import Completion
from shoal.gateway.chat_request import StreamOptions
from shoal.gateway.decoding import (
    Bias,
    Choices,
    Name,
    Penalty,
    Seed,
    Share,
    Stops,
    Temperature,
    Tokens,
    decode,
    options_of,
    stops_of,
)

PROMPTS_MAX = 128  # texts to be gone on with in one request
TOKEN_IDS_MAX = 1 << 20

PASSED_ON = (
    *("top_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("n", "best_of", "echo", "suffix", "logprobs"),
    *("top_k", "min_p", "repetition_penalty", "repeat_penalty"),
)

TokenIds = Annotated[list[int], Meta(max_length=TOKEN_IDS_MAX)]


class CreateCompletion(msgspec.Struct, frozen=True):
    """The body.  Fields that are not here are ignored, as OpenAI's clients expect."""

    model: Name
    # A text, several texts, tokens, or several lists of tokens: checked by hand, as
    # msgspec takes one kind of list in a union.
    prompt: Any
    max_tokens: Tokens | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None
    stop: Stops | None = None
    n: Choices | None = None
    best_of: Choices | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(ge=0, le=10)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0, le=10)] | None = None


class CompletionRequest(msgspec.Struct, frozen=True):
    """What a client asked for."""

    work: Completion
    stream: bool = False
    include_usage: bool = False
    session: str = ""
    tier: str = ""


_decoder = msgspec.json.Decoder(CreateCompletion)


def decode_completion_request(data: bytes) -> CompletionRequest:
    """Decode a body.

    Raises InvalidRequest naming the field that is no good.
    """
    body = decode(_decoder, data)
    if (body.best_of or 1) < (body.n or 1):
        raise InvalidRequest("best_of: expected at least n", "best_of")
    if (body.best_of or 1) > 1 and body.stream:
        raise InvalidRequest("best_of: cannot be streamed", "best_of")
    options = options_of(body, PASSED_ON)
    if stops := stops_of(body.stop):
        options["stop"] = stops
    for field, nothing in (("n", 1), ("best_of", 1), ("echo", False), ("suffix", "")):
        if options.get(field) == nothing:
            options.pop(field, None)
    if not options.get("logit_bias"):
        options.pop("logit_bias", None)
    streaming = body.stream_options
    return CompletionRequest(
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


def _prompt(prompt: Any) -> Any:
    """Check the prompt; a list of one text is that text."""
    match prompt:
        case str():
            return prompt
        case [str() as text]:
            return text
        case [str(), *_] if all(isinstance(each, str) for each in prompt):
            limit, what = PROMPTS_MAX, "texts"
        case [int(), *_] if _are_tokens(prompt):
            limit, what = TOKEN_IDS_MAX, "tokens"
        case [[*_], *_] if all(isinstance(p, list) and _are_tokens(p) for p in prompt):
            limit, what = PROMPTS_MAX, "lists of tokens"
        case _:
            raise InvalidRequest(
                "prompt: expected a text, texts, tokens, or lists of tokens", "prompt"
            )
    if len(prompt) > limit:
        raise InvalidRequest(f"prompt: more than {limit} {what}", "prompt")
    return prompt


def _are_tokens(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 2**31 for value in values)
