"""Transcriptions: forms, and answers in each of their forms."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import FormData

from gateway.serving import KEY, Pool
from gateway.shoal_worker import offer, shoal_worker
from shoal.domain.errors import InvalidRequest, JobError
from shoal.domain.outcome import Choice, Outcome, Usage
from shoal.domain.work import JSON, JobKind, Transcription
from shoal.gateway.chat.openai import transcription
from shoal.gateway.chat.openai.transcription import (
    AnswerFormat,
    TranscriptionRequest,
    decode_transcription_request,
    encode_transcription,
)
from shoal.gateway.http.forms import ReceivedForm

HEADERS = {"Authorization": f"Bearer {KEY}"}


def decode(
    file_name: str = "a.wav", audio: bytes = b"\0\0\0", **fields: Any
) -> TranscriptionRequest:
    lists = {name: each for name, each in fields.items() if isinstance(each, list)}
    texts = {name: each for name, each in fields.items() if isinstance(each, str)}
    form = ReceivedForm(file_name, {"model": "m1"} | texts, lists)
    return decode_transcription_request(form, audio)


def answer(answer_format: AnswerFormat, outcome: Outcome) -> str:
    return encode_transcription(answer_format, outcome, Usage(3, 2)).body.decode()


def timed(*segments: Any) -> Outcome:
    fields: dict[str, JSON] = {
        "content": "Hi. Bye.",
        "duration": 3.5,
        "segments": list(segments),
    }
    return Outcome("Hi. Bye.", choices=(Choice(fields),))


TIMED = timed(
    {"start": 0.0, "end": 1.25, "text": " Hi."},
    {"start": 3599.9996, "end": 3601, "text": " Bye."},
)


def test_file_is_kept_in_base64_with_its_type() -> None:
    asked = decode("My Talk.MP3", language="en", prompt="Shoal", temperature="0.5")

    options: dict[str, JSON] = {"language": "en", "prompt": "Shoal", "temperature": 0.5}
    assert asked.work == Transcription("m1", "AAAA", "mp3", options)


@pytest.mark.parametrize(
    ("fields", "timestamps"),
    [
        ({}, None),
        ({"response_format": "srt"}, ["segment"]),
        ({"timestamp_granularities": ["word"]}, ["word"]),
    ],
)
def test_times_are_asked_for_where_they_are_needed(
    fields: Any, timestamps: list[str] | None
) -> None:
    assert decode(**fields).work.options.get("timestamps") == timestamps


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"file_name": "talk"}, "file"),
        ({"file_name": "talk.w/v"}, "file"),
        ({"audio": b""}, "file"),
        ({"stream": "true"}, "stream"),
        ({"include": ["logprobs"]}, "include[]"),
        ({"temperature": "2"}, "temperature"),
        ({"response_format": "pdf"}, "response_format"),
    ],
)
def test_invalid_field_is_named(fields: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        decode(**fields)

    assert raised.value.field == field


def test_text_is_json_with_usage_or_plain() -> None:
    outcome = Outcome("Hi.")

    assert json.loads(answer("json", outcome)) == {
        "text": "Hi.",
        "usage": {
            "input_tokens": 3,
            "output_tokens": 2,
            "total_tokens": 5,
            "type": "tokens",
        },
    }
    assert answer("text", outcome) == "Hi.\n"


def test_times_are_written_in_each_form() -> None:
    verbose = json.loads(answer("verbose_json", TIMED))

    assert verbose["duration"] == 3.5
    assert verbose["segments"][0]["end"] == 1.25
    assert answer("srt", TIMED) == (
        "1\n00:00:00,000 --> 00:00:01,250\nHi.\n\n"
        "2\n01:00:00,000 --> 01:00:01,000\nBye.\n\n"
    )
    assert answer("vtt", TIMED).startswith(
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.250\nHi.\n\n"
    )


@pytest.mark.parametrize(
    "outcome", [Outcome("Hi."), timed({"start": 0}), timed("a"), timed({"start": "x"})]
)
def test_missing_times_are_an_error(outcome: Outcome) -> None:
    with pytest.raises(JobError, match="returned"):
        answer("srt", outcome)


def test_withheld_answer_has_no_cues() -> None:
    withheld = Outcome("", "content_filter")

    assert answer("srt", withheld) == ""
    assert answer("vtt", withheld) == "WEBVTT\n\n"


async def test_worker_writes_down_speech(pool: Pool) -> None:
    form = FormData({"model": "m1", "response_format": "text"})
    form.add_field("file", b"\0\0\0", filename="a.wav")
    async with (
        shoal_worker(pool, offer(JobKind.TRANSCRIPTION)) as worker,
        asyncio.TaskGroup() as tasks,
    ):
        url = f"{pool.url}/v1/audio/transcriptions"
        asking = tasks.create_task(pool.session.post(url, data=form, headers=HEADERS))
        job = await worker.job()
        worker.delta(job, choice=0, fields={"content": "Hi."})
        worker.end(job)
        response = await asking
        text = await response.text()

    assert worker.work() == Transcription("m1", "AAAA", "wav")
    assert (response.content_type, text) == ("text/plain", "Hi.\n")


async def test_file_that_is_too_large_is_refused(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcription, "AUDIO_MAX", 2)
    form = FormData({"model": "m1"})
    form.add_field("file", b"\0\0\0", filename="a.wav")

    url = f"{pool.url}/v1/audio/transcriptions"
    async with pool.session.post(url, data=form, headers=HEADERS) as response:
        told = await response.json()

    assert response.status == 413
    assert "limit of 2 bytes" in told["error"]["message"]


async def test_body_that_is_no_form_is_refused(pool: Pool) -> None:
    url = f"{pool.url}/v1/audio/transcriptions"
    async with pool.session.post(url, json={"model": "m1"}, headers=HEADERS) as given:
        told = await given.json()

    assert given.status == 400
    assert "multipart/form-data" in told["error"]["message"]
