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
from shoal.engines.schemas.plain_schema import plain_schema

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
    return replace(
        work,
        messages=tuple(map(plain_message, work.messages)),
        options=plain_options(work.options),
    )


def plain_options(options: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Return the options with schemas that llama.cpp obeys.

    Those of tools are only adapted if they are strict: others are best effort.

    Raises InvalidRequest naming a part of a schema that it would ignore.
    """
    found = dict(options)
    if isinstance(form := found.get("response_format"), Mapping):
        found["response_format"] = _plain_format(form)
    tools = found.get("tools")
    if isinstance(tools, Sequence) and not isinstance(tools, str):
        found["tools"] = [_plain_tool(tool, index) for index, tool in enumerate(tools)]
    return found


def _plain_format(form: Mapping[str, JSON]) -> JSON:
    described, path = form.get("json_schema"), "response_format"
    if not isinstance(described, Mapping):
        return _with_plain_schema(form, "schema", path)
    path = f"{path}.json_schema"
    return {**form, "json_schema": _with_plain_schema(described, "schema", path)}


def _plain_tool(tool: JSON, index: int) -> JSON:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or not isinstance(function, Mapping):
        return tool
    if function.get("strict") is not True:
        return tool
    path = f"tools[{index}].function"
    return {**tool, "function": _with_plain_schema(function, "parameters", path)}


def _with_plain_schema(
    described: Mapping[str, JSON], name: str, path: str
) -> Mapping[str, JSON]:
    schema = described.get(name)
    if schema is None:
        return described
    return {**described, name: plain_schema(schema, f"{path}.{name}")}


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
