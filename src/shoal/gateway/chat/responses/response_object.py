"""The response object, as OpenAI's clients parse it.

Source: OpenAI's API reference, "The response object".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import msgspec

from shoal.domain.credentials import usage_of
from shoal.domain.errors import Cancelled, ShoalError
from shoal.domain.ids import JobId
from shoal.domain.outcome import Outcome
from shoal.domain.work import JSON, Chat
from shoal.gateway.chat.answer_parts import Part, PartKind, parts_of
from shoal.gateway.chat.logprobs import LogprobQueue
from shoal.gateway.chat.messages import Message
from shoal.gateway.chat.responses.body import ResponseFields
from shoal.gateway.chat.responses.items import items_of
from shoal.gateway.http.errors import CLIENT, LIMIT, QUOTA, error_report
from shoal.gateway.http.ids import RESPONSE_ID_PREFIX

ITEM_ID_PREFIXES: Mapping[PartKind, str] = {
    PartKind.REASONING: "rs_",
    PartKind.TEXT: "msg_",
    PartKind.REFUSAL: "msg_",
    PartKind.TOOL_CALL: "fc_",
}
"""The id of an item of the output is one of these, its job's id and its index."""

ResponseStatus: TypeAlias = Literal[
    "queued", "in_progress", "completed", "incomplete", "failed", "cancelled"
]
ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]

INCOMPLETE_REASONS: Mapping[str, str] = {
    "length": "max_output_tokens",
    "content_filter": "content_filter",
}
"""Why a response is incomplete, by the finish reasons that make it so."""

FAILURE_CODES: Mapping[str, str] = {
    CLIENT: "invalid_prompt",
    LIMIT: "rate_limit_exceeded",
    QUOTA: "rate_limit_exceeded",
}
"""OpenAI's codes of failed responses, by the types of errors; others are the type."""

CODES = frozenset({"context_length_exceeded", "insufficient_quota"})
"""Further codes, which OpenAI's reference leaves out and its clients read."""


class OutputText(msgspec.Struct, frozen=True, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: Sequence[Any] = []


class OutputRefusal(msgspec.Struct, frozen=True, tag="refusal"):
    refusal: str


class OutputMessage(msgspec.Struct, frozen=True, tag="message"):
    id: str
    status: ItemStatus
    content: list[OutputText | OutputRefusal]
    role: Literal["assistant"] = "assistant"


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text"):
    text: str


class SummaryText(msgspec.Struct, frozen=True, tag="summary_text"):
    text: str


class ReasoningItem(msgspec.Struct, frozen=True, tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: str | None = None


class FunctionCallItem(msgspec.Struct, frozen=True, tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem: TypeAlias = OutputMessage | ReasoningItem | FunctionCallItem


class ResponseFailure(msgspec.Struct, frozen=True):
    """Why a response failed: OpenAI's code, and as its type the one of other errors."""

    code: str
    message: str
    type: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """The tokens.  Clients require all details: those that are unknown count as 0."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens_details: OutputTokensDetails


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A response.  What was not asked for has OpenAI's default."""

    id: str
    created_at: int
    status: ResponseStatus
    model: str
    output: Sequence[OutputItem]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    usage: ResponseUsage | None
    instructions: str | None
    metadata: Mapping[str, str]
    previous_response_id: str | None
    background: bool
    store: bool
    max_output_tokens: int | None
    temperature: float
    top_p: Any
    top_logprobs: Any
    tools: list[Any]
    tool_choice: Any
    parallel_tool_calls: Any
    text: dict[str, Any]
    reasoning: dict[str, Any]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    service_tier: str
    truncation: str = "disabled"
    object: Literal["response"] = "response"


def item_id(job_id: JobId, index: int, kind: PartKind) -> str:
    """Return the id of an item of a job's response."""
    return f"{ITEM_ID_PREFIXES[kind]}{job_id}_{index}"


@dataclass(frozen=True, slots=True)
class ResponseDraft:
    """All that is known of a response before its job has ended."""

    job_id: JobId
    chat: Chat
    fields: ResponseFields
    stored: bool = True

    def response(
        self,
        status: ResponseStatus,
        output: Sequence[OutputItem] = (),
        *,
        error: ResponseFailure | None = None,
        outcome: Outcome | None = None,
    ) -> ResponseObject:
        """Return the response; ``outcome`` is that of a job that is done."""
        chat, fields, options = self.chat, self.fields, self.chat.options
        reason = None if outcome is None else incomplete_reason(outcome)
        return ResponseObject(
            id=self.id,
            created_at=fields.created_at,
            status=status,
            model=chat.model,
            output=output,
            error=error,
            incomplete_details=None if reason is None else IncompleteDetails(reason),
            usage=None if outcome is None else _usage(chat, outcome),
            instructions=fields.instructions_of(chat),
            metadata=fields.metadata,
            previous_response_id=fields.previous_response_id,
            background=fields.background,
            store=self.stored,
            max_output_tokens=chat.max_tokens,
            temperature=1.0 if chat.temperature is None else chat.temperature,
            top_p=options.get("top_p", 1.0),
            top_logprobs=options.get("top_logprobs", 0),
            tools=[_tool(tool) for tool in _list(options.get("tools"))],
            tool_choice=self._tool_choice(),
            parallel_tool_calls=options.get("parallel_tool_calls", True),
            text={
                "format": _format(options.get("response_format")),
                "verbosity": options.get("verbosity", "medium"),
            },
            reasoning={
                "effort": options.get("reasoning_effort"),
                "summary": fields.summary,
            },
            user=fields.user,
            safety_identifier=fields.safety_identifier,
            prompt_cache_key=fields.prompt_cache_key,
            service_tier=fields.service_tier or "default",
        )

    @property
    def id(self) -> str:
        """The id of the response."""
        return RESPONSE_ID_PREFIX + self.job_id

    @property
    def call_prefix(self) -> str:
        """The beginning of the ids of calls that the worker sent without one."""
        return f"call_{self.job_id}_"

    def answered(self, outcome: Outcome) -> ResponseObject:
        """Return the response of a job that is done."""
        reason = incomplete_reason(outcome)
        parts = parts_of(outcome, self.call_prefix)
        logprobs = LogprobQueue()
        logprobs.read_outcome(outcome)
        items: list[OutputItem] = []
        for index, part in enumerate(parts):
            tokens: Sequence[JSON] = ()
            if part.kind is PartKind.TEXT:
                logprobs.take(part.text)
                tokens = logprobs.end_part()
            whole = reason is None or index < len(parts) - 1
            items.append(
                self.item(index, part, "completed" if whole else "incomplete", tokens)
            )
        status: ResponseStatus = "completed" if reason is None else "incomplete"
        return self.response(status, items, outcome=outcome)

    def failed(
        self, error: ShoalError, output: Sequence[OutputItem] = ()
    ) -> ResponseObject:
        """Return the response of a job that ended with an error."""
        if isinstance(error, Cancelled):
            return self.response("cancelled", output)
        report = error_report(error)
        code = FAILURE_CODES.get(report.type, report.type)
        if report.code in CODES:
            code = report.code
        failure = ResponseFailure(code, report.message, report.code)
        return self.response("failed", output, error=failure)

    def item(
        self,
        index: int,
        part: Part,
        status: ItemStatus = "completed",
        logprobs: Sequence[JSON] = (),
    ) -> OutputItem:
        """Return the item of a part."""
        id_ = item_id(self.job_id, index, part.kind)
        match part.kind:
            case PartKind.TEXT:
                text = OutputText(part.text, logprobs=logprobs)
                return OutputMessage(id_, status, [text])
            case PartKind.REFUSAL:
                return OutputMessage(id_, status, [OutputRefusal(part.text)])
            case PartKind.REASONING if self.fields.summary is not None:
                return ReasoningItem(id_, status, [SummaryText(part.text)], [])
            case PartKind.REASONING:
                return ReasoningItem(id_, status, [], [ReasoningText(part.text)])
            case PartKind.TOOL_CALL:
                called = part.call_id, part.name, part.text
                return FunctionCallItem(id_, status, *called)

    def input_items(self) -> list[dict[str, Any]]:
        """Return the items of the input, the first first, without the instructions."""
        items = items_of(self.fields.input_of(self.chat))
        return [self._input_item(index, item) for index, item in enumerate(items)]

    def _input_item(self, index: int, item: Part | Message) -> dict[str, Any]:
        # "i": an id of the input is never one of the output.
        job_id = JobId(f"{self.job_id}_i")
        if isinstance(item, Part):
            found: dict[str, Any] = msgspec.to_builtins(
                replace(self, job_id=job_id).item(index, item)
            )
            return found
        if item.get("role") == "tool":
            return {
                "id": f"fco_{job_id}_{index}",
                "type": "function_call_output",
                "status": "completed",
                "call_id": item.get("tool_call_id"),
                "output": item.get("content"),
            }
        return {
            "id": item_id(job_id, index, PartKind.TEXT),
            "type": "message",
            "status": "completed",
            "role": item.get("role"),
            "content": [_input_part(part) for part in _content_parts(item)],
        }

    def _tool_choice(self) -> Any:
        choice: Any = self.chat.options.get("tool_choice", "auto")
        allowed = self.fields.allowed_tools
        if allowed is not None:
            tools = [{"type": "function", "name": name} for name in allowed]
            return {"type": "allowed_tools", "mode": choice, "tools": tools}
        if isinstance(choice, Mapping):
            return {"type": "function", "name": choice["function"]["name"]}
        return choice


def incomplete_reason(outcome: Outcome) -> str | None:
    """Return why a response is incomplete; None if it is complete."""
    return INCOMPLETE_REASONS.get(outcome.finish_reason)


def _usage(chat: Chat, outcome: Outcome) -> ResponseUsage:
    usage = usage_of(chat, outcome)
    return ResponseUsage(
        *(usage.prompt_tokens, usage.completion_tokens, usage.tokens),
        InputTokensDetails(usage.cached_tokens or 0),
        OutputTokensDetails(usage.reasoning_tokens or 0),
    )


def _tool(tool: JSON) -> dict[str, Any]:
    """Return a tool in the form of this API, from that of a chat."""
    assert isinstance(tool, Mapping), "every tool is a function"
    function: Any = tool.get("function")
    return {
        "type": "function",
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
        "strict": function.get("strict"),
    }


def _format(format: JSON) -> dict[str, Any]:
    """Return the format of the text in the form of this API."""
    if not isinstance(format, Mapping):
        return {"type": "text"}
    schema: Any = format.get("json_schema", {})
    described = {"schema": {}, **schema} if "json_schema" in format else {}
    return {"type": format["type"], **described}


def _list(value: JSON) -> Sequence[JSON]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _content_parts(message: Message) -> Sequence[JSON]:
    content = message.get("content")
    return [content] if isinstance(content, str) else _list(content)


def _input_part(part: JSON) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "input_text", "text": part}
    assert isinstance(part, Mapping), "a part is a text or an object"
    image: Any = part.get("image_url")
    if image is None:
        return {"type": "input_text", "text": part.get("text")}
    return {
        "type": "input_image",
        "image_url": image["url"],
        "detail": image.get("detail", "auto"),
    }
