"""The fast path for chunks that differ only in their text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.tealenet.peers import (
    REQUEST,
    RUN,
    PeerPair,
    chunk,
    encoded,
    joined_mac,
    local_coordinator,
    local_worker,
    submitted_request,
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

WRITER = ChunkWriter(REQUEST, "m", 1)
WRITER.write(["the role comes first"])


def template_of(data: bytes, text: str) -> ChunkTemplate | None:
    message = decode(data)
    assert isinstance(message, InferenceChunk)
    return find_template(data, message, text)


def pieces_of(data: bytes) -> list[object]:
    """Return the pieces of an answer of two equal messages."""
    mac = joined_mac()
    request_id = submitted_request(mac)
    mac.deliver(data.replace(b"REQUEST", request_id.encode()))
    mac.deliver(data.replace(b"REQUEST", request_id.encode()))
    return [each for event in mac.end.messages(AnswerChunk) for each in event.pieces]


@given(first=st.text(min_size=1), second=st.text())
def test_a_template_reads_the_same_text_as_the_decoder(first: str, second: str) -> None:
    (one,) = WRITER.write([first])
    template = template_of(one, first)

    assert template is not None
    assert template.text(one) == first
    for other in WRITER.write([second]) if second else []:
        message = decode(other)
        assert isinstance(message, InferenceChunk)
        delta = message.chunk.choices[0].delta
        assert delta is not None
        assert template.text(other) == delta["content"]


@given(st.binary())
def test_a_template_reads_only_valid_texts(
    middle: bytes,
) -> None:
    (one,) = WRITER.write(["a"])
    template = template_of(one, "a")
    assert template is not None
    data = template.before + middle + template.after

    text = template.text(data)

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
    assert template_of(data, "a") is None


def test_a_chunk_with_logprobs_is_no_template() -> None:
    payload = {
        "requestID": "REQUEST",
        "chunk": {"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {}}]},
    }
    text = json.dumps({"inferenceChunk": {"_0": payload}}, separators=(",", ":"))

    pieces = pieces_of(text.encode())

    assert pieces == [Delta(0, {"content": "a"}, {}), Delta(0, {"content": "a"}, {})]


def test_concurrent_answers_have_separate_templates() -> None:
    pair = PeerPair(local_worker("w"), local_coordinator("a")).until(1)
    coordinator, worker = pair.acceptor, pair.dialler
    texts = ("one", "two", "three")
    jobs = [RunJob(RUN.job_id, lease, RUN.work) for lease in (1, 2)]  # type: ignore[arg-type]
    for job in jobs:
        coordinator.send(job, pair.now)
    pair.settle()
    runs = worker.messages(RunJob)
    coordinator.received.clear()

    for text in texts:
        for number, job in enumerate(runs):
            answer = AnswerChunk(job.job_id, job.lease, [f"{text}{number}"])
            worker.send(answer, pair.now)
    pair.settle()

    assert [each.pieces for each in coordinator.messages(AnswerChunk)] == [
        [f"{text}{number}" for text in texts] for number in range(2)
    ]


def test_a_chunk_after_the_end_of_its_answer_is_ignored() -> None:
    mac = joined_mac()
    request_id = submitted_request(mac)
    mac.deliver(encoded(chunk(request_id, "a")))
    mac.deliver(
        b'{"inferenceComplete":{"_0":{"requestID":"%b"}}}' % request_id.encode()
    )
    received = len(mac.end.received)

    mac.deliver(encoded(chunk(request_id, "b")))

    assert len(mac.end.received) == received
