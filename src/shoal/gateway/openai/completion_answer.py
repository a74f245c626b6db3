"""OpenAI's older completion answers: one JSON object, or server-sent events.

Source: OpenAI's API reference, "The completion object"; log probabilities are
translated from "The chat completion object", which most engines write.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from shoal.domain.errors import ShoalError
from shoal.domain.ids import JobId
from shoal.domain.outcome import AnswerPiece, Choice, Delta, Outcome
from shoal.domain.work import Completion
from shoal.gateway.http.answer_ids import COMPLETION_ID_PREFIX
from shoal.gateway.http.responses import encode_event_text, encode_json
from shoal.gateway.openai.generation import (
    FINISH_REASONS,
    ChunkFrame,
    CompletionUsage,
    completion_usage,
    encode_stream_error,
)


def to_completion_logprobs(logprobs: Any, offset: int) -> Any:
    """Return a completion's log probabilities, made from a chat's if they are that.

    ``offset`` is how many characters of the choice's text came before.
    """
    entries = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        return logprobs
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [_top_logprobs(entry) for entry in entries],
        "text_offset": offsets,
    }


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, Mapping)
        and isinstance(entry.get("token"), str)
        and "logprob" in entry
    )


def _top_logprobs(entry: Mapping[str, Any]) -> dict[str, Any]:
    tops = entry.get("top_logprobs")
    tops = tops if isinstance(tops, list) else []
    return {top["token"]: top["logprob"] for top in tops if _is_entry(top)}


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


def encode_text_completion(
    job_id: JobId, work: Completion, outcome: Outcome, created: int
) -> bytes:
    """Encode a whole answer; ``created`` is in Unix seconds."""
    choices = outcome.choices or (
        Choice({"content": outcome.text}, outcome.finish_reason),
    )
    return encode_json(
        TextCompletion(
            COMPLETION_ID_PREFIX + job_id,
            created,
            work.model,
            [
                CompletionChoice(
                    index,
                    _text(choice.fields.get("content")),
                    _reason(choice.finish_reason),
                    to_completion_logprobs(choice.logprobs, 0),
                )
                for index, choice in enumerate(choices)
            ],
            completion_usage(work, outcome),
        )
    )


class CompletionChunkEncoder:
    """Encodes one streamed answer."""

    def __init__(
        self, job_id: JobId, work: Completion, created: int, *, include_usage: bool
    ) -> None:
        self._frame = ChunkFrame(
            *(work, COMPLETION_ID_PREFIX + job_id, "text_completion", created),
            include_usage=include_usage,
        )
        self._started: set[int] = set()
        self._ended: set[int] = set()
        self._written: dict[int, int] = {}  # characters of each choice's text

    def encode(self, pieces: Sequence[AnswerPiece]) -> bytes:
        """Encode a chunk for each piece."""
        return b"".join([self._piece(piece) for piece in pieces])

    def encode_end(self, outcome: Outcome) -> bytes:
        """Encode the finish reasons, the usage if requested, and [DONE]."""
        missing = sorted((self._started or {0}) - self._ended)
        reason = _reason(outcome.finish_reason)
        endings = b"".join(self._chunk(index, "", None, reason) for index in missing)
        return endings + self._frame.end(outcome)

    def encode_error(self, error: ShoalError) -> bytes:
        """Encode the error, without [DONE]."""
        return encode_stream_error(error)

    def _piece(self, piece: AnswerPiece) -> bytes:
        delta = Delta(0, {"content": piece}) if isinstance(piece, str) else piece
        self._started.add(delta.choice)
        reason = None
        if delta.finish_reason is not None:
            self._ended.add(delta.choice)
            reason = _reason(delta.finish_reason)
        text = _text(delta.fields.get("content"))
        before = self._written.get(delta.choice, 0)
        self._written[delta.choice] = before + len(text)
        logprobs = to_completion_logprobs(delta.logprobs, before)
        return self._chunk(delta.choice, text, logprobs, reason)

    def _chunk(self, index: int, text: str, logprobs: Any, reason: str | None) -> bytes:
        return self._frame.chunk(
            b'"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b'
            % (
                *(index, encode_event_text(text)),
                *(encode_json(logprobs), encode_json(reason)),
            )
        )


def _reason(reason: str) -> str:
    return reason if reason in FINISH_REASONS else "stop"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
