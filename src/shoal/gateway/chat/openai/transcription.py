"""Transcriptions: speech in, its text out, with the times of its parts if wanted.

Source: OpenAI's API reference, "Create transcription"; "WebVTT" of the W3C.
"""

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shoal.domain.errors import InvalidRequest, JobError
from shoal.domain.outcome import Outcome, Usage
from shoal.domain.work import JSON, Transcription
from shoal.gateway.http.decoding import ModelName, unsupported, validation_error
from shoal.gateway.http.forms import ReceivedForm
from shoal.gateway.http.responses import JSON_TYPE, TEXT_TYPE, encode_json, well_formed

AUDIO_MAX = 12 << 20  # bytes: in base64, as much as the body of another request

VTT_TYPE = "text/vtt"
SRT_TYPE = "application/x-subrip"

AnswerFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
Granularity = Literal["word", "segment"]

WITH_TIMES: frozenset[AnswerFormat] = frozenset({"srt", "verbose_json", "vtt"})

_FILE_TYPE = re.compile(r"[a-z0-9]{1,8}")


class TranscriptionFields(msgspec.Struct, frozen=True):
    """The fields of the form beside the file; others are ignored."""

    model: ModelName
    language: Annotated[str, Meta(max_length=16)] | None = None
    prompt: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    response_format: AnswerFormat = "json"
    stream: bool = False
    timestamp_granularities: list[Granularity] = []
    include: list[str] = []


class TranscriptionUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    type: Literal["tokens"] = "tokens"


class TranscriptionAnswer(msgspec.Struct, frozen=True):
    text: str
    usage: TranscriptionUsage


@dataclass(frozen=True, slots=True)
class TranscriptionRequest:
    """A decoded request: the work, and the form of the answer."""

    work: Transcription
    answer_format: AnswerFormat


def decode_transcription_request(
    form: ReceivedForm, audio: bytes
) -> TranscriptionRequest:
    """Decode a form.

    Raises InvalidRequest naming the invalid field.
    """
    given = {**form.fields, **form.lists}
    try:
        fields = msgspec.convert(given, TranscriptionFields, strict=False)
    except msgspec.ValidationError as error:
        raise validation_error(str(error)) from error
    if fields.stream:
        raise unsupported("stream")
    if fields.include:
        raise unsupported("include[]", fields.include[0])
    if not audio:
        raise InvalidRequest("file: empty", "file")
    _, dot, file_type = form.file_name.lower().rpartition(".")
    if not dot or not _FILE_TYPE.fullmatch(file_type):
        raise InvalidRequest(
            f"file: its name ({form.file_name[:80]!r}) has no extension of an audio "
            "format, such as .wav or .mp3",
            "file",
        )
    options: dict[str, JSON] = {
        name: value
        for name in ("language", "prompt", "temperature")
        if (value := getattr(fields, name)) is not None
    }
    granularities = fields.timestamp_granularities
    if granularities or fields.response_format in WITH_TIMES:
        options["timestamps"] = list(granularities or ["segment"])
    encoded = base64.b64encode(audio).decode()
    work = Transcription(fields.model, encoded, file_type, options)
    return TranscriptionRequest(work, fields.response_format)


@dataclass(frozen=True, slots=True)
class EncodedTranscription:
    """An answer's body, and its media type."""

    body: bytes
    media: str


def encode_transcription(
    answer_format: AnswerFormat, outcome: Outcome, usage: Usage
) -> EncodedTranscription:
    """Encode the answer.

    Raises JobError if the worker left out the times that the form needs.
    """
    match answer_format:
        case "json":
            counted = TranscriptionUsage(
                usage.prompt_tokens, usage.completion_tokens, usage.tokens
            )
            answer = TranscriptionAnswer(outcome.text, counted)
            return EncodedTranscription(encode_json(answer), JSON_TYPE)
        case "verbose_json":
            return EncodedTranscription(encode_json(_verbose(outcome)), JSON_TYPE)
        case "text":
            return _plain(outcome.text + "\n", TEXT_TYPE)
        case "srt":
            cues = _cues(outcome, _srt_time)
            blocks = [f"{n}\n{cue}\n\n" for n, cue in enumerate(cues, 1)]
            return _plain("".join(blocks), SRT_TYPE)
        case "vtt":
            blocks = [f"{cue}\n\n" for cue in _cues(outcome, _vtt_time)]
            return _plain("WEBVTT\n\n" + "".join(blocks), VTT_TYPE)


def _plain(text: str, media: str) -> EncodedTranscription:
    return EncodedTranscription(well_formed(text).encode(), media)


def _fields(outcome: Outcome) -> Mapping[str, JSON]:
    return outcome.choices[0].fields if outcome.choices else {}


def _verbose(outcome: Outcome) -> Mapping[str, JSON]:
    fields = _fields(outcome)
    given: dict[str, JSON] = {"task": "transcribe", "text": outcome.text}
    for name in ("language", "duration", "segments", "words"):
        if fields.get(name) is not None:
            given[name] = fields[name]
    return given


def _cues(outcome: Outcome, write: Callable[[float], str]) -> Iterable[str]:
    if outcome.finish_reason == "content_filter":
        return  # withheld, with its times
    segments: Any = _fields(outcome).get("segments")
    if not isinstance(segments, Sequence) or isinstance(segments, str):
        raise JobError(
            "the worker's server returned no timestamps: request json or text"
        )
    for segment in segments:
        try:
            start, end = float(segment["start"]), float(segment["end"])
            text = str(segment["text"]).strip()
            yield f"{write(start)} --> {write(end)}\n{text}"
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise JobError("the worker's server returned an invalid segment") from error


def _srt_time(seconds: float) -> str:
    return _vtt_time(seconds).replace(".", ",")


def _vtt_time(seconds: float) -> str:
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    whole, thousandths = divmod(milliseconds, 1000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{whole:02}.{thousandths:03}"
