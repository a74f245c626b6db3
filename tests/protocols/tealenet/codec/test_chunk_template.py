"""Chunks of an answer of which only the text is read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.tealenet.peers import (
    REQUEST,
    RUN,
    PeerPair,
    chunk,
    coordinator_side,
    encoded,
    met_mac,
    submitted_request,
    worker_side,
)
from shoal.domain.outcome import Delta
from shoal.domain.vocabulary import AnswerChunk, RunJob
from shoal.protocols.tealenet.codec.chunks import (
    ChunkTemplate,
    ChunkWriter,
    find_template,
)
from shoal.protocols.tealenet.codec.envelope import decode
from shoal.protocols.tealenet.codec.messages import InferenceChunk

WRITER = ChunkWriter(REQUEST, "m", 1, exact=True)


def found_in(data: bytes, text: str) -> ChunkTemplate | None:
    message = decode(data)
    assert isinstance(message, InferenceChunk)
    return find_template(data, message, text)


def pieces_of(said: bytes) -> list[object]:
    """Return what is heard of two messages of an answer."""
    mac = met_mac()
    request_id = submitted_request(mac)
    mac.say(said.replace(b"REQUEST", request_id.encode()))
    mac.say(said.replace(b"REQUEST", request_id.encode()))
    return [each for event in mac.end.of(AnswerChunk) for each in event.pieces]


@given(first=st.text(min_size=1), second=st.text())
def test_whatever_the_texts_are_they_are_read_as_by_decoding(
    first: str, second: str
) -> None:
    (one,) = WRITER.write([first])
    found = found_in(one, first)

    assert found is not None
    assert found.text(one) == first
    for other in WRITER.write([second]) if second else []:
        message = decode(other)
        assert isinstance(message, InferenceChunk)
        delta = message.chunk.choices[0].delta
        assert delta is not None
        assert found.text(other) == delta["content"]


@given(st.binary())
def test_whatever_stands_in_the_place_of_the_text_is_a_text_or_left_alone(
    middle: bytes,
) -> None:
    (one,) = WRITER.write(["a"])
    found = found_in(one, "a")
    assert found is not None
    data = found.before + middle + found.after

    text = found.text(data)

    if text is not None:
        message = decode(data)
        assert isinstance(message, InferenceChunk)
        assert message.chunk.choices[0].delta == {"content": text}


@pytest.mark.parametrize(
    "data",
    [
        b'{"inferenceChunk":{"_0":{"chunk":{"choices":[{"delta":{"content":"a"},'
        b'"index":0}]},"requestID":"%b"}}}' % REQUEST.encode(),
        b'{"inferenceChunk":{"_0":{"requestID":"%b","chunk":{"x":{"content":"a"},'
        b'"choices":[{"index":0,"delta":{"content":"a"}}]}}}}' % REQUEST.encode(),
        b'{"inferenceChunk":{"_0":{"requestID":"%b","chunk":{"choices":[{"index":0,'
        b'"delta":{"content": "a"}}]}}}}' % REQUEST.encode(),
    ],
    ids=["the id comes last", "another content before", "blanks"],
)
def test_chunks_without_a_template_are_decoded_each_time(
    data: bytes,
) -> None:
    assert found_in(data, "a") is None


def test_a_piece_that_is_more_than_text_is_never_taken_for_text() -> None:
    form = {
        "requestID": "REQUEST",
        "chunk": {"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {}}]},
    }
    text = json.dumps({"inferenceChunk": {"_0": form}}, separators=(",", ":"))

    pieces = pieces_of(text.encode())

    assert pieces == [Delta(0, {"content": "a"}, {}), Delta(0, {"content": "a"}, {})]


def test_concurrent_answers_have_separate_templates() -> None:
    two = PeerPair(worker_side("w", "t"), coordinator_side("a")).until(1)
    ours, worker = two.acceptor, two.dialler
    texts = ("one", "two", "three")
    jobs = [RunJob(RUN.job_id, lease, RUN.work) for lease in (1, 2)]  # type: ignore[arg-type]
    for job in jobs:
        ours.take(ours.conversation.send(job, two.now))
    two.settle()
    asked = worker.of(RunJob)
    ours.heard.clear()

    for text in texts:
        for job in asked:
            said = AnswerChunk(job.job_id, job.lease, [f"{text}{job.lease}"])
            worker.take(worker.conversation.send(said, two.now))
    two.settle()

    assert [each.pieces for each in ours.of(AnswerChunk)] == [
        [f"{text}{job.lease}" for text in texts] for job in jobs
    ]


def test_a_chunk_after_the_end_of_its_answer_is_ignored() -> None:
    mac = met_mac()
    request_id = submitted_request(mac)
    mac.say(encoded(chunk(request_id, "a")))
    mac.say(b'{"inferenceComplete":{"_0":{"requestID":"%b"}}}' % request_id.encode())
    heard = len(mac.end.heard)

    mac.say(encoded(chunk(request_id, "b")))

    assert len(mac.end.heard) == heard
