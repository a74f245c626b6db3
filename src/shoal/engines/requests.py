"""Writes a job as the request that an OpenAI-compatible server takes.

Source: OpenAI API reference, "Create chat completion", "Create completion" and "Create
embeddings".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import JSON, Chat, Completion, Embedding, Inference
from shoal.engines.flavours import Flavour


@dataclass(frozen=True, slots=True)
class Request:
    """What is posted: the path below the base URL, and the body."""

    path: str
    body: bytes


def request_of(work: Inference, model: str) -> Request:
    """Return the job as a request to ``model``, streamed if it can be."""
    body: dict[str, object] = {**work.options, "model": model}
    match work:
        case Embedding():
            # The other form is far larger, and servers that do not know this one send
            # the other.
            body |= {"input": work.inputs, "encoding_format": "base64"}
            return Request("/embeddings", msgspec.json.encode(body))
        case Chat():
            path = "/chat/completions"
            body["messages"] = work.messages
        case Completion():
            path = "/completions"
            body["prompt"] = work.prompt
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    if work.max_tokens is not None:
        body["max_tokens"] = work.max_tokens
    if work.temperature is not None:
        body["temperature"] = work.temperature
    return Request(path, msgspec.json.encode(body))


def choices_in(options: Mapping[str, JSON]) -> int:
    """Return how many answers to each prompt are asked for."""
    n = options.get("n")
    return n if isinstance(n, int) and n > 1 else 1


def prompts_in(work: Inference) -> int:
    """Return how many prompts there are: a list of numbers is one, in tokens."""
    prompt = work.prompt if isinstance(work, Completion) else ""
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        texts = [part for part in prompt if not isinstance(part, int)]
        return max(1, len(texts))
    return 1


def refuse_ignored(work: Inference, flavour: Flavour) -> None:
    """Raise InvalidRequest for an option that the server would pass over in silence."""
    for option in flavour.ignores & work.options.keys():
        value = work.options[option]
        if value is True or value not in (None, False, "", 1, {}):
            raise InvalidRequest(f"{flavour.name} does not know {option!r}", option)
