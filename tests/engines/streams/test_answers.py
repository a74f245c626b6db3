"""The pieces in a streamed answer."""

import json
import re
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.steps import calls
from shoal.domain.answer_assembly import assemble
from shoal.domain.errors import (
    ContextExceeded,
    EngineFailed,
    InvalidRequest,
    JobError,
    ShoalError,
    Unavailable,
)
from shoal.domain.outcome import AnswerPiece, Delta, Usage
from shoal.domain.work import JSON
from shoal.engines.engine import Finished
from shoal.engines.streams import answers
from shoal.engines.streams.answers import AnswerReader


def event(*choices: dict[str, Any], **chunk: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": choices, **chunk}).encode()


def text(content: str | None, index: int = 0, **choice: Any) -> dict[str, Any]:
    return {"index": index, "delta": {"content": content}, **choice}


def delta(index: int = 0, **fields: Any) -> dict[str, Any]:
    return {"index": index, "delta": fields}


DONE = b"data: [DONE]\n\n"
CALL: JSON = {
    "index": 0,
    "id": "c1",
    "type": "function",
    "function": {"name": "f", "arguments": ""},
}
REST: JSON = {"index": 0, "function": {"arguments": "{}"}}
LIKELY: JSON = {"content": [{"token": "a", "logprob": -0.5}]}


# One read each: what it brought, and the pieces of it.
@pytest.mark.parametrize(
    ("choices", "pieces"),
    [
        ([text("a"), text("b"), text("c")], ["abc"]),
        ([delta(role="assistant", content=""), text("a")], ["a"]),
        ([delta(role="assistant", content=None), text(None), text("")], []),
        (
            [text("a"), delta(tool_calls=[CALL]), delta(tool_calls=[REST]), text("b")],
            [
                "a",
                Delta(0, {"tool_calls": [CALL]}),
                Delta(0, {"tool_calls": [REST]}),
                "b",
            ],
        ),
        (
            [delta(reasoning_content="h"), delta(reasoning_content="m"), text("a")],
            [Delta(0, {"reasoning_content": "hm"}), "a"],
        ),
        (
            [delta(content="", reasoning="hm", role="assistant", tool_calls=[])],
            [Delta(0, {"reasoning_content": "hm"})],
        ),
        ([delta(refusal="no")], [Delta(0, {"refusal": "no"})]),
        (
            [text("a", logprobs=LIKELY), text("a", logprobs=LIKELY), text("b")],
            [
                Delta(0, {"content": "a"}, LIKELY),
                Delta(0, {"content": "a"}, LIKELY),
                "b",
            ],
        ),
        ([delta(content="a", role="assistant", tool_calls=None, refusal=None)], ["a"]),
        ([{"text": "a"}, {"index": 0, "text": "b", "logprobs": None}], ["ab"]),
        # One choice was asked for, however the server numbers it.
        ([text("a", 1), text("b", 1), text("another", 0)], ["ab"]),
        ([text("a"), text("another", 1), text("another", 2048)], ["a"]),
        ([text("a", -1), text("b", -1)], ["ab"]),
        ([{}], []),
    ],
)
def test_one_read_is_joined_into_few_pieces_in_order(
    choices: list[dict[str, Any]], pieces: list[AnswerPiece]
) -> None:
    assert AnswerReader().feed(b"".join(map(event, choices))) == pieces


def test_a_read_takes_as_many_calls_however_many_events_it_has() -> None:
    def reads(tokens: int) -> list[bytes]:
        """Two reads, which are cut in an event."""
        role, end = event(delta(role="assistant", content="")), event() + DONE
        data = role + event(text("a")) * tokens + end
        return [data[: len(data) // 2], data[len(data) // 2 :]]

    def feed(tokens: int, line_end: bytes = b"\n") -> None:
        answer = AnswerReader()
        for data in reads(tokens):
            answer.feed(data.replace(b"\n", line_end))
        assert answer.done

    for line_end in (b"\n", b"\r\n"):
        assert calls(partial(feed, 10, line_end)) == calls(partial(feed, 99, line_end))


def test_fields_of_one_chunk_keep_their_order() -> None:
    assert AnswerReader().feed(event(text("a"), delta(tool_calls=[CALL]))) == [
        "a",
        Delta(0, {"tool_calls": [CALL]}),
    ]


def test_each_choice_has_its_own_finish_reason() -> None:
    answer = AnswerReader(choices=2)

    pieces = answer.feed(
        event(text("a"))
        + event(text("b", 1))
        + event(text("c", 1))
        + event(text(None, 1, finish_reason="length"))
        + event(text(None, finish_reason="stop"))
        + event(usage={"prompt_tokens": 3, "completion_tokens": 9})
        + DONE
    )

    assert pieces == [
        Delta(0, {"content": "a"}),
        Delta(1, {"content": "bc"}),
        Delta(1, {}, None, "length"),
        Delta(0, {}, None, "stop"),
    ]
    assert answer.finished() == Finished("stop", Usage(3, 9))


def test_usage_of_llama_cpp_choices_is_summed() -> None:
    answer = AnswerReader(choices=2, prompts=2)

    for index, prompt_tokens in enumerate((10, 10, 7, 7)):
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 5}
        answer.feed(event(text("a", index, finish_reason="stop"), usage=usage))
    answer.feed(DONE)

    assert answer.finished().usage == Usage(17, 20)


@pytest.mark.parametrize("end", [DONE, b""])
def test_missing_choices_are_told(end: bytes) -> None:
    answer = AnswerReader(choices=3)
    answer.feed(event(text("a", finish_reason="length")) + end)

    assert answer.finished() == Finished("length")
    assert answer.missing == [1, 2]


def test_missing_answer_to_one_of_several_prompts_is_an_error() -> None:
    answer = AnswerReader(prompts=3)
    answer.feed(event(text("a", finish_reason="stop")) + DONE)

    with pytest.raises(JobError, match="left out 2 of 3 choices"):
        answer.finished()


def test_answer_with_one_of_two_ends_is_incomplete() -> None:
    answer = AnswerReader(choices=2)
    answer.feed(event(text("a", finish_reason="stop")) + event(text("b", 1)))

    with pytest.raises(Unavailable, match="ended in the middle"):
        answer.finished()


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_aborted_answer_is_incomplete(reason: str) -> None:
    with pytest.raises(Unavailable, match="aborted the answer"):
        AnswerReader().feed(event(text("a", finish_reason=reason)))


@pytest.mark.parametrize(
    ("reason", "known"),
    [
        *((reason, "stop") for reason in ("", "x" * 9999, "\0", "eos", "tool_calls")),
        *((reason, "length") for reason in ("length", "max_tokens", "MAX_TOKENS")),
        (7, "stop"),
        ({"type": "stop"}, "stop"),
    ],
)
def test_finish_reason_becomes_one_that_clients_know(
    reason: object, known: str
) -> None:
    answer = AnswerReader()
    answer.feed(event(text("a", finish_reason=reason)))

    assert answer.finished() == Finished(known)


@pytest.mark.parametrize(
    ("reason", "known"),
    [
        *(
            (reason, "tool_calls")
            for reason in ("stop", "", "function_call", "tool_use")
        ),
        ("length", "length"),
    ],
)
def test_answer_with_calls_ends_with_calls(reason: str, known: str) -> None:
    for choices in (1, 2):
        answer = AnswerReader(choices)
        answer.feed(
            event(delta(tool_calls=[CALL]), text("a", 1))
            + event(text("", finish_reason=reason), text("", 1, finish_reason="stop"))
            + DONE
        )

        assert answer.finished().finish_reason == known


def test_a_blank_finish_reason_in_each_chunk_is_none() -> None:
    whole, cut = AnswerReader(), AnswerReader()
    chunks = event(text("a", finish_reason="")) * 2

    assert read_all(chunks + DONE, whole) == ["aa"]
    assert whole.finished() == Finished("stop")
    read_all(chunks, cut)
    with pytest.raises(Unavailable, match="ended in the middle"):
        cut.finished()


def read_all(data: bytes, reader: AnswerReader | None = None) -> list[AnswerPiece]:
    reader = reader or AnswerReader()
    return [*reader.feed(data), *reader.end()]


HELLO = event(text("Hello"))
STOP = event(text(None, finish_reason="stop"))
COUNTS = {"prompt_tokens": 10, "completion_tokens": 5}
LONG = b"1" * 5000  # digits, more than Python takes


@pytest.mark.parametrize(
    ("stream", "usage"),
    [
        (HELLO + STOP + event(usage=COUNTS) + DONE, Usage(10, 5)),
        # No [DONE], or no end of the last event.
        (HELLO + STOP, None),
        (HELLO + STOP[:-2], None),
        (HELLO + DONE[:-2], None),
        (HELLO + b"data: [done]  \n\n", None),
        (HELLO + b'data: "[DONE]"\n\n', None),
        # Events without anything in them.
        (b"data: \n\n" + HELLO + b"data:\n\ndata: \n\n" + STOP + DONE, None),
        (b"data: null\n\n" + HELLO + b"data: {}\n\ndata: []\n\n" + STOP, None),
        (
            b'data: {"type": "ping"}\n\ndata: {"status": "working"}\n\n' + HELLO + DONE,
            None,
        ),
        # Lines without an empty one in between, a list of chunks, or other lines.
        ((HELLO + STOP + DONE).replace(b"\n\n", b"\n"), None),
        ((HELLO + STOP).replace(b"\n\n", b"\n") + b"data: {", None),
        (b"data: [%b,%b]\n\n" % (HELLO[6:-2], STOP[6:-2]) + DONE, None),
        (HELLO[6:-1] + STOP[6:-1], None),
        # Null, missing or odd fields.
        (HELLO + STOP + event(usage=COUNTS).replace(b"[]", b"null"), Usage(10, 5)),
        (HELLO + STOP + event(usage=COUNTS).replace(b"[]", b"4"), Usage(10, 5)),
        (HELLO + STOP + event(usage=COUNTS).replace(b"[]", b"[null, 5]"), Usage(10, 5)),
        (HELLO.replace(b'"index": 0', b'"index": null') + STOP, None),
        (HELLO.replace(b'"index": 0, ', b"") + STOP, None),
        (HELLO.replace(b'"index": 0', b'"index": "0"') + STOP, None),
        (HELLO.replace(b'"index": 0', b'"index": 0.0') + STOP, None),
        (HELLO.replace(b'"index": 0', b'"index": %b' % LONG) + STOP, None),
        (HELLO.replace(b"[{", b"{").replace(b"}]", b"}") + STOP, None),
        (HELLO.replace(b'{"content": "Hello"}', b'"Hello"') + STOP, None),
        (HELLO.replace(b'"Hello"', b'[{"text": "Hel"}, {"text": "lo"}]') + STOP, None),
        (HELLO + event({"finish_reason": "stop"}) + DONE, None),
        (event(text("Hello", finish_reason=False)) + STOP, None),
        (event(text("Hello"), error=None, object="chat.completion.chunk") + STOP, None),
        (event(text("Hello"), error="", usage=None) + STOP, None),
        (event(text("Hello"), model=["m"], created="now", id=None) + STOP, None),
        (event(text("Hello")).replace(b"}]}", b'}], "nan": NaN}') + STOP, None),
        (event(text("Hello")).replace(b"}]}", b'}], "odd": -1e999}') + STOP, None),
        # Counts.
        (HELLO + STOP + event(usage={**COUNTS, "completion_tokens": None}), None),
        (HELLO + STOP + event(usage={"prompt_tokens": 10}), None),
        (HELLO + STOP + event(usage={}), None),
        (HELLO + STOP + event(usage=[1]), None),
        (HELLO + STOP + event(usage=-1), None),
        (HELLO + STOP + event(usage={**COUNTS, "completion_tokens": -1}), None),
        (HELLO + STOP + event(usage={**COUNTS, "completion_tokens": 2**40}), None),
        (
            HELLO + event(usage={"input_tokens": 1e1, "output_tokens": "5"}) + DONE,
            Usage(10, 5),
        ),
        (
            HELLO + STOP + event(usage={"prompt_tokens": 10, "total_tokens": 15}),
            Usage(10, 5),
        ),
        (
            HELLO + STOP + event(usage={"input_tokens": 10, "output_tokens": 5}),
            Usage(10, 5),
        ),
        (
            HELLO
            + STOP
            + event(
                usage={
                    **COUNTS,
                    "prompt_tokens_details": {"cached_tokens": 8},
                    "completion_tokens_details": {"reasoning_tokens": 3.0},
                }
            ),
            Usage(10, 5, 8, 3),
        ),
        (
            HELLO + STOP + event(usage={**COUNTS, "prompt_tokens_details": None}),
            Usage(10, 5),
        ),
        (event(text("Hello", finish_reason="stop"), usage=COUNTS), Usage(10, 5)),
        # The whole message, in place of the stream or at its end.
        (
            event(
                {"message": {"role": "assistant", "content": "Hello"}}, usage=COUNTS
            )[6:-2],
            Usage(10, 5),
        ),
        (b"\xef\xbb\xbf\n" + event({"text": "Hello"})[6:-2], None),
        (
            HELLO
            + event({"delta": {}, "message": {"content": "Hello"}, "index": 0})
            + STOP,
            None,
        ),
        (
            event(delta(role="assistant"))
            + event({"delta": {}, "message": {"content": "Hello"}})
            + DONE,
            None,
        ),
        (event({"message": {"content": "Hel"}}) + event({"message": {"content": "lo"}})
         + STOP, None),
    ],
)  # fmt: skip
def test_odd_streams_are_read_as_they_are_meant(
    stream: bytes, usage: Usage | None
) -> None:
    for several in (False, True):
        reader = AnswerReader()
        if several:  # each byte by itself
            pieces = [
                piece
                for at in range(len(stream))
                for piece in reader.feed(stream[at : at + 1])
            ]
        else:
            pieces = reader.feed(stream)
        pieces += reader.end()

        assert "".join(str(piece) for piece in pieces) == "Hello"
        assert reader.finished() == Finished("stop", usage)


def test_pretty_printed_body_is_read() -> None:
    message = {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]}
    body = {"choices": [{"message": message, "finish_reason": "length"}]}
    reader = AnswerReader()

    assert read_all(json.dumps(body, indent=2).encode(), reader) == ["Hello"]
    assert reader.finished() == Finished("length")


def test_too_large_body_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "BODY_MAX", 99)

    with pytest.raises(JobError, match="more than 99 bytes"):
        AnswerReader().feed(b"{" + b" " * 99)


def test_characters_that_are_cut_between_chunks_are_joined() -> None:
    def half(escaped: bytes) -> bytes:
        return event(text("?")).replace(b"?", escaped)

    whole = "a🐀b".encode()
    thought = b'data: {"choices":[{"delta":{"reasoning":"%b"}}]}\n\n'

    assert read_all(half(rb"a\ud83d") + half(rb"\udc00b")) == ["a🐀b"]
    assert read_all(half(whole[:3]) + half(whole[3:])) == ["a🐀b"]
    assert read_all(half(rb"a\ud83d") + event(text("b"))) == ["a\ufffdb"]
    assert read_all(half(rb"a\ud83d") + STOP + DONE) == ["a", "\ufffd"]
    assert read_all(thought % rb"\ud83d" + half(rb"\udc00") + thought % rb"\udc00") == [
        "\ufffd",
        Delta(0, {"reasoning_content": "🐀"}),
    ]


def test_logprobs_that_json_cannot_express_are_replaced() -> None:
    def likely(logprob: bytes) -> bytes:
        return event(text("a", logprobs=LIKELY)).replace(b"-0.5", logprob)

    for written, read in ((b"-Infinity", -9999.0), (b"NaN", None), (b"1e999", None)):
        entry: JSON = {"token": "a", "logprob": read}
        assert read_all(likely(written)) == [
            Delta(0, {"content": "a"}, {"content": [entry]})
        ]


def test_too_deep_logprobs_are_left_out() -> None:
    deep = json.loads("[" * 200 + "]" * 200)

    assert read_all(event(text("a", logprobs=deep))) == ["a"]


def test_stop_string_is_told() -> None:
    for field in ("stop_reason", "matched_stop"):
        stopped = text("a", finish_reason="stop")

        assert read_all(event(stopped | {field: "###"})) == [
            Delta(0, {"content": "a", "stop_reason": "###"})
        ]
        assert read_all(event(stopped | {field: 128009})) == ["a"]


@pytest.mark.parametrize(
    "stream", [DONE, b"data: {}\n\n" + DONE, event() + DONE, b'{"choices": []}', b"{}"]
)
def test_an_answer_without_a_choice_is_an_error(stream: bytes) -> None:
    reader = AnswerReader()

    assert read_all(stream, reader) == []
    with pytest.raises(JobError, match="sent an empty answer"):
        reader.finished()


def test_an_empty_stream_is_a_failure_of_the_engine() -> None:
    for stream in (b"", b"data: {", b'data: {"content": "Hello", "stop": true}\n\n'):
        reader = AnswerReader()

        assert read_all(stream, reader) == []
        with pytest.raises(EngineFailed, match="ended in the middle"):
            reader.finished()


def test_an_error_in_a_choice_is_the_answers_error() -> None:
    failed = {"message": "upstream died", "code": 502}
    for choice in (
        delta() | {"finish_reason": "error", "error": failed},
        {"message": {"content": ""}, "index": "0", "error": failed},
    ):
        with pytest.raises(Unavailable, match="upstream died"):
            read_all(event(text("a")) + event(choice) + DONE)


@pytest.mark.parametrize(
    ("reason", "arguments"), [("tool_calls", "{}"), ("stop", "{}"), ("length", "")]
)
def test_a_whole_call_without_arguments_gets_empty_ones(
    reason: str, arguments: str
) -> None:
    function = {"name": "g", "arguments": '{"x":1}'}
    whole = {"index": 1, "id": "c2", "function": function}
    end = delta(content="a") | {"finish_reason": reason}
    stream = event(delta(tool_calls=[CALL])) + event(delta(tool_calls=[whole]))

    pieces = read_all(stream + event(end) + DONE)

    (choice,) = assemble(pieces).choices
    assert choice.fields["content"] == "a"
    made: Any = choice.fields["tool_calls"]
    assert [call["function"] for call in made] == [
        {"name": "f", "arguments": arguments},
        {"name": "g", "arguments": '{"x":1}'},
    ]


def test_a_call_without_a_name_is_an_error() -> None:
    reader = AnswerReader()
    nameless = {"index": 0, "id": "c1", "function": {"arguments": "{}"}}

    assert read_all(event(delta(tool_calls=[nameless])) + STOP + DONE, reader) == []
    with pytest.raises(JobError, match="call without a name"):
        reader.finished()


def test_calls_without_ids_get_different_ones_that_templates_accept() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in "fg"]
    (piece,) = read_all(event(delta(tool_calls=calls)))

    assert isinstance(piece, Delta)
    made: Any = piece.fields["tool_calls"]
    assert [call["function"] for call in made] == [
        {"name": name, "arguments": "{}"} for name in "fg"
    ]
    assert [call["index"] for call in made] == [0, 1]
    first, second = (call["id"] for call in made)
    assert first != second
    assert all(re.fullmatch("[A-Za-z0-9]{9}", each) for each in (first, second))


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b'data: {"error": {"message": "no"}}\n\n', JobError, "^no$"),
        (b'data: {"error": "no"}\n\n', JobError, "^no$"),
        (b'data: {"object": "error", "message": "no"}\n\n', JobError, "^no$"),
        (
            b'event: error\ndata: {"error": {"message": "no", "code": 429}}\n\n',
            Unavailable,
            "no",
        ),
        (
            b'data: {"error": "Trying to keep the first 9 tokens when context the '
            b'overflows. However, the model is loaded with context length of only 4"}'
            b"\n\n",
            ContextExceeded,
            "Trying to keep",
        ),
        # llama.cpp's builds of 2025 have a field of the stream in place of data.
        (
            b'error: {"code":400,"message":"the request exceeds the available context '
            b'size","type":"exceed_context_size_error"}\n\ndata: [DONE]\n\n',
            ContextExceeded,
            "available context size",
        ),
        (b"error: out of paper\n\n", JobError, "^out of paper$"),
        (b"event: error\ndata: out of paper\n\n", JobError, "^out of paper$"),
        (b'event: error\ndata: {"message": "no", "code": 503}\n\n', Unavailable, "no$"),
        (b"event: error\n\n", JobError, "no message"),
        (b'data: {"error": [1]}\n\n', JobError, "^1$"),
        (b'data: {"error": {"message": null}}\n\n', JobError, "no message"),
        (
            b'data: {"error": {"message": NaN, "code": "400"}}\n\n',
            InvalidRequest,
            "nan",
        ),
        (b'data: {"error": true, "message": "no"}\n\n', JobError, "^no$"),
        (b'data: {"error": {"error": {"msg": "no"}}}\n\n', JobError, "^no$"),
        (b'data: {"errors": [{"detail": "no"}]}\n\n', JobError, "^no$"),
        (b'data: {"detail": "no", "choices": []}\n\n', JobError, "^no$"),
        (b'data: {"type": "error", "message": "no"}\n\n', JobError, "^no$"),
        (b'data: {"message": "no", "status": 429}\n\n', Unavailable, "no$"),
        (
            event(text("", finish_reason="error"), error={"message": "no"}),
            JobError,
            "^no$",
        ),
        (
            b'{"error": {"message": "no", "type": "invalid_request_error"}}\n',
            InvalidRequest,
            "^no$",
        ),
        (event(text("a")) + b'{"error": "no"}\n', JobError, "^no$"),
        # What may have been text, or calls.
        (event({"delta": {"tool_calls": "a"}}), JobError, "a str for tool calls"),
        (b"data: Hello\n\n", JobError, "no chunk"),
        (b'data: "Hello"\n\n', JobError, "no chunk of an answer: a str"),
        (b'data: {"choices": [{"delta": {"content": "Hel\n\n', JobError, "no chunk"),
        (b"data: " + b"[" * 100_000 + b"\n\n", JobError, "nested too deeply"),
    ],
)
def test_errors_and_chunks_that_may_be_text_are_errors(
    data: bytes, error: type[ShoalError], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_all(data)


@given(
    cuts=st.lists(st.integers(0, 900), max_size=9),
    choices=st.lists(
        st.sampled_from([text("a"), text("é"), delta(reasoning="r"), text("z", 1)])
    ),
)
def test_any_split_of_the_bytes_yields_the_same_texts(
    cuts: list[int], choices: list[dict[str, Any]]
) -> None:
    stream = b"".join(map(event, choices)) + DONE
    whole, split = AnswerReader(), AnswerReader()
    ends = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]

    pieces: list[AnswerPiece] = []
    for begin, end in pairwise(ends):
        pieces += split.feed(stream[begin:end])

    assert texts_of(pieces) == texts_of(whole.feed(stream))
    assert split.done


def texts_of(pieces: list[AnswerPiece]) -> list[tuple[object, str]]:
    """Every character with whose it is, so that how they are joined does not matter."""
    found: list[tuple[object, str]] = []
    for piece in pieces:
        fields = {"content": piece} if isinstance(piece, str) else piece.fields
        whose = 0 if isinstance(piece, str) else piece.choice
        for name, value in fields.items():
            found += [((whose, name), letter) for letter in str(value)]
    return found
