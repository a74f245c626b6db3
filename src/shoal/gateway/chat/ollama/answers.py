"""Ollama's answers to chats and completions: a JSON object, or one a line.

Source: Ollama's API reference, "Generate a completion" and "Generate a chat
completion".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shoal.domain.credentials import usage_of
from shoal.domain.errors import ShoalError
from shoal.domain.ids import JobId
from shoal.domain.outcome import AnswerPiece, Outcome
from shoal.domain.work import Chat, Completion
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
from shoal.gateway.chat.job_answers import AnswerForm
from shoal.gateway.http import errors
from shoal.gateway.http.responses import NDJSON_TYPE, encode_event_text, encode_json
from shoal.ledger.canonical import to_time

CALL_PREFIX = "call_"

DONE_REASONS: Mapping[str, str] = {
    "length": "length",
    "content_filter": "content_filter",
}
"""Why an answer ended; all other reasons, tool calls too, are ``stop`` with Ollama."""


class Stopwatch:
    """Measures an answer, in the nanoseconds that Ollama reports."""

    def __init__(self, now: Callable[[], float]) -> None:
        """Start; ``now`` is in seconds."""
        self._now = now
        self._started = now()
        self._first_output: float | None = None

    def record_output(self) -> None:
        """Note that there is output."""
        if self._first_output is None:
            self._first_output = self._now()

    def durations(self) -> dict[str, int]:
        """Return what an answer that ends now reports.

        Until the first output, the prompt was read; of an answer that came as a whole
        this is unknown, and counts as nothing.  None is 0: clients divide by them.
        """
        now = self._now()
        first = self._started if self._first_output is None else self._first_output
        return {
            "total_duration": _nanoseconds(now - self._started),
            "load_duration": 1,  # workers have loaded what they offer
            "prompt_eval_duration": _nanoseconds(first - self._started),
            "eval_duration": _nanoseconds(now - first),
        }


class AnswerShape(Enum):
    """Where an answer has its text: in a message, or by itself."""

    CHAT = "content"
    GENERATE = "response"

    def fields(
        self, text: str, thinking: str = "", calls: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """Return the fields with parts of the answer; empty ones are left out."""
        fields: dict[str, Any] = {self.value: text}
        if thinking:
            fields["thinking"] = thinking
        if calls:
            fields["tool_calls"] = calls
        match self:
            case AnswerShape.CHAT:
                return {"message": {"role": "assistant", **fields}}
            case AnswerShape.GENERATE:
                return fields


@dataclass(frozen=True, slots=True)
class OllamaAnswer:
    """What the answers to one request have in common.

    ``name`` is the model's as the client wrote it.
    """

    shape: AnswerShape
    name: str
    work: Chat | Completion
    watch: Stopwatch

    def form(self, at: float) -> AnswerForm:
        """Return the encoders of an answer that is requested at a Unix time.

        A silent stream has a line without text at times: no client accepts empty ones.
        """
        return AnswerForm(
            self.encode,
            lambda job_id, created: OllamaStream(self, created),
            NDJSON_TYPE,
            self.line(to_time(at), self.shape.fields("")),
        )

    def encode(self, job_id: JobId, outcome: Outcome, created: int) -> bytes:
        """Encode a whole answer; ``created`` is in Unix seconds."""
        parts = parts_of(outcome, CALL_PREFIX)
        calls = [_call(part, index) for index, part in enumerate(_calls(parts))]
        fields = self.shape.fields(
            "".join(part.text for part in parts if _is_text(part)),
            "".join(part.text for part in parts if part.kind is PartKind.REASONING),
            calls,
        )
        return self.last_line(to_time(created), fields, outcome)

    def line(self, created_at: str, fields: Mapping[str, Any]) -> bytes:
        """Encode an object of a stream."""
        return self._line(created_at, {**fields, "done": False})

    def last_line(
        self, created_at: str, fields: Mapping[str, Any], outcome: Outcome
    ) -> bytes:
        """Encode the object that ends an answer."""
        usage = usage_of(self.work, outcome)
        reason = DONE_REASONS.get(outcome.finish_reason, "stop")
        return self._line(
            created_at,
            {
                **fields,
                "done": True,
                "done_reason": reason,
                **self.watch.durations(),
                "prompt_eval_count": usage.prompt_tokens,
                "eval_count": usage.completion_tokens,
            },
        )

    def _line(self, created_at: str, fields: Mapping[str, Any]) -> bytes:
        named = {"model": self.name, "created_at": created_at, **fields}
        return encode_json(named) + b"\n"


class OllamaStream:
    """Encodes one streamed answer, a JSON object a line."""

    def __init__(self, answer: OllamaAnswer, created: int) -> None:
        self._answer = answer
        self._created_at = to_time(created)
        # Encoded once: a token costs the encoding of its text and one join.
        empty = answer.line(self._created_at, answer.shape.fields(""))
        self._before, _, self._after = empty.rpartition(b'""')
        self._reader = PartReader(CALL_PREFIX)
        self._open = PartKind.TEXT  # the kind of the open part
        self._calls = 0

    def encode(self, pieces: Sequence[AnswerPiece]) -> bytes:
        """Encode what came; a tool call is encoded when it is whole."""
        self._answer.watch.record_output()
        return self._lines(self._reader.read(pieces))

    def encode_end(self, outcome: Outcome) -> bytes:
        """Encode the rest, and the line that says why the answer ended."""
        rest = self._lines(self._reader.end(outcome))
        empty = self._answer.shape.fields("")
        return rest + self._answer.last_line(self._created_at, empty, outcome)

    def encode_error(self, error: ShoalError) -> bytes:
        """Encode how an answer ends that breaks off."""
        return errors.error_body(error, errors.PLAIN_ERRORS) + b"\n"

    def _lines(self, events: Sequence[PartEvent]) -> bytes:
        return b"".join([self._line(event) for event in events])

    def _line(self, event: PartEvent) -> bytes:
        match event:
            case PartBegun(_, part):
                self._open = part.kind
                return b""
            case PartGrown(_, text):
                return self._grown(text)
            case PartEnded(_, part):
                return self._ended(part)

    def _grown(self, text: str) -> bytes:
        match self._open:
            case PartKind.TOOL_CALL:
                return b""  # Ollama's clients get calls whole
            case PartKind.REASONING:
                fields = self._answer.shape.fields("", text)
                return self._answer.line(self._created_at, fields)
            case PartKind.TEXT | PartKind.REFUSAL:
                return self._before + encode_event_text(text) + self._after

    def _ended(self, part: Part) -> bytes:
        if part.kind is not PartKind.TOOL_CALL:
            return b""
        if call_arguments(part.text) is None:
            fields = self._answer.shape.fields(part.text)
        else:
            fields = self._answer.shape.fields("", calls=[_call(part, self._calls)])
            self._calls += 1
        return self._answer.line(self._created_at, fields)


def _is_text(part: Part) -> bool:
    """Say whether a part is shown as text, as calls are that are none of Ollama's."""
    match part.kind:
        case PartKind.TEXT | PartKind.REFUSAL:
            return True
        case PartKind.REASONING:
            return False
        case PartKind.TOOL_CALL:
            return call_arguments(part.text) is None


def _calls(parts: Sequence[Part]) -> list[Part]:
    return [
        part
        for part in parts
        if part.kind is PartKind.TOOL_CALL and call_arguments(part.text) is not None
    ]


def _call(part: Part, index: int) -> dict[str, Any]:
    arguments = call_arguments(part.text)
    function = {"index": index, "name": part.name, "arguments": arguments}
    return {"id": part.call_id, "function": function}


def _nanoseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e9))
