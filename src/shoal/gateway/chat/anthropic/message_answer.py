"""Anthropic's messages: one JSON object, or the events of a stream; and its errors.

Source: Anthropic's API reference, "Create a Message", "Streaming messages" and
"Errors"; for threads, what Anthropic's SDK for JavaScript 1.12 reads of an error
(``lib/internal/threads``).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from shoal.domain.credentials import usage_of
from shoal.domain.errors import ShoalError
from shoal.domain.ids import JobId
from shoal.domain.outcome import AnswerPiece, Outcome
from shoal.domain.work import Chat
from shoal.gateway.chat.answer_parts import (
    Part,
    PartBegun,
    PartEnded,
    PartEvent,
    PartGrown,
    PartKind,
    PartReader,
    call_arguments,
    parts_of,
)
from shoal.gateway.chat.anthropic.message_request import estimated_input_tokens
from shoal.gateway.chat.job_answers import AnswerForm
from shoal.gateway.chat.options import matched_stop
from shoal.gateway.http.errors import ErrorForm, ErrorReport, error_body
from shoal.gateway.http.ids import MESSAGE_ID_PREFIX
from shoal.gateway.http.responses import encode_event, encode_event_text, encode_json

TYPES: Mapping[int, str] = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",  # an operator cancelled the job
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types by status, beside those for all other statuses below and from 500."""

REQUEST_ERROR = "invalid_request_error"
SERVER_ERROR = "api_error"


THREAD = "thread"


class UnsupportedThread(msgspec.Struct, frozen=True):
    """Makes the tool runners of Anthropic's SDKs go on without a thread.

    A thread is a conversation that Anthropic's servers store.
    """

    error_code: Literal["thread_unsupported_request"] = "thread_unsupported_request"
    unsupported: list[str] = msgspec.field(default_factory=lambda: [THREAD])


class AnthropicErrorDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    type: str
    message: str
    details: UnsupportedThread | None = None


class AnthropicError(msgspec.Struct, frozen=True):
    error: AnthropicErrorDetail
    request_id: str | None = None
    type: Literal["error"] = "error"


def _body(report: ErrorReport) -> AnthropicError:
    other = REQUEST_ERROR if report.status < 500 else SERVER_ERROR
    kind = TYPES.get(report.status, other)
    details = UnsupportedThread() if report.param == THREAD else None
    detail = AnthropicErrorDetail(kind, report.message, details)
    return AnthropicError(detail, report.request_id or None)


ANTHROPIC_ERRORS = ErrorForm(AnthropicError, _body)


PING = b'event: ping\ndata: {"type":"ping"}\n\n'

UNPARSED = "INVALID_JSON"
"""The only field of a tool's input that the model wrote as something else than a JSON
object, as Anthropic's documentation of tools has it."""

STOP_REASONS: Mapping[str, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""  # not checked


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokens(msgspec.Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tokens; those of the input are without those that were in a cache.

    What the engine does not report is absent.
    """

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int | None = None
    output_tokens_details: ThinkingTokens | None = None


class AnsweredMessage(msgspec.Struct, frozen=True):
    id: str
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: str | None
    usage: MessageUsage
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


def message_form(chat: Chat, *, shows_thinking: bool) -> AnswerForm:
    """Return the encoders of the answer to a chat, with the reasoning or without it."""
    return AnswerForm(
        lambda job_id, outcome, created: encode_message(
            job_id, chat, outcome, shows_thinking=shows_thinking
        ),
        lambda job_id, created: MessageStreamEncoder(
            job_id, chat, shows_thinking=shows_thinking
        ),
        keepalive=PING,
    )


def encode_message(
    job_id: JobId, chat: Chat, outcome: Outcome, *, shows_thinking: bool
) -> bytes:
    """Encode a whole answer."""
    parts = parts_of(outcome, _call_prefix(job_id))
    reason, sequence = stop_reason(chat, outcome, parts)
    message = AnsweredMessage(
        MESSAGE_ID_PREFIX + job_id,
        chat.model,
        [
            _block(part)
            for part in parts
            if shows_thinking or part.kind is not PartKind.REASONING
        ],
        reason,
        _usage(chat, outcome),
        sequence,
    )
    return encode_json(message)


class MessageStreamEncoder:
    """Encodes one streamed answer; its blocks come one after the other."""

    def __init__(self, job_id: JobId, chat: Chat, *, shows_thinking: bool) -> None:
        self._id = MESSAGE_ID_PREFIX + job_id
        self._chat = chat
        self._shows_thinking = shows_thinking
        self._reader = PartReader(_call_prefix(job_id))
        self._begun = False
        self._block = -1  # the number of the open block, or the last one
        self._grown = b""  # what precedes its text in the event of a delta
        self._hidden = False  # whether the open part is not shown
        # Arguments of the open call that are not an object; None: they are, or no call.
        self._no_object: list[str] | None = None

    def encode(self, pieces: Sequence[AnswerPiece]) -> bytes:
        """Encode the events of the pieces."""
        return self._opening() + self._events(self._reader.read(pieces))

    def encode_end(self, outcome: Outcome) -> bytes:
        """Encode the end of the open block, the stop reason and the usage."""
        opening = self._opening()
        blocks = self._events(self._reader.end(outcome))
        reason, sequence = stop_reason(self._chat, outcome, self._reader.parts)
        end = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": _usage(self._chat, outcome),
        }
        stop = encode_event("message_stop", {"type": "message_stop"})
        return opening + blocks + encode_event("message_delta", end) + stop

    def encode_error(self, error: ShoalError) -> bytes:
        """Encode an error: no other event follows it."""
        body = error_body(error, ANTHROPIC_ERRORS)
        return self._opening() + encode_event("error", msgspec.Raw(body))

    def _opening(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        usage = MessageUsage(estimated_input_tokens(self._chat), 0)
        message = AnsweredMessage(self._id, self._chat.model, [], None, usage)
        start = {"type": "message_start", "message": message}
        return encode_event("message_start", start) + PING

    def _events(self, events: Iterable[PartEvent]) -> bytes:
        return b"".join([self._encoded(event) for event in events])

    def _encoded(self, event: PartEvent) -> bytes:
        match event:
            case PartBegun(part=part):
                return self._start(part)
            case PartGrown(text=text):
                if self._no_object is not None:
                    text = self._without_others(text)
                if self._hidden or not text:
                    return b""
                return self._grown + encode_event_text(text) + b"}}\n\n"
            case PartEnded(part=part):
                return self._stop(part)

    def _without_others(self, text: str) -> str:
        """Return text of arguments that begin as an object; hold others back.

        Clients parse what has come of an object, and fail at anything else.
        """
        assert self._no_object is not None, "a call is open"
        if not self._no_object:
            text = text.lstrip()
            if text.startswith("{"):
                self._no_object = None
                return text
        if text:
            self._no_object.append(text)
        return ""

    def _start(self, part: Part) -> bytes:
        self._no_object = [] if part.kind is PartKind.TOOL_CALL else None
        self._hidden = part.kind is PartKind.REASONING and not self._shows_thinking
        if self._hidden:
            return b""
        self._block += 1
        kind, field = _DELTAS[part.kind]
        self._grown = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta",'
            b'"index":%d,"delta":{"type":"%b","%b":' % (self._block, kind, field)
        )
        block: object = _block(part)
        if isinstance(block, ToolUseBlock):
            block = msgspec.structs.replace(block, input={})
        start = {"index": self._block, "content_block": block}
        return encode_event(
            "content_block_start", {"type": "content_block_start", **start}
        )

    def _stop(self, part: Part) -> bytes:
        if self._hidden:
            return b""
        rest = b""
        if self._no_object:
            unparsed = encode_json({UNPARSED: part.text}).decode()
            rest = self._grown + encode_event_text(unparsed) + b"}}\n\n"
        if part.kind is PartKind.REASONING:
            delta = {"type": "signature_delta", "signature": ""}
            rest = encode_event(
                "content_block_delta",
                {"type": "content_block_delta", "index": self._block, "delta": delta},
            )
        stop = {"type": "content_block_stop", "index": self._block}
        return rest + encode_event("content_block_stop", stop)


_DELTAS: Mapping[PartKind, tuple[bytes, bytes]] = {
    PartKind.TEXT: (b"text_delta", b"text"),
    PartKind.REFUSAL: (b"text_delta", b"text"),
    PartKind.REASONING: (b"thinking_delta", b"thinking"),
    PartKind.TOOL_CALL: (b"input_json_delta", b"partial_json"),
}
"""The type of the deltas of each kind of part, and their field with text."""


def stop_reason(
    chat: Chat, outcome: Outcome, parts: Sequence[Part]
) -> tuple[str, str | None]:
    """Return why an answer ended, in Anthropic's words, and at which stop sequence."""
    kinds = {part.kind for part in parts}
    reason = STOP_REASONS.get(outcome.finish_reason, "end_turn")
    if PartKind.REFUSAL in kinds:
        return "refusal", None
    if reason not in ("end_turn", "tool_use"):
        return reason, None
    # Clients run the calls of an answer only if its reason says that there are some.
    if PartKind.TOOL_CALL in kinds:
        return "tool_use", None
    fields = outcome.choices[0].fields if outcome.choices else {}
    sequence = matched_stop(chat, fields)
    return "end_turn" if sequence is None else "stop_sequence", sequence


def _block(part: Part) -> TextBlock | ThinkingBlock | ToolUseBlock:
    match part.kind:
        case PartKind.TEXT | PartKind.REFUSAL:
            return TextBlock(part.text)
        case PartKind.REASONING:
            return ThinkingBlock(part.text)
        case PartKind.TOOL_CALL:
            arguments = call_arguments(part.text)
            if arguments is None:
                arguments = {UNPARSED: part.text}
            return ToolUseBlock(part.call_id, part.name, arguments)


def _usage(chat: Chat, outcome: Outcome) -> MessageUsage:
    usage = usage_of(chat, outcome)
    thinking = usage.reasoning_tokens
    return MessageUsage(
        usage.prompt_tokens - (usage.cached_tokens or 0),
        usage.completion_tokens,
        usage.cached_tokens,
        None if thinking is None else ThinkingTokens(thinking),
    )


def _call_prefix(job_id: JobId) -> str:
    return f"toolu_{job_id}_"
