"""Writes a job as the request that llama.cpp takes in the embedded engine."""

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import JSON, Chat, Completion, Embedding, Inference, text_of

# What the engine decides; an option of that name would contradict it.
OURS = frozenset(
    {
        *("messages", "prompt", "input", "model", "stream", "stream_options"),
        *("temperature", "max_tokens", "max_completion_tokens", "n_predict"),
        *("add_generation_prompt", "continue_final_message", "return_progress"),
        *("encoding_format",),
    }
)
# What llama.cpp passes over in silence, so that it would answer another request.
IGNORED = ("tools", "functions", "echo", "suffix", "best_of", "dimensions")


def request_of(work: Inference) -> dict[str, Any]:
    """Return the job as llama.cpp wants it, but for its limit of tokens.

    Raises InvalidRequest for what it cannot do.
    """
    for option in IGNORED:
        if work.options.get(option) not in (None, False, "", []):
            raise InvalidRequest(
                f"the embedded engine does not know {option!r}", option
            )
    request: dict[str, Any] = {
        name: value for name, value in work.options.items() if name not in OURS
    }
    match work:
        case Embedding():
            return request | {"input": list(work.inputs), "encoding_format": "base64"}
        case Chat():
            request["messages"] = [plain(message) for message in work.messages]
        case Completion():
            request["prompt"] = work.prompt
    if work.options.get("logprobs") is True:
        request.setdefault("top_logprobs", 1)  # its own default is 20
    if work.temperature is not None:
        request["temperature"] = work.temperature
    return request


def plain(message: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the message with its parts joined to one text.

    Raises InvalidRequest if a part is none: to leave it out would answer another
    question.
    """
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else part
            if kind != "text":
                raise InvalidRequest(
                    f"this model reads text only, and not {kind!r:.40}", "messages"
                )
    return {**message, "content": text_of(message)}
