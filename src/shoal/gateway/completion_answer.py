"""OpenAI's older completion answers: in one piece, or as server-sent events.

Source: OpenAI's API reference, "The completion object".
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from shoal.domain.ids import JobId
from shoal.domain.outcome import Choice, Delta, Outcome, Piece
from shoal.domain.work import Completion
from shoal.gateway.chat_answer import DONE
from shoal.gateway.completion_logprobs import as_completion
from shoal.gateway.text import encode_event_text, encode_json, encode_text
from shoal.gateway.usage import CompletionUsage, counted

PREFIX = "cmpl-"

REASONS = frozenset({"stop", "length", "content_filter"})


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    finish_reason: str
    logprobs: Any = None


class TextCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage
    object: Literal["text_completion"] = "text_completion"


def text_completion(
    job_id: JobId, work: Completion, outcome: Outcome, created: int
) -> bytes:
    """Write an answer in one piece; ``created`` is in Unix seconds."""
    choices = outcome.choices or (
        Choice({"content": outcome.text}, outcome.finish_reason),
    )
    return encode_json(
        TextCompletion(
            PREFIX + job_id,
            created,
            work.model,
            [
                CompletionChoice(
                    index,
                    _text(choice.fields.get("content")),
                    _reason(choice.finish_reason),
                    as_completion(choice.logprobs, 0),
                )
                for index, choice in enumerate(choices)
            ],
            counted(work, outcome),
        )
    )


class CompletionChunks:
    """Writes one streamed answer."""

    def __init__(
        self, job_id: JobId, work: Completion, created: int, *, include_usage: bool
    ) -> None:
        self._work = work
        self._include_usage = include_usage
        self._head = (
            b'data: {"id":%b,"object":"text_completion","created":%d,"model":%b,'
            % (encode_text(PREFIX + job_id), created, encode_text(work.model))
        )
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._written: dict[int, int] = {}  # characters of each choice's text

    def pieces(self, pieces: Sequence[Piece]) -> bytes:
        """Write a chunk for each piece."""
        return b"".join([self._piece(piece) for piece in pieces])

    def end(self, outcome: Outcome) -> bytes:
        """Write the reasons for the end, the usage if it was asked for, and [DONE]."""
        missing = sorted((self._begun or {0}) - self._ended)
        reason = _reason(outcome.finish_reason)
        endings = b"".join(self._chunk(index, "", None, reason) for index in missing)
        usage = b""
        if self._include_usage:
            counts = msgspec.json.encode(counted(self._work, outcome))
            usage = self._head + b'"choices":[],"usage":' + counts + b"}\n\n"
        return endings + usage + DONE

    def _piece(self, piece: Piece) -> bytes:
        delta = Delta(0, {"content": piece}) if isinstance(piece, str) else piece
        self._begun.add(delta.choice)
        reason = None
        if delta.finish_reason is not None:
            self._ended.add(delta.choice)
            reason = _reason(delta.finish_reason)
        text = _text(delta.fields.get("content"))
        before = self._written.get(delta.choice, 0)
        self._written[delta.choice] = before + len(text)
        logprobs = as_completion(delta.logprobs, before)
        return self._chunk(delta.choice, text, logprobs, reason)

    def _chunk(self, index: int, text: str, logprobs: Any, reason: str | None) -> bytes:
        return (
            b'%b"choices":[{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}]%b'
            % (
                self._head,
                index,
                encode_event_text(text),
                encode_json(logprobs),
                encode_json(reason),
                self._tail,
            )
        )


def _reason(reason: str) -> str:
    return reason if reason in REASONS else "stop"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
