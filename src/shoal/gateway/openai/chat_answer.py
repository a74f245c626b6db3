"""OpenAI's chat answers: one JSON object, or chunks as server-sent events.

Source: OpenAI's API reference, "The chat completion object" and "The chat completion
chunk object".
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from shoal.domain.errors import ShoalError
from shoal.domain.ids import JobId
from shoal.domain.outcome import AnswerPiece, Choice, Delta, Outcome
from shoal.domain.work import JSON, Chat
from shoal.gateway.generation.logprobs import chat_logprobs
from shoal.gateway.generation.options import matched_stop
from shoal.gateway.http.ids import CHAT_ID_PREFIX
from shoal.gateway.http.responses import encode_event_text, encode_json
from shoal.gateway.openai.generation import (
    FINISH_REASONS,
    ChunkFrame,
    CompletionUsage,
    StopReasons,
    completion_usage,
    encode_stream_error,
)

CHAT_FINISH_REASONS = FINISH_REASONS | {"tool_calls"}

SHOWN = ("reasoning_content", "content", "refusal", "tool_calls")
"""The fields of a piece that clients get; engines send others in forms of their own."""


class ChatCompletionMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    content: str | None
    refusal: str | None
    role: str
    reasoning_content: str | None = None
    tool_calls: Any = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatCompletionMessage
    finish_reason: str
    logprobs: Any = None
    stop_reason: str | UnsetType = UNSET  # as vLLM has it


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    object: Literal["chat.completion"] = "chat.completion"


def encode_chat_completion(
    job_id: JobId, chat: Chat, outcome: Outcome, created: int
) -> bytes:
    """Encode a whole answer; ``created`` is in Unix seconds."""
    choices = outcome.choices or (
        Choice({"content": outcome.text}, outcome.finish_reason),
    )
    answer = ChatCompletion(
        CHAT_ID_PREFIX + job_id,
        created,
        chat.model,
        [_choice(chat, index, choice) for index, choice in enumerate(choices)],
        completion_usage(chat, outcome),
    )
    return encode_json(answer)


class ChatChunkEncoder:
    """Encodes one streamed answer."""

    def __init__(
        self, job_id: JobId, chat: Chat, created: int, *, include_usage: bool
    ) -> None:
        self._frame = ChunkFrame(
            *(chat, CHAT_ID_PREFIX + job_id, "chat.completion.chunk", created),
            include_usage=include_usage,
        )
        self._before = self._frame.head + b'"index":0,"delta":{"content":'
        self._after = b'},"logprobs":null,"finish_reason":null' + self._frame.tail
        self._opened: set[int] = set()
        self._ended: set[int] = set()
        self._stops = StopReasons(chat)

    def encode(self, pieces: Sequence[AnswerPiece]) -> bytes:
        """Encode a chunk for each piece; a chunk with the role begins each choice."""
        opening = b"" if 0 in self._opened else self._opening(0, pieces)
        before, after = self._before, self._after
        chunks = [
            before + encode_event_text(piece) + after
            if isinstance(piece, str)
            else self._delta(piece)
            for piece in pieces
        ]
        return opening + b"".join(chunks)

    def encode_end(self, outcome: Outcome) -> bytes:
        """Encode the finish reasons, the usage if requested, and [DONE]."""
        opening = b"" if self._opened else self._opening(0, ())
        endings = b"".join(
            self._choice(index, b"{}", None, _reason(outcome.finish_reason))
            for index in sorted(self._opened - self._ended)
        )
        return opening + endings + self._frame.end(outcome)

    def encode_error(self, error: ShoalError) -> bytes:
        """Encode the error, without [DONE]."""
        return encode_stream_error(error)

    def _delta(self, delta: Delta) -> bytes:
        opening = b"" if delta.choice in self._opened else self._role(delta.choice)
        self._stops.read(delta)
        if delta.finish_reason is not None:
            self._ended.add(delta.choice)
        fields = {name: value for name in SHOWN if (value := delta.fields.get(name))}
        logprobs = chat_logprobs(delta.logprobs)
        reason = None if delta.finish_reason is None else _reason(delta.finish_reason)
        if not fields and logprobs is None and reason is None:
            return opening
        return opening + self._choice(
            delta.choice, encode_json(fields), logprobs, reason
        )

    def _opening(self, choice: int, pieces: Iterable[AnswerPiece]) -> bytes:
        """Encode the role of the first choice, unless ``pieces`` begin with another."""
        first = next(iter(pieces), "")
        if isinstance(first, Delta) and first.choice != choice:
            return b""
        return self._role(choice)

    def _role(self, choice: int) -> bytes:
        self._opened.add(choice)
        role = b'{"role":"assistant","content":"","refusal":null}'
        return self._choice(choice, role, None, None)

    def _choice(
        self, index: int, delta: bytes, logprobs: JSON, reason: str | None
    ) -> bytes:
        return self._frame.chunk(
            b'"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b'
            % (index, delta, encode_json(logprobs), self._stops.encode(index, reason))
        )


def _choice(chat: Chat, index: int, choice: Choice) -> ChatChoice:
    fields: Mapping[str, Any] = choice.fields
    message = ChatCompletionMessage(
        _text(fields.get("content")),
        _text(fields.get("refusal")),
        "assistant",
        _text(fields.get("reasoning_content")),
        fields.get("tool_calls"),
    )
    return ChatChoice(
        index,
        message,
        _reason(choice.finish_reason),
        chat_logprobs(choice.logprobs),
        matched_stop(chat, fields) or UNSET,
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _reason(reason: str) -> str:
    # Clients branch on this value, and fail on one they do not know.
    return reason if reason in CHAT_FINISH_REASONS else "stop"
