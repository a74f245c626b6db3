"""Decodes OpenAI's older completion requests.

Source: OpenAI's API reference, "Create completion".
"""

import msgspec
from msgspec import UNSET, UnsetType

from shoal.domain.errors import InvalidRequest
from shoal.domain.options import COMPLETION_OPTIONS
from shoal.domain.work import JSON, Completion
from shoal.gateway.chat import inputs
from shoal.gateway.chat.job_answers import GenerationRequest
from shoal.gateway.chat.openai.chat_request import StreamOptions
from shoal.gateway.chat.options import (
    StopStrings,
    body_type,
    extra_options,
    requested_options,
    stop_strings,
)
from shoal.gateway.http import decoding

PROMPTS_MAX = 128  # prompts in one request


class CompletionBody(msgspec.Struct, frozen=True):
    """A completion request; unknown fields go to the engine."""

    # Its other options are added from the table ``COMPLETION_OPTIONS``.

    model: decoding.ModelName
    prompt: inputs.RawTextOrTokens
    max_tokens: decoding.TokenCount | None = None
    temperature: decoding.Temperature | None = None
    stop: StopStrings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: decoding.EndUser | UnsetType = UNSET


CreateCompletion = body_type("CreateCompletion", CompletionBody, COMPLETION_OPTIONS)


_decoder = msgspec.json.Decoder(CreateCompletion)


def decode_completion_request(data: bytes) -> GenerationRequest[Completion]:
    """Decode a body.

    Raises InvalidRequest naming the invalid field.
    """
    body: CompletionBody = decoding.decode(_decoder, data, inputs.BODY_VALUES_MAX)
    options = requested_options(body, COMPLETION_OPTIONS, {"stop": stop_strings})
    options |= extra_options(data, CreateCompletion)
    _check_best_of(options, streamed=bool(body.stream))
    streaming = body.stream_options
    return GenerationRequest(
        Completion(
            body.model, _prompt(body.prompt), body.max_tokens, body.temperature, options
        ),
        bool(body.stream),
        streaming is not None and bool(streaming.include_usage),
        end_user=decoding.end_user(body.user),
    )


def _check_best_of(options: dict[str, JSON], *, streamed: bool) -> None:
    """Drop the option if it asks for no more than ``n``, as without it.

    Raises InvalidRequest if it cannot be obeyed.
    """
    best_of, count = options.get("best_of"), options.get("n", 1)
    if not (isinstance(best_of, int) and isinstance(count, int)):
        return
    if best_of < count:
        raise InvalidRequest("best_of: expected at least n", "best_of")
    if best_of == count:
        del options["best_of"]
    elif streamed:
        raise InvalidRequest("best_of: cannot be streamed", "best_of")


def _prompt(raw: msgspec.Raw) -> JSON:
    """Decode the prompt; a list of one text is that text."""
    prompt = inputs.decode_text_or_tokens(raw, "prompt", PROMPTS_MAX)
    if not isinstance(prompt, str) and len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0]
    return prompt
