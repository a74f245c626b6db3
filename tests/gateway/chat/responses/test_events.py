"""Events of responses: their order, their numbers, and streams that are resumed."""

import itertools
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from harness.slow_imports import openai
from shoal.domain.answer_assembly import assemble
from shoal.domain.errors import Cancelled, JobError
from shoal.domain.ids import JobId
from shoal.domain.outcome import AnswerPiece, Delta, Outcome, Usage
from shoal.domain.work import Chat
from shoal.gateway.chat.responses.body import ResponseFields
from shoal.gateway.chat.responses.events import NUMBERS_PER_START, ResponseEventEncoder
from shoal.gateway.chat.responses.response_object import ResponseDraft

CHAT = Chat("m1", ({"role": "user", "content": "hi"},))
USAGE = Usage(3, 5)


@cache
def event_type() -> TypeAdapter[Any]:
    """Return the type of all events that the client knows: it takes long to make."""
    return TypeAdapter(openai.types.responses.ResponseStreamEvent)


def draft(**fields: Any) -> ResponseDraft:
    return ResponseDraft(JobId("job1"), CHAT, ResponseFields(1_700_000_000, **fields))


def parse(stream: bytes) -> list[dict[str, Any]]:
    """Parse server-sent events, and check that each names its type."""
    events = []
    for block in stream.decode().split("\n\n")[:-1]:
        head, data = block.split("\n")
        event = msgspec.json.decode(data.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        events.append(event)
    return events


def streamed(
    pieces: Iterable[AnswerPiece],
    end: Outcome,
    *,
    after: int = -1,
    of: ResponseDraft | None = None,
) -> bytes:
    encoder = ResponseEventEncoder(of or draft(), after=after)
    parts = [encoder.encode([piece]) for piece in pieces]
    return b"".join([*parts, encoder.encode_end(end)])


def call(index: int, name: str, arguments: str) -> list[AnswerPiece]:
    """Return the pieces of a tool call: its name, and each half of its arguments."""
    half = len(arguments) // 2
    changes: list[dict[str, Any]] = [
        {"id": f"c{index}", "function": {"name": name}},
        {"function": {"arguments": arguments[:half]}},
        {"function": {"arguments": arguments[half:]}},
    ]
    return [Delta(fields={"tool_calls": [{"index": index, **c}]}) for c in changes]


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)


@st.composite
def answers(draw: st.DrawFn) -> list[AnswerPiece]:
    """Return the pieces of an answer whose parts come in any order."""
    runs: list[list[AnswerPiece]] = []
    for _ in range(draw(st.integers(0, 3))):
        runs.append([*draw(st.lists(texts, max_size=4))])
        for field in ("reasoning_content", "refusal"):
            given = draw(st.lists(texts, max_size=2))
            runs.append([Delta(fields={field: text}) for text in given])
    for index in range(draw(st.integers(0, 2))):
        arguments = msgspec.json.encode({"x": draw(texts)}).decode()
        runs.append(call(index, f"f{index}", arguments))
    return [piece for run in draw(st.permutations(runs)) for piece in run]


def joined(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return events with adjacent deltas as one: how a text is cut means nothing."""
    merged: list[dict[str, Any]] = []
    for delta, group in itertools.groupby(events, key=lambda event: "delta" in event):
        if not delta:
            merged += group
            continue
        for _, of_item in itertools.groupby(group, key=lambda event: event["item_id"]):
            parts = list(of_item)
            merged.append(
                parts[-1] | {"delta": "".join(part["delta"] for part in parts)}
            )
    return merged


@given(pieces=answers(), data=st.data())
def test_cut_stream_that_is_resumed_brings_each_event_once(
    pieces: list[AnswerPiece], data: st.DataObject
) -> None:
    outcome = assemble(pieces, usage=USAGE)
    whole = streamed(pieces, outcome)
    cut = data.draw(st.integers(0, len(whole)))
    arrived = parse(whole[: whole.rfind(b"\n\n", 0, cut) + 2] if cut > 1 else b"")
    last = arrived[-1]["sequence_number"] if arrived else -1

    running = parse(streamed(pieces, outcome, after=last))
    stored = parse(streamed([], outcome, after=last))

    assert joined(arrived + running) == joined(parse(whole))
    assert joined(arrived + stored) == joined(parse(whole))


@given(pieces=answers())
def test_events_are_in_order_and_add_up_to_the_response(
    pieces: list[AnswerPiece],
) -> None:
    events = parse(streamed(pieces, assemble(pieces, usage=USAGE)))

    numbers = [event["sequence_number"] for event in events]
    assert numbers == sorted(set(numbers))
    types = [event["type"] for event in events]
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-1] == "response.completed"
    begun = [e["item"] for e in events if e["type"] == "response.output_item.added"]
    ended = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert [item["id"] for item in begun] == [item["id"] for item in ended]
    assert ended == events[-1]["response"]["output"]
    for item in ended:
        deltas = "".join(
            event["delta"]
            for event in events
            if event.get("item_id") == item["id"] and "delta" in event
        )
        content = item.get("content") or [{"text": item.get("arguments")}]
        assert deltas == (content[0].get("text") or content[0].get("refusal"))
    whole = msgspec.to_builtins(draft().answered(assemble(pieces, usage=USAGE)))
    assert whole == events[-1]["response"]


@given(pieces=answers())
def test_clients_types_accept_every_event(pieces: list[AnswerPiece]) -> None:
    types = openai.types.responses
    for fields in ({}, {"summary": "auto", "background": True}):
        events = parse(streamed(pieces, assemble(pieces), of=draft(**fields)))

        for event in events:
            known = event_type().validate_python(event)
            assert isinstance(known, openai.BaseModel)
            assert known.to_dict(mode="json") == event
        response = types.Response.model_validate(events[-1]["response"])
        assert response.output_text == "".join(
            piece for piece in pieces if isinstance(piece, str)
        )


def test_number_counts_the_characters_of_a_text() -> None:
    events = parse(streamed(["Hé", "l", "lo"], Outcome("Héllo")))

    deltas = [(e["delta"], e["sequence_number"]) for e in events if "delta" in e]
    assert deltas == [("Hé", 5), ("l", 6), ("lo", 8)]
    assert events[-1]["sequence_number"] == 12


def test_reasoning_is_its_own_summary_if_one_was_requested() -> None:
    pieces: list[AnswerPiece] = [Delta(fields={"reasoning_content": "Hm."}), "Yes."]

    events = parse(streamed(pieces, assemble(pieces), of=draft(summary="auto")))

    assert [event["type"] for event in events[2:8]] == [
        "response.output_item.added",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        "response.output_item.done",
    ]
    assert events[7]["item"]["summary"] == [{"type": "summary_text", "text": "Hm."}]


def test_truncated_answer_is_incomplete() -> None:
    events = parse(streamed(["Hel"], Outcome("Hel", "length")))

    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


def test_answer_that_breaks_off_is_a_failed_response() -> None:
    encoder = ResponseEventEncoder(draft())

    events = parse(
        encoder.encode(["Hel"]) + encoder.encode_error(JobError("no memory"))
    )

    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"] == {
        "code": "server_error",
        "message": "no memory",
        "type": "job_failed",
    }
    assert response["output"][0]["content"][0]["text"] == "Hel"


def test_failure_comes_after_all_that_the_client_has() -> None:
    encoder = ResponseEventEncoder(draft(), after=40)

    (event,) = parse(encoder.encode_error(Cancelled("by its owner")))

    assert event["sequence_number"] == 41
    assert event["response"]["status"] == "cancelled"
    assert event["response"]["error"] is None


def test_interrupted_stream_ends_with_an_error() -> None:
    encoder = ResponseEventEncoder(draft(background=True))

    events = parse(encoder.encode(()) + encoder.encode_interruption(Cancelled("slow")))

    types = [event["type"] for event in events]
    assert types == ["response.created", "response.queued", "error"]
    assert event_type().validate_python(events[-1]).message == "slow"


def test_answer_that_began_anew_has_numbers_of_its_own() -> None:
    encoder = ResponseEventEncoder(draft(), starts=2)

    events = parse(encoder.encode(["hi"]))

    assert events[0]["sequence_number"] == 2 * NUMBERS_PER_START


def test_logprobs_are_those_of_the_shown_text() -> None:
    tokens = [
        {
            "token": token,
            "logprob": -0.5,
            "bytes": [*token.encode()],
            "top_logprobs": [],
        }
        for token in ("He", "llo", "!")
    ]
    pieces: list[AnswerPiece] = [
        Delta(fields={"content": token["token"]}, logprobs={"content": [token]})
        for token in tokens
    ]
    outcome = assemble(pieces)
    first = next(e for e in parse(streamed(pieces, outcome)) if "delta" in e)

    for resumed in (pieces, []):
        events = parse(streamed(resumed, outcome, after=first["sequence_number"]))

        deltas = [event["logprobs"] for event in events if "delta" in event]
        assert [token for each in deltas for token in each] == tokens[1:]
        (item,) = events[-1]["response"]["output"]
        assert item["content"][0]["logprobs"] == tokens
