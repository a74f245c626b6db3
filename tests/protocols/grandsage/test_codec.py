"""Frames of text, and the texts of the extension."""

from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.grandsage.recorded import NOW, joined, run
from protocols.pairs import CHAT
from protocols.session_pair import sent
from shoal.domain.errors import PeerError
from shoal.domain.json_limits import NESTING_MAX
from shoal.domain.outcome import Delta, Fault, Usage
from shoal.domain.vocabulary import AnswerChunk, Completed
from shoal.domain.work import JSON
from shoal.protocols.grandsage.codec import (
    TASK_ID,
    TextMessage,
    decode_frame,
    decode_text_message,
    encode_delta,
    encode_end,
    encode_ending,
    encode_text,
    encode_text_message,
    well_formed,
)


@given(text=st.text(), places=st.lists(st.integers(0, 1000)))
def test_text_split_at_any_byte_is_the_same_text(text: str, places: list[int]) -> None:
    session = joined()
    (task,) = sent(session.send(run(CHAT), NOW))
    task_id = decode_id(task)
    data = text.encode()
    ends = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})

    outputs = [
        output
        for start, end in pairwise(ends)
        for output in session.receive([TASK_ID.pack(task_id) + data[start:end]], NOW)
    ]
    outputs += session.receive([encode_end(task_id)], NOW)

    *pieces, end_event = outputs
    said = [p for p in pieces if isinstance(p, AnswerChunk)]
    assert len(said) == len(pieces)
    assert "".join(map(str, chain.from_iterable(p.pieces for p in said))) == text
    assert all(all(p.pieces) for p in said)
    assert isinstance(end_event, Completed)


@given(data=st.binary(), places=st.lists(st.integers(0, 1000)))
def test_bytes_split_anywhere_decode_as_the_whole_does(
    data: bytes, places: list[int]
) -> None:
    ends = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})

    text, tail = "", b""
    for start, end in pairwise(ends):
        piece, tail = decode_frame(tail + data[start:end])
        assert len(tail) <= 3
        text += piece

    assert text + tail.decode(errors="replace") == data.decode(errors="replace")


FRAME_MAX = 1 << 14  # instead of 1 MiB


@pytest.mark.parametrize("character", ["a", "é", "日", "😀", "\ud800"])
@pytest.mark.parametrize("length", [FRAME_MAX // 4, FRAME_MAX - 4, FRAME_MAX * 2])
def test_long_text_is_split_into_frames_below_the_limit(
    character: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.protocols.grandsage.codec.FRAME_MAX", FRAME_MAX)

    frames = encode_text(7, character * length)

    assert all(4 < len(frame) < FRAME_MAX for frame in frames)
    text = b"".join(frame[4:] for frame in frames).decode()
    assert text == well_formed(character) * length


def test_empty_text_makes_no_frame() -> None:
    assert encode_text(7, "") == []
    assert encode_end(7) == b"\0\0\0\x07"


def test_lone_surrogates_are_replaced() -> None:
    assert well_formed("a\ud800b\udfff") == "a\ufffdb\ufffd"
    assert well_formed("日😀") == "日😀"


def test_the_texts_of_the_extension_are_as_documented() -> None:
    assert encode_ending(5, "length", Usage(3, 4)) == (
        '{"id":5,"usage":{"prompt_tokens":3,"completion_tokens":4},'
        '"finish_reason":"length"}'
    )
    assert (
        encode_text_message(TextMessage(id=5, rejected="busy"))
        == '{"id":5,"rejected":"busy"}'
    )
    assert (
        encode_text_message(TextMessage(id=5, failed="oom"))
        == '{"id":5,"failed":"oom"}'
    )
    assert encode_text_message(
        TextMessage(id=5, failed="long", fault=Fault.CONTEXT)
    ) == ('{"id":5,"failed":"long","fault":"context"}')
    assert (
        encode_text_message(TextMessage(draining="update")) == '{"draining":"update"}'
    )
    assert encode_delta(5, Delta(0, {"content": "é"})) == (
        '{"id":5,"delta":{"fields":{"content":"é"}}}'
    )
    assert encode_delta(5, Delta(1, {}, {"content": []}, "length")) == (
        '{"id":5,"delta":{"choice":1,"logprobs":{"content":[]},'
        '"finish_reason":"length"}}'
    )


def test_a_lone_surrogate_within_a_delta_is_replaced() -> None:
    delta = Delta(0, {"content": "a\ud800", "deep": [{"b\udfff": 1}]})

    word = decode_text_message(encode_delta(5, delta))

    assert word is not None
    assert word.delta is not None
    assert word.delta.fields == {"content": "a\ufffd", "deep": [{"b\ufffd": 1}]}


def test_a_delta_nested_too_deeply_is_not_encoded() -> None:
    value: JSON = 1
    for depth in range(99_999):
        if depth == NESTING_MAX:
            with pytest.raises(RecursionError):
                encode_delta(5, Delta(0, {}, value))
        value = [value]

    with pytest.raises(RecursionError):
        encode_delta(5, Delta(0, {"deep": value}))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("hello", "not JSON"),
        ("[]", "Expected `object`, got `array`"),
        ('{"id":-1,"failed":"x"}', "Expected `int` >= 0"),
        ('{"id":true,"failed":"x"}', "Expected `int | null`, got `bool`"),
        ('{"id":1,"failed":7}', "Expected `str | null`, got `int`"),
        ('{"id":1,"usage":{"prompt_tokens":1}}', "missing required field"),
        (
            '{"id":1,"usage":{"prompt_tokens":-1,"completion_tokens":1}}',
            "Expected `int` >= 0",
        ),
        ('{"id":1,"finish_reason":"' + "x" * 65 + '"}', "length <= 64"),
        ('{"failed":"x"}', "names no task"),
        ('{"delta":{}}', "names no task"),
        ('{"id":1,"delta":7}', "Expected `object | null`, got `int`"),
        ('{"id":1,"delta":{"fields":[]}}', "Expected `object`, got `array`"),
        ('{"id":1,"delta":{"choice":-1}}', "Expected `int` >= 0"),
        ('{"id":1,"delta":{"choice":2048}}', "Expected `int` <= 2047"),
        ('{"id":1,"delta":{"choice":0.5}}', "Expected `int`, got `float`"),
        ('{"id":1,"delta":{"finish_reason":5}}', "Expected `str | null`, got `int`"),
        ('{"id":1,"delta":{"finish_reason":"' + "x" * 65 + '"}}', "length <= 64"),
        ('{"id":1,"failed":"x","fault":"mine"}', "Invalid enum value 'mine'"),
        ('{"id":1,"delta":{},"failed":"y"}', "several things"),
        ('{"id":1,"delta":{},"finish_reason":"stop"}', "several things"),
        ('{"id":1,"failed":"x","rejected":"y"}', "several things"),
        ('{"id":1,"delta":{"fields":{"content":5}}}', "a int for text"),
        ('{"id":1,"delta":{"fields":{"tool_calls":[1]}}}', "a int for a tool call"),
        (
            '{"id":1,"delta":{"fields":{"tool_calls":[{"index":1e30}]}}}',
            "a tool call with the index",
        ),
        (
            '{"id":1,"delta":{"fields":{"a":' + "[" * 200 + "]" * 200 + "}}}",
            "nested too deeply",
        ),
        (
            '{"id":1,"delta":{"logprobs":' + "[" * 200 + "]" * 200 + "}}",
            "nested too deeply",
        ),
        ('{"a":' * 99_999 + "1" + "}" * 99_999, "nested too deeply"),
    ],
)
def test_malformed_texts_are_refused(text: str, fault: str) -> None:
    with pytest.raises(PeerError, match=fault.replace("|", r"\|")):
        decode_text_message(text)


def test_unknown_fields_of_a_newer_node_are_ignored() -> None:
    assert decode_text_message('{"id":1,"mood":"fine"}') is None
    assert decode_text_message('{"id":1,"failed":"x","mood":"bad"}') == TextMessage(
        id=1, failed="x"
    )


def decode_id(task: str | bytes) -> int:
    assert isinstance(task, str)
    return int(task.split('"id":')[1].split(",")[0])
