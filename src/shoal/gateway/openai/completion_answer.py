"""OpenAI's older completion answers: one JSON object, or server-sent events.

Source: OpenAI's API reference, "The completion object".
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from shoal.domain.errors import ShoalError
from shoal.domain.ids import JobId
from shoal.domain.outcome import AnswerPiece, Choice, Delta, Outcome
from shoal.domain.work import Completion
from shoal.gateway.generation.logprobs import completion_logprobs
from shoal.gateway.generation.options import matched_stop
from shoal.gateway.http.ids import COMPLETION_ID_PREFIX
from shoal.gateway.http.responses import encode_event_text, encode_json
from shoal.gateway.openai.generation import (
    FINISH_REASONS,
    ChunkFrame,
    CompletionUsage,
    StopReasons,
    completion_usage,
    encode_stream_error,
)


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
            [_choice(work, index, choice) for index, choice in enumerate(choices)],
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
        self._stops = StopReasons(work)

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
        self._stops.read(delta)
        self._started.add(delta.choice)
        reason = None
        if delta.finish_reason is not None:
            self._ended.add(delta.choice)
            reason = _reason(delta.finish_reason)
        text = _text(delta.fields.get("content"))
        before = self._written.get(delta.choice, 0)
        self._written[delta.choice] = before + len(text)
        logprobs = completion_logprobs(delta.logprobs, before)
        if not text and logprobs is None and reason is None:
            return b""
        return self._chunk(delta.choice, text, logprobs, reason)

    def _chunk(self, index: int, text: str, logprobs: Any, reason: str | None) -> bytes:
        return self._frame.chunk(
            b'"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b'
            % (
                *(index, encode_event_text(text)),
                *(encode_json(logprobs), self._stops.encode(index, reason)),
            )
        )


def _choice(work: Completion, index: int, choice: Choice) -> CompletionChoice:
    return CompletionChoice(
        index,
        _text(choice.fields.get("content")),
        _reason(choice.finish_reason),
        completion_logprobs(choice.logprobs, 0),
        matched_stop(work, choice.fields) or UNSET,
    )


def _reason(reason: str) -> str:
    return reason if reason in FINISH_REASONS else "stop"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
