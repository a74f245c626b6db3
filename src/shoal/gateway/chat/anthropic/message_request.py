"""Decodes the requests of Anthropic's Messages API.

Source: Anthropic's API reference, "Create a Message" and "Count tokens in a Message".
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from shoal.domain.credentials import estimated_tokens, tokens_to_read
from shoal.domain.options import CHAT_OPTIONS, SAMPLING_OPTIONS
from shoal.domain.work import JSON, Chat
from shoal.gateway.chat import messages
from shoal.gateway.chat.anthropic import message_body
from shoal.gateway.chat.anthropic.message_content import chat_messages
from shoal.gateway.chat.job_answers import GenerationRequest
from shoal.gateway.chat.options import foreign_options, requested_options, stop_strings
from shoal.gateway.http import decoding
from shoal.gateway.http.responses import encode_json
from shoal.gateway.jobs.job_options import SESSION_MAX

UNSUPPORTED: Mapping[str, tuple[JSON, ...]] = {
    "mcp_servers": ([],),
    "container": (),
    "thread": (),
}
"""Fields that only Anthropic's own servers can obey, with their neutral values."""

CUSTOM = (None, "custom", "function")
"""Types of tools that the client itself runs; all others need Anthropic's servers, or
models that were trained on them."""

SERVER_TOOLS = ("web_search_", "web_fetch_", "code_execution_")
"""What the types of tools begin with that only Anthropic's servers can run."""

SEARCH_TOOLS = "tool_search_tool_"
"""What the types of tools begin with that find other tools of the request.

They are left out: every tool is described to the model, as if it had been found.
"""

REASONING_EFFORTS = {
    "low": "low",
    "medium": "medium",
    "high": "high",
    # Engines reject what they do not know, and all know these three.
    "xhigh": "high",
    "max": "high",
}

THINKING_SWITCHES = {"enabled": True, "disabled": False}
"""Values for chat templates; for other types, the model decides."""


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """A request for a message; ``shows_thinking``: the reasoning is in the answer."""

    generation: GenerationRequest[Chat]
    shows_thinking: bool


@dataclass(frozen=True, slots=True)
class CountRequest:
    """A request to count tokens, and the count."""

    model: str
    tokens: int


_message_decoder = msgspec.json.Decoder(message_body.CreateMessage)
_count_decoder = msgspec.json.Decoder(message_body.CountMessageTokens)


def decode_message_request(data: bytes) -> MessageRequest:
    """Decode a body.

    Raises InvalidRequest naming the invalid field.
    """
    body: message_body.MessageBody = decoding.decode(_message_decoder, data)
    options = requested_options(body, SAMPLING_OPTIONS, {}) | _options(body)
    if stop := stop_strings(body.stop_sequences or []):
        options["stop"] = stop
    chat = Chat(
        body.model,
        chat_messages(body.system, body.messages),
        body.max_tokens,
        body.temperature,
        {**_in_order(options), **foreign_options(data, message_body.CreateMessage)},
    )
    generation = GenerationRequest(
        chat,
        stream=bool(body.stream),
        session=_user(body)[-SESSION_MAX:],  # the end of it names the session
        tier=body.service_tier or "",
        end_user=_user(body),
    )
    return MessageRequest(generation, _shows_thinking(body))


def decode_count_request(data: bytes) -> CountRequest:
    """Decode a body whose tokens are to be counted, and estimate their number.

    Raises InvalidRequest naming the invalid field.
    """
    body = decoding.decode(_count_decoder, data)
    given = chat_messages(body.system, body.messages)
    chat = Chat(body.model, given, options=_in_order(_options(body)))
    return CountRequest(chat.model, estimated_input_tokens(chat))


def _options(body: message_body.CountMessageTokens) -> dict[str, JSON]:
    """Return the options that both kinds of bodies have."""
    for field, harmless in UNSUPPORTED.items():
        if decoding.is_requested(getattr(body, field), harmless):
            raise decoding.unsupported(field)
    options = _tool_options(body.tools or [], body.tool_choice)
    output = body.output_config
    if output is not None and output.effort is not None:
        options["reasoning_effort"] = REASONING_EFFORTS[output.effort]
    given = output.format if output is not None else None
    field = "output_config.format"
    if given is None:
        given, field = body.output_format, "output_format"
    if given is not None:
        if not decoding.is_given(given.schema):
            raise decoding.missing(f"{field}.schema")
        schema = decoding.decode_object(given.schema, f"{field}.schema")
        named: JSON = {"name": "output", "schema": schema, "strict": True}
        options["response_format"] = {"type": "json_schema", "json_schema": named}
    if body.thinking is not None:
        switch = THINKING_SWITCHES.get(body.thinking.type)
        if switch is not None:
            options["chat_template_kwargs"] = {"enable_thinking": switch}
    return options


def _tool_options(
    tools: list[message_body.ToolParam], choice: message_body.ToolChoiceParam | None
) -> dict[str, JSON]:
    functions = [
        _function(tool, f"tools[{index}]")
        for index, tool in enumerate(tools)
        if not (tool.type or "").startswith(SEARCH_TOOLS)
    ]
    if not functions:
        if choice is not None and choice.type in ("any", "tool"):
            raise messages.no_tools()
        return {}
    options: dict[str, JSON] = {"tools": messages.function_tools(functions)}
    match choice:
        case message_body.ToolChoiceParam(type="any"):
            options["tool_choice"] = "required"
        case message_body.ToolChoiceParam(type="tool", name=str(name)):
            messages.check_chosen(name, [each.name for each in functions])
            options["tool_choice"] = messages.chosen_tool(name)
        case message_body.ToolChoiceParam(type="tool"):
            raise decoding.missing("tool_choice.name")
        case message_body.ToolChoiceParam(type="auto" | "none" as same):
            options["tool_choice"] = same
        case _:
            pass
    if choice is not None and choice.disable_parallel_tool_use:
        options["parallel_tool_calls"] = False
    return options


def _function(tool: message_body.ToolParam, at: str) -> messages.RequestedFunction:
    if tool.type not in CUSTOM:
        kind = tool.type or ""
        if kind.startswith(SERVER_TOOLS):
            kind += ", which Anthropic's servers run,"
        raise decoding.unsupported(f"{at}.type", kind)
    path = f"{at}.input_schema"
    if not decoding.is_given(tool.input_schema):
        raise decoding.missing(path)
    return messages.RequestedFunction(
        *(decoding.required(tool.name, f"{at}.name"), path, tool.input_schema),
        *(tool.description, tool.strict),
    )


def _in_order(options: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the options in the order of their table."""
    return {
        each.name: options[each.name] for each in CHAT_OPTIONS if each.name in options
    }


def _user(body: message_body.MessageBody) -> str:
    return (body.metadata.user_id if body.metadata is not None else None) or ""


def _shows_thinking(body: message_body.MessageBody) -> bool:
    """Say whether the client asked for the reasoning.

    Others expect the text in the first block of an answer.
    """
    thinking = body.thinking
    return (
        thinking is not None
        and thinking.type != "disabled"
        and thinking.display != "omitted"
    )


IMAGE_TOKENS = 1024  # of an image, whose size is unknown; models differ by far


def estimated_input_tokens(chat: Chat) -> int:
    """Return the estimated tokens of the texts, tools, calls and images of a chat.

    Only its worker could count them.  Texts count as they do for the limits of keys.
    """
    tools = chat.options.get("tools")
    described = [] if tools is None else [tools]
    images = 0
    for message in chat.messages:
        if (calls := message.get("tool_calls")) is not None:
            described.append(calls)
        content = message.get("content")
        if isinstance(content, list):
            images += sum(part.get("type") == "image_url" for part in content)
    written = sum(estimated_tokens(encode_json(each).decode()) for each in described)
    return tokens_to_read(chat) + written + images * IMAGE_TOKENS
