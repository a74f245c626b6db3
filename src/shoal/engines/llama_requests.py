"""Adapts a job to the embedded engine, or refuses what its server would ignore."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import (
    JSON,
    Completion,
    Feature,
    Inference,
    InputWork,
    message_text,
)

KNOWN_PARTS = frozenset({"text", "image_url", "input_audio"})
LACKING = {
    Feature.TOOLS: ("calls no tools: its chat template has none", "tools"),
    Feature.IMAGES: ("reads no images", "messages"),
    Feature.AUDIO: ("hears no audio", "messages"),
}
"""What a model without the feature cannot do, and the field that asks for it."""


def plain_work(work: Inference, features: Set[Feature]) -> Inference:
    """Return the job as llama.cpp's server should see it.

    Raises InvalidRequest if a model with these ``features`` cannot do it.
    """
    if isinstance(work, InputWork):
        return work
    for feature, (fault, field) in LACKING.items():
        if feature in work.needs - features:
            raise InvalidRequest(f"this model {fault}", field)
    if work.options.get("logprobs") is True and "top_logprobs" not in work.options:
        # llama.cpp's default is 20.
        work = replace(work, options={**work.options, "top_logprobs": 1})
    if isinstance(work, Completion):
        return work
    return replace(work, messages=tuple(map(plain_message, work.messages)))


def plain_message(message: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Return the message with its parts joined to one text, if all of them are texts.

    llama.cpp would join them by line breaks.

    Raises InvalidRequest if llama.cpp would have to fetch a part, or does not know it.
    """
    content = message.get("content")
    if not isinstance(content, Sequence) or isinstance(content, str):
        return message
    kinds = {part.get("type") for part in content if isinstance(part, Mapping)}
    if unknown := kinds - KNOWN_PARTS:
        raise InvalidRequest(f"no model reads {unknown.pop()!r:.40}", "messages")
    if kinds == {"text"}:
        return {**message, "content": message_text(message)}
    for part in content:
        image = part.get("image_url") if isinstance(part, Mapping) else None
        url = image.get("url") if isinstance(image, Mapping) else None
        if url is not None and not str(url).startswith("data:"):
            raise InvalidRequest(
                "the embedded engine fetches no images: send a data: URL", "messages"
            )
    return message
