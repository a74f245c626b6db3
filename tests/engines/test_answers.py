"""The pieces in a streamed answer."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import ContextExceeded, JobError, ShoalError, Unavailable
from shoal.domain.outcome import AnswerPiece, Delta, Usage
from shoal.domain.work import JSON
from shoal.engines.answers import AnswerReader
from shoal.engines.engine import Finished


def event(*choices: dict[str, Any], **chunk: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": choices, **chunk}).encode()


def text(content: str | None, index: int = 0, **choice: Any) -> dict[str, Any]:
    return {"index": index, "delta": {"content": content}, **choice}


def delta(index: int = 0, **fields: Any) -> dict[str, Any]:
    return {"index": index, "delta": fields}


DONE = b"data: [DONE]\n\n"
CALL: JSON = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f"}}
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
            [Delta(0, {"reasoning": "hm"})],
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
        ([text("a", 1), text("b", 1)], [Delta(1, {"content": "ab"})]),
        ([{}], []),
    ],
)
def test_one_read_is_joined_into_few_pieces_in_order(
    choices: list[dict[str, Any]], pieces: list[AnswerPiece]
) -> None:
    assert AnswerReader().feed(b"".join(map(event, choices))) == pieces


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


def test_missing_choice_is_detected() -> None:
    answer = AnswerReader(choices=3)
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
    with pytest.raises(Unavailable, match="gave the answer up"):
        AnswerReader().feed(event(text("a", finish_reason=reason)))


@pytest.mark.parametrize("reason", ["", "x" * 9999, "\0", "eos"])
def test_unknown_finish_reason_becomes_stop(reason: str) -> None:
    answer = AnswerReader()
    answer.feed(event(text("a", finish_reason=reason)))

    assert answer.finished() == Finished("stop")


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
        (b'data: {"error": [1]}\n\n', JobError, "chunk"),
        (event(text("a", -1)), JobError, "chunk"),
        (event(text("a", 2048)), JobError, "chunk"),
        (event({"delta": {"content": ["a"]}}), JobError, "a list for text"),
        (event({"delta": {"tool_calls": "a"}}), JobError, "a str for tool calls"),
        (event({"delta": {"tool_calls": [{"index": -1}]}}), JobError, "the index -1"),
        (b'data: {"choices": [{"delta": "a"}]}\n\n', JobError, "chunk"),
        (b"data: " + b"[" * 100_000 + b"\n\n", JobError, "chunk"),
    ],
)
def test_malformed_chunk_is_an_error(
    data: bytes, error: type[ShoalError], message: str
) -> None:
    with pytest.raises(error, match=message):
        AnswerReader().feed(data)


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
