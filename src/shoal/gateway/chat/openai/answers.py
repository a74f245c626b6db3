"""OpenAI's answers to chats and completions: one JSON object, or server-sent events.

Source: OpenAI's API reference, "The chat completion object", "The chat completion chunk
object" and "The completion object".
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from shoal.domain.credentials import usage_of
from shoal.domain.errors import ShoalError
from shoal.domain.ids import JobId
from shoal.domain.outcome import AnswerPiece, Choice, Delta, Outcome
from shoal.domain.work import JSON, Chat, Completion
from shoal.gateway.chat.job_answers import AnswerForm
from shoal.gateway.chat.logprobs import chat_logprobs, completion_logprobs
from shoal.gateway.chat.options import matched_stop
from shoal.gateway.http.errors import error_body
from shoal.gateway.http.ids import CHAT_ID_PREFIX, COMPLETION_ID_PREFIX
from shoal.gateway.http.responses import encode_event_text, encode_json, encode_text

DONE = b"data: [DONE]\n\n"

SHOWN = ("reasoning_content", "content", "refusal", "tool_calls")
"""The fields of a piece that clients get; engines send others in forms of their own."""


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class CompletionUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tokens; the details are absent where the engine does not report them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


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


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    finish_reason: str
    logprobs: Any = None
    stop_reason: str | UnsetType = UNSET  # as vLLM has it


class TextCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage
    object: Literal["text_completion"] = "text_completion"


@dataclass(frozen=True, slots=True)
class _Kind:
    """How the answers to chats and to completions differ; bytes are of a choice."""

    id_prefix: str
    chunk: bytes  # the value of ``object`` of a chunk, encoded
    reasons: frozenset[str]  # clients fail on finish reasons that they do not know
    role: bytes  # begins each choice, if it is not empty
    before_text: bytes
    after_text: bytes
    nothing: bytes  # ends a choice


_CHAT = _Kind(
    CHAT_ID_PREFIX,
    b'"chat.completion.chunk"',
    frozenset({"stop", "length", "content_filter", "tool_calls"}),
    b'"delta":{"role":"assistant","content":"","refusal":null}',
    b'"delta":{"content":',
    b"}",
    b'"delta":{}',
)
_COMPLETION = _Kind(
    COMPLETION_ID_PREFIX,
    b'"text_completion"',
    frozenset({"stop", "length", "content_filter"}),
    b"",
    b'"text":',
    b"",
    b'"text":""',
)


def answer_form(work: Chat | Completion, *, include_usage: bool = False) -> AnswerForm:
    """Return the encoders of the answer to ``work``."""
    return AnswerForm(
        partial(encode_answer, work),
        partial(ChunkEncoder, work, include_usage=include_usage),
        names_workers=True,
    )


def encode_answer(
    work: Chat | Completion, job_id: JobId, outcome: Outcome, created: int
) -> bytes:
    """Encode a whole answer; ``created`` is in Unix seconds."""
    kind, usage = _kind(work), completion_usage(work, outcome)
    choices = outcome.choices or (
        Choice({"content": outcome.text}, outcome.finish_reason),
    )
    ends = [
        (_reason(kind, each.finish_reason), matched_stop(work, each.fields) or UNSET)
        for each in choices
    ]
    chosen = enumerate(zip(choices, ends, strict=True))
    head = (kind.id_prefix + job_id, created, work.model)
    if isinstance(work, Chat):
        chats = [
            ChatChoice(
                index, _message(each), reason, chat_logprobs(each.logprobs), stop
            )
            for index, (each, (reason, stop)) in chosen
        ]
        return encode_json(ChatCompletion(*head, chats, usage))
    texts = [
        CompletionChoice(
            *(index, _text(each, "content") or "", reason),
            *(completion_logprobs(each.logprobs, 0), stop),
        )
        for index, (each, (reason, stop)) in chosen
    ]
    return encode_json(TextCompletion(*head, texts, usage))


class ChunkEncoder:
    """Encodes one streamed answer.

    What its chunks have in common is encoded once: a token costs the encoding of its
    text and one join.
    """

    def __init__(
        self,
        work: Chat | Completion,
        job_id: JobId,
        created: int,
        *,
        include_usage: bool,
    ) -> None:
        """``created`` is in Unix seconds."""
        self._work, self._kind = work, _kind(work)
        self._include_usage = include_usage
        self._fields = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,' % (
            *(encode_text(self._kind.id_prefix + job_id), self._kind.chunk),
            *(created, encode_text(work.model)),
        )
        self._head = self._fields + b'"choices":[{'
        # If the client asked for usage, OpenAI sends a null in every other chunk.
        self._tail = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._before = self._head + b'"index":0,' + self._kind.before_text
        self._after = (
            self._kind.after_text
            + b',"logprobs":null,"finish_reason":null'
            + self._tail
        )
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._sizes: defaultdict[int, int] = defaultdict(int)  # characters of a text
        self._stops: dict[int, str] = {}

    def encode(self, pieces: Sequence[AnswerPiece]) -> bytes:
        """Encode a chunk for each piece; one with the role begins a chat's choice."""
        first = pieces[0] if pieces else ""
        begins = isinstance(first, str) and 0 not in self._begun
        chunks = [self._begin(0) if begins else b""]
        before, after = self._before, self._after
        for piece in pieces:
            if isinstance(piece, str):
                chunks.append(before + encode_event_text(piece) + after)
                self._sizes[0] += len(piece)
            else:
                chunks.append(self._delta(piece))
        return b"".join(chunks)

    def encode_end(self, outcome: Outcome) -> bytes:
        """Encode the finish reasons, the usage if requested, and [DONE]."""
        opening = b"" if self._begun else self._begin(0)
        reason = _reason(self._kind, outcome.finish_reason)
        endings = b""
        for index in sorted(self._begun - self._ended):
            endings += self._choice(index, self._kind.nothing, None, reason)
        if not self._include_usage:
            return opening + endings + DONE
        usage = msgspec.json.encode(completion_usage(self._work, outcome))
        last = self._fields + b'"choices":[],"usage":' + usage + b"}\n\n"
        return opening + endings + last + DONE

    def encode_error(self, error: ShoalError) -> bytes:
        """Encode the error: no [DONE] follows, as the answer is not whole."""
        return b"data: " + error_body(error) + b"\n\n"

    def _begin(self, index: int) -> bytes:
        """Encode the role of a choice that has not begun."""
        if index in self._begun:
            return b""
        self._begun.add(index)
        role = self._kind.role
        return self._choice(index, role, None, None) if role else b""

    def _delta(self, delta: Delta) -> bytes:
        opening, reason = self._begin(delta.choice), None
        if (found := matched_stop(self._work, delta.fields)) is not None:
            self._stops[delta.choice] = found
        if delta.finish_reason is not None:
            self._ended.add(delta.choice)
            reason = _reason(self._kind, delta.finish_reason)
        content, logprobs = self._content(delta)
        if not content and logprobs is None and reason is None:
            return opening
        return opening + self._choice(
            delta.choice, content or self._kind.nothing, logprobs, reason
        )

    def _content(self, delta: Delta) -> tuple[bytes, JSON]:
        """Encode what a piece adds to its choice; return its log probabilities, too."""
        if isinstance(self._work, Chat):
            fields = {
                name: found for name in SHOWN if (found := delta.fields.get(name))
            }
            content = b'"delta":' + encode_json(fields) if fields else b""
            return content, chat_logprobs(delta.logprobs)
        text = _text(delta, "content") or ""
        before = self._sizes[delta.choice]
        self._sizes[delta.choice] += len(text)
        content = b'"text":' + encode_event_text(text) if text else b""
        return content, completion_logprobs(delta.logprobs, before)

    def _choice(
        self, index: int, content: bytes, logprobs: JSON, reason: str | None
    ) -> bytes:
        end = b"null" if reason is None else encode_json(reason)
        found = b"null" if logprobs is None else encode_json(logprobs)
        if reason is not None and index in self._stops:
            end += b',"stop_reason":' + encode_event_text(self._stops[index])
        return b'%b"index":%d,%b,"logprobs":%b,"finish_reason":%b%b' % (
            *(self._head, index, content, found, end, self._tail),
        )


def completion_usage(work: Chat | Completion, outcome: Outcome) -> CompletionUsage:
    """Return the usage in OpenAI's form."""
    usage = usage_of(work, outcome)
    cached, reasoning = usage.cached_tokens, usage.reasoning_tokens
    return CompletionUsage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.tokens,
        None if cached is None else PromptTokensDetails(cached),
        None if reasoning is None else CompletionTokensDetails(reasoning),
    )


def _kind(work: Chat | Completion) -> _Kind:
    return _CHAT if isinstance(work, Chat) else _COMPLETION


def _message(choice: Choice) -> ChatCompletionMessage:
    return ChatCompletionMessage(
        _text(choice, "content"),
        _text(choice, "refusal"),
        "assistant",
        _text(choice, "reasoning_content"),
        choice.fields.get("tool_calls"),
    )


def _text(piece: Choice | Delta, name: str) -> str | None:
    value = piece.fields.get(name)
    return value if isinstance(value, str) else None


def _reason(kind: _Kind, reason: str) -> str:
    return reason if reason in kind.reasons else "stop"
