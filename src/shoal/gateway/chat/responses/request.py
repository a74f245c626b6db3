"""Decodes requests for responses.

Source: OpenAI's API reference, "Create a model response".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import JSON, Chat
from shoal.gateway.chat.answer_parts import Part
from shoal.gateway.chat.messages import (
    MESSAGES_MAX,
    Message,
    RequestedFunction,
    check_chosen,
    chosen_tool,
    function_tools,
    no_tools,
)
from shoal.gateway.chat.options import foreign_options, requested_options, stop_strings
from shoal.gateway.chat.responses.body import (
    RESPONSE_OPTIONS,
    CreateResponse,
    ResponseBody,
    ResponseFields,
    ResponseFunction,
    ResponseTextFormat,
    ResponseToolChoice,
)
from shoal.gateway.chat.responses.items import (
    InputItem,
    ItemReference,
    decode_item,
    messages_of,
)
from shoal.gateway.http import decoding

UNSUPPORTED: Mapping[str, tuple[JSON, ...]] = {
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
}
"""Fields that Shoal does not support, with their neutral values.

A request for one is an error: an answer that ignored it would be wrong.
"""

LEFT_OUT = frozenset({"namespace", "web_search"})
"""Types of tools that Codex always offers, and a model can do without."""

LOGPROBS = "message.output_text.logprobs"

_decoder = msgspec.json.Decoder(CreateResponse)


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A request for a response.

    ``items`` are the input without that of the previous response.  ``fields`` are what
    is returned with the answer; a response that is not to be ``stored`` is found by no
    later request.
    """

    model: str
    items: Sequence[InputItem]
    instructions: str | None
    max_tokens: int | None
    temperature: float | None
    options: Mapping[str, JSON]
    fields: ResponseFields
    stream: bool = False
    stored: bool = True
    left_out: Sequence[str] = ()  # as in ``JobTerms``

    @property
    def references(self) -> Sequence[ItemReference]:
        """The references to items of earlier responses."""
        return [item for item in self.items if isinstance(item, ItemReference)]

    def chat(
        self, earlier: Sequence[Message] = (), found: Mapping[str, Part] | None = None
    ) -> Chat:
        """Return the chat that answers the request.

        ``earlier`` are the messages of the previous response and its answer, and
        ``found`` has the parts that the references name.

        Raises InvalidRequest.
        """
        parts = found or {}
        items = [
            parts[item.id] if isinstance(item, ItemReference) else item
            for item in self.items
        ]
        messages = [*earlier, *messages_of(items)]
        if not messages:
            raise InvalidRequest("input: there is no message in it", "input")
        if len(messages) > MESSAGES_MAX:
            text = f"previous_response_id: more than {MESSAGES_MAX} messages with it"
            raise InvalidRequest(text, "previous_response_id")
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        return Chat(
            *(self.model, tuple(messages), self.max_tokens, self.temperature),
            self.options,
        )


def decode_response_request(data: bytes, created: int) -> ResponseRequest:
    """Decode a body; ``created`` is in Unix seconds.

    Raises InvalidRequest naming the invalid field.
    """
    body: ResponseBody = decoding.decode(_decoder, data)
    _check_supported(body)
    body, left_out = _without_left_out(body)
    options = {**_options(body), **foreign_options(data, CreateResponse)}
    if isinstance(body.input, str):
        items: list[InputItem] = [{"role": "user", "content": body.input}]
    else:
        items = [
            part
            for index, item in enumerate(body.input)
            for part in decode_item(item, f"input[{index}]")
        ]
    return ResponseRequest(
        body.model,
        items,
        body.instructions or None,
        body.max_output_tokens,
        body.temperature,
        options,
        ResponseFields(
            created,
            instructed=bool(body.instructions),
            background=bool(body.background),
            previous_response_id=body.previous_response_id or None,
            allowed_tools=_allowed(body.tool_choice),
            summary=body.reasoning.summary if body.reasoning else None,
            metadata=body.metadata or {},
            user=body.user,
            safety_identifier=body.safety_identifier,
            prompt_cache_key=body.prompt_cache_key,
            service_tier=body.service_tier,
        ),
        bool(body.stream),
        body.store is not False,
        left_out,
    )


def _without_left_out(body: ResponseBody) -> tuple[ResponseBody, Sequence[str]]:
    """Return the request without tools that only OpenAI has, and what these are.

    The model need not call them unless there is no other and it must call one.
    """
    given = body.tools or []
    tools = [tool for tool in given if tool.type not in LEFT_OUT]
    types = sorted({tool.type for tool in given} & LEFT_OUT)
    left_out = [f"tools: those of the types {', '.join(types)}"] if types else []
    return msgspec.structs.replace(body, tools=tools), left_out


def _check_supported(body: ResponseBody) -> None:
    for field, harmless in UNSUPPORTED.items():
        if decoding.is_requested(getattr(body, field), harmless):
            raise decoding.unsupported(field)
    if body.truncation == "auto":
        raise decoding.unsupported("truncation", body.truncation)
    if body.background and body.store is False:
        raise InvalidRequest("background: needs store to be true", "background")


def _options(body: ResponseBody) -> Mapping[str, JSON]:
    options = requested_options(body, RESPONSE_OPTIONS, {})
    parallel = options.pop("parallel_tool_calls", None)
    if body.stop:
        options["stop"] = stop_strings(body.stop)
    if LOGPROBS in (body.include or ()) or options.get("top_logprobs"):
        options["logprobs"] = True
    if body.reasoning is not None and body.reasoning.effort is not None:
        options["reasoning_effort"] = body.reasoning.effort
    if body.text is not None:
        if body.text.verbosity is not None:
            options["verbosity"] = body.text.verbosity
        format = None if body.text.format is None else _format(body.text.format)
        if format is not None:
            options["response_format"] = format
    return {**options, **_tool_options(body, parallel)}


def _tool_options(body: ResponseBody, parallel: JSON) -> Mapping[str, JSON]:
    """Return the options about tools: none if there are no tools."""
    tools, choice = body.tools or [], body.tool_choice
    names = [_function_name(tool, index) for index, tool in enumerate(tools)]
    allowed = _allowed(choice)
    if isinstance(choice, ResponseToolChoice):
        if allowed is None and choice.type != "function":
            raise decoding.unsupported("tool_choice.type", choice.type[:40])
        for name in [choice.name or ""] if allowed is None else allowed:
            check_chosen(name, names)
    if not tools:
        if choice == "required":
            raise no_tools()
        return {}
    options: dict[str, JSON] = {}
    if isinstance(choice, ResponseToolChoice):
        options["tool_choice"] = (
            chosen_tool(choice.name or "") if allowed is None else choice.mode
        )
    elif choice is not None:
        options["tool_choice"] = choice
    if parallel is not None:
        options["parallel_tool_calls"] = parallel
    functions = [
        RequestedFunction(
            *(name, f"tools[{index}].parameters", tool.parameters),
            *(tool.description, tool.strict),
        )
        for index, (tool, name) in enumerate(zip(tools, names, strict=True))
    ]
    options["tools"] = [
        function
        for function, name in zip(function_tools(functions), names, strict=True)
        if allowed is None or name in allowed
    ]
    return options


def _allowed(choice: str | ResponseToolChoice | None) -> list[str] | None:
    """Return the names of the allowed functions, if the choice limits them.

    Raises InvalidRequest.
    """
    if not isinstance(choice, ResponseToolChoice) or choice.type != "allowed_tools":
        return None
    for index, tool in enumerate(choice.tools):
        if tool.type != "function":
            raise decoding.unsupported(
                f"tool_choice.tools[{index}].type", tool.type[:40]
            )
    names = [tool.name or "" for tool in choice.tools]
    if not names:
        field = "tool_choice.tools"
        raise InvalidRequest(f"{field}: name at least one tool", field)
    return names


def _function_name(tool: ResponseFunction, index: int) -> str:
    if tool.type != "function":
        raise decoding.unsupported(f"tools[{index}].type", tool.type[:40])
    if not tool.name:
        raise decoding.missing(f"tools[{index}].name")
    return tool.name


def _format(format: ResponseTextFormat) -> JSON:
    """Return the format as a chat has it; None for plain text."""
    given = format.schema
    path = "text.format.schema"
    decoded = decoding.decode_object(given, path) if decoding.is_given(given) else None
    if format.type != "json_schema":
        return None if format.type == "text" else {"type": format.type}
    if not format.name:
        raise decoding.missing("text.format.name")
    schema: dict[str, JSON] = {"name": format.name}
    if format.description is not None:
        schema["description"] = format.description
    if format.strict is not None:
        schema["strict"] = format.strict
    if decoded is not None:
        schema["schema"] = decoded
    return {"type": format.type, "json_schema": schema}
