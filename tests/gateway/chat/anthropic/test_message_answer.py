import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.answer_assembly import assemble
from shoal.domain.errors import NoWorker, WorkerLost
from shoal.domain.ids import JobId
from shoal.domain.outcome import AnswerPiece, Choice, Delta, Outcome, Usage
from shoal.domain.work import Chat
from shoal.gateway.chat.anthropic.message_answer import (
    MessageStreamEncoder,
    encode_message,
    message_form,
)

CHAT = Chat('m"1', ({"role": "user", "content": "fünf"},))
JOB = JobId("j1")


def stream(*, shows_thinking: bool = True) -> MessageStreamEncoder:
    return MessageStreamEncoder(JOB, CHAT, shows_thinking=shows_thinking)


def whole(outcome: Outcome, *, shows_thinking: bool = True) -> dict[str, Any]:
    encoded = encode_message(JOB, CHAT, outcome, shows_thinking=shows_thinking)
    message: dict[str, Any] = json.loads(encoded)
    return message


def call(index: int, arguments: str, **first: str) -> Delta:
    """Return a piece of a tool call; the first one has ``id`` and ``name``."""
    function = {"arguments": arguments, "name": first.get("name")}
    fields = {"index": index, "id": first.get("id"), "function": function}
    return Delta(0, {"tool_calls": [fields]})


def events_in(data: bytes) -> list[dict[str, Any]]:
    """Read the events of a stream."""
    events = []
    for block in data.split(b"\n\n")[:-1]:
        name, line = block.decode().splitlines()
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def read(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Assemble a message as a client does; fail where the events are in disorder."""
    message: dict[str, Any] = {}
    texts: list[str] = []
    opened, ended = None, False
    for event in events:
        assert not ended
        match event:
            case {"type": "ping"}:
                pass
            case {"type": "message_start", "message": begun}:
                assert not message
                assert begun["content"] == []
                message = begun
            case {"type": "content_block_start", "index": index, **rest}:
                assert opened is None
                assert index == len(message["content"])
                opened, texts = index, []
                message["content"].append(rest["content_block"])
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert opened == index
                block = message["content"][index]
                field = {
                    "text_delta": "text",
                    "thinking_delta": "thinking",
                    "input_json_delta": "partial_json",
                    "signature_delta": "signature",
                }[delta["type"]]
                if field == "partial_json":
                    texts.append(delta[field])
                else:
                    block[field] += delta[field]
            case {"type": "content_block_stop", "index": index}:
                assert opened == index
                if message["content"][index]["type"] == "tool_use" and "".join(texts):
                    message["content"][index]["input"] = json.loads("".join(texts))
                opened = None
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                assert opened is None
                message |= delta | {"usage": usage}
            case {"type": "message_stop"}:
                ended = True
            case _:
                raise AssertionError(event)
    assert ended
    return message


def streamed(pieces: Sequence[AnswerPiece], outcome: Outcome, **how: bool) -> bytes:
    encoder = stream(**how)
    return b"".join(encoder.encode([each]) for each in pieces) + encoder.encode_end(
        outcome
    )


def test_text_is_one_block() -> None:
    message = whole(Outcome("hi", usage=Usage(3, 4)))

    assert message == {
        "id": "msg_j1",
        "type": "message",
        "role": "assistant",
        "model": 'm"1',
        "content": [{"type": "text", "text": "hi"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "output_tokens": 4,
        },
    }


PIECES: list[AnswerPiece] = [
    Delta(0, {"role": "assistant", "reasoning_content": "Let me"}),
    Delta(0, {"reasoning_content": " see."}),
    "Two ",
    "calls:\u2028",
    call(0, '{"a":', id="c1", name="f"),
    call(0, "1}"),
    call(1, "", id="c2", name="g"),
]
BLOCKS = [
    {"type": "thinking", "thinking": "Let me see.", "signature": ""},
    {"type": "text", "text": "Two calls:\u2028"},
    {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
    {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
]


def test_stream_and_whole_answer_have_the_same_blocks() -> None:
    outcome = assemble(PIECES, "tool_calls", Usage(1, 2))

    message = read(events_in(streamed(PIECES, outcome)))

    assert message["content"] == BLOCKS
    assert message["stop_reason"] == "tool_use"
    assert message == whole(outcome)


def test_reasoning_is_left_out_unless_requested() -> None:
    outcome = assemble(PIECES, "tool_calls")

    message = read(events_in(streamed(PIECES, outcome, shows_thinking=False)))

    assert message["content"] == BLOCKS[1:]
    assert message == whole(outcome, shows_thinking=False)


def test_a_stream_begins_and_ends_as_documented() -> None:
    data = streamed(["a"], Outcome("a", usage=Usage(3, 4)))

    assert [event["type"] for event in events_in(data)] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert len(data.decode().splitlines()) == 3 * 7


def test_answer_that_came_at_once_is_streamed_whole() -> None:
    outcome = assemble(PIECES, "tool_calls")

    assert read(events_in(stream().encode_end(outcome)))["content"] == BLOCKS


CALLS = [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("fields", "finish_reason", "reason"),
    [
        ({"content": "a"}, "stop", "end_turn"),
        ({"content": "a"}, "length", "max_tokens"),
        ({"content": "a"}, "content_filter", "refusal"),
        ({"content": "a"}, "tool_calls", "end_turn"),
        ({"content": "a"}, "something_new", "end_turn"),
        ({"refusal": "No."}, "stop", "refusal"),
        ({"tool_calls": CALLS}, "stop", "tool_use"),  # some servers say so
        ({"tool_calls": CALLS}, "tool_calls", "tool_use"),
        ({"tool_calls": CALLS}, "length", "max_tokens"),
    ],
)
def test_stop_reason_follows_from_the_answer(
    fields: dict[str, Any], finish_reason: str, reason: str
) -> None:
    outcome = Outcome("", finish_reason, None, (Choice(fields, finish_reason),))

    assert whole(outcome)["stop_reason"] == reason
    assert read(events_in(stream().encode_end(outcome)))["stop_reason"] == reason


@pytest.mark.parametrize(
    ("arguments", "decoded"),
    [
        ("", {}),
        (" ", {}),
        ('{"a":1}', {"a": 1}),
        ('{"a":', {"INVALID_JSON": '{"a":'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ("[" * 5000, {"INVALID_JSON": "[" * 5000}),
        ('{"a":"\ud800"}', {"a": "\ufffd"}),
    ],
)
def test_input_of_a_tool_is_an_object(arguments: str, decoded: dict[str, Any]) -> None:
    outcome = assemble([call(0, arguments, id="c", name="f")], "tool_calls")

    assert whole(outcome)["content"][0]["input"] == decoded


def test_calls_without_an_id_get_one() -> None:
    outcome = assemble([call(0, "{}", name="f"), call(1, "{}", name="f")])

    first, second = (block["id"] for block in whole(outcome)["content"])

    assert first != second
    assert first.startswith("toolu_j1_")


def test_empty_answer_has_no_blocks() -> None:
    assert whole(Outcome(""))["content"] == []
    assert read(events_in(stream().encode_end(Outcome(""))))["content"] == []


def test_answer_that_breaks_off_ends_with_an_error() -> None:
    encoder = stream()
    data = encoder.encode(["a"]) + encoder.encode_error(WorkerLost("it left"))

    *_, last = events_in(data)

    assert last == {
        "type": "error",
        "error": {"type": "api_error", "message": "it left"},
        "request_id": None,
    }


def test_error_before_all_output_is_an_event() -> None:
    *_, last = events_in(stream().encode_error(NoWorker("none", 5)))

    assert last["error"]["type"] == "overloaded_error"


TEXTS = st.text(st.characters(codec=None), min_size=1, max_size=6)
PIECE = st.one_of(
    TEXTS,
    TEXTS.map(lambda text: Delta(0, {"reasoning_content": text})),
    TEXTS.map(lambda text: Delta(0, {"refusal": text})),
    TEXTS.map(lambda text: Delta(1, {"content": text})),
    st.integers(0, 2).map(
        lambda index: call(index, '{"a":1}', id=f"c{index}", name="f")
    ),
)


# Unique: a second call with the same index would continue the first.
@given(st.lists(PIECE, max_size=8, unique_by=str), st.booleans(), st.integers(1, 8))
def test_stream_adds_up_to_the_whole_answer_however_its_pieces_come(
    pieces: list[AnswerPiece], shown: bool, at_once: int
) -> None:
    outcome = assemble(pieces, "stop", Usage(1, 1))
    encoder = stream(shows_thinking=shown)

    sent = b"".join(
        encoder.encode(pieces[start : start + at_once])
        for start in range(0, len(pieces), at_once)
    ) + encoder.encode_end(outcome)

    assert read(events_in(sent)) == whole(outcome, shows_thinking=shown)


@given(st.lists(TEXTS, min_size=1))
def test_text_is_streamed_unchanged(texts: list[str]) -> None:
    outcome = assemble(texts)

    message = read(events_in(streamed(texts, outcome)))

    assert message["content"] == whole(outcome)["content"]


def test_silence_is_a_ping() -> None:
    form = message_form(CHAT, shows_thinking=False)

    assert events_in(form.keepalive) == [{"type": "ping"}]
