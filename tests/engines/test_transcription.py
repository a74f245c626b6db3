"""Speech that a server writes down."""

import base64
from typing import Any

import pytest
from aiohttp import BodyPartReader, web

from engines.conftest import Fakes
from engines.outputs import pieces_of
from shoal.domain.errors import InvalidRequest, JobError
from shoal.domain.outcome import Delta
from shoal.domain.work import JSON, Transcription
from shoal.engines.engine import Finished, Item
from shoal.engines.openai_server import OpenAIEngine

AUDIO = bytes(range(256))
MODELS = {"data": [{"id": "whisper-1"}]}


def speech(**options: JSON) -> Transcription:
    return Transcription("whisper-1", base64.b64encode(AUDIO).decode(), "mp3", options)


async def transcribe(
    fake: Fakes, work: Transcription, answer: object
) -> tuple[list[Item], list[tuple[str, Any]]]:
    """Return the engine's items, and the form that the server got."""
    form: list[tuple[str, Any]] = []

    async def receive(request: web.Request) -> web.Response:
        async for part in await request.multipart():
            assert isinstance(part, BodyPartReader)
            assert part.name is not None
            data = bytes(await part.read())
            value = (part.filename, data) if part.name == "file" else data.decode()
            form.append((part.name, value))
        return web.json_response(answer)

    url = await fake(
        {"GET /v1/models": MODELS, "POST /v1/audio/transcriptions": receive}
    )
    engine = OpenAIEngine(url)
    await engine.start()
    try:
        return await pieces_of(engine.run(work)), form
    finally:
        await engine.close()


async def test_file_is_sent_as_a_form(fake: Fakes) -> None:
    work = speech(language="en", prompt="Shoal", temperature=0.5)

    items, form = await transcribe(fake, work, {"text": "Hello."})

    assert items == [Delta(0, {"content": "Hello."}), Finished("stop")]
    assert form == [
        ("model", "whisper-1"),
        ("language", "en"),
        ("prompt", "Shoal"),
        ("temperature", "0.5"),
        ("response_format", "json"),
        ("file", ("audio.mp3", AUDIO)),
    ]


async def test_times_come_with_the_text(fake: Fakes) -> None:
    segments: list[JSON] = [{"id": 0, "start": 0.0, "end": 1.5, "text": " Hello."}]
    answer: dict[str, JSON] = {
        "text": "Hello.",
        "language": "english",
        "duration": "1.5",
        "segments": segments,
    }

    items, form = await transcribe(fake, speech(timestamps=["segment"]), answer)

    fields = answer | {"content": "Hello.", "duration": 1.5}
    del fields["text"]
    assert items == [Delta(0, fields), Finished("stop")]
    assert ("response_format", "verbose_json") in form
    assert ("timestamp_granularities[]", "segment") in form


async def test_details_that_cannot_be_understood_are_left_out(fake: Fakes) -> None:
    details = {"language": 7, "duration": "long", "segments": "none", "words": [None]}

    items, _ = await transcribe(fake, speech(), {"text": "a", **details})

    assert items == [Delta(0, {"content": "a"}), Finished("stop")]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"segments": []}, "no transcription"),
        ({"text": None}, "no transcription"),
        ({"error": {"message": "too noisy"}}, "too noisy"),
    ],
)
async def test_invalid_answer_is_an_error(
    fake: Fakes, answer: object, reason: str
) -> None:
    with pytest.raises(JobError, match=reason):
        await transcribe(fake, speech(), answer)


async def test_audio_that_is_not_in_base64_is_refused(fake: Fakes) -> None:
    with pytest.raises(InvalidRequest, match="file: not in base64"):
        await transcribe(fake, Transcription("whisper-1", "?", "mp3"), {})
