import json
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from protocols.tealenet.recordings import case_of
from shoal.domain.answer_assembly import assemble
from shoal.domain.errors import PeerError
from shoal.domain.outcome import AnswerPiece, Choice, Delta, Outcome, Usage
from shoal.protocols.tealenet.codec.chunks import (
    BUFFERED_MAX,
    CHUNK_MAX,
    TEXT_STEP,
    ChunkReader,
    ChunkWriter,
)
from shoal.protocols.tealenet.codec.envelope import BadMessage, decode
from shoal.protocols.tealenet.codec.messages import InferenceChunk

ID = "550E8400-E29B-41D4-A716-446655440000"
CREATED = 1713100000
CALL: dict[str, Any] = {
    "index": 0,
    "id": "c",
    "type": "function",
    "function": {"name": "f"},
}
MORE: dict[str, Any] = {"index": 0, "function": {"arguments": "{}"}}


class _Delta(msgspec.Struct):
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class _Choice(msgspec.Struct):
    index: int
    delta: _Delta
    finish_reason: str | None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class MacChunk(msgspec.Struct):
    """A chunk with the fields that a Mac requires."""

    id: str
    object: str
    created: int
    model: str
    choices: list[_Choice]
    usage: _Usage | msgspec.UnsetType = msgspec.UNSET


texts = st.text(min_size=1, max_size=20)
visible_deltas = st.builds(
    Delta,
    st.integers(0, 3),
    st.fixed_dictionaries({}, optional={"content": texts, "reasoning_content": texts}),
    st.none() | st.fixed_dictionaries({"content": st.just([])}),
    st.none(),
).filter(lambda delta: delta.fields)  # an empty one has no visible part


def writer(**options: bool) -> ChunkWriter:
    return ChunkWriter(ID, "m", CREATED, **options)


def chunks_in(messages: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the chunks in messages; check that a Mac accepts them."""
    chunks = []
    for message in messages:
        payload = json.loads(message)["inferenceChunk"]["_0"]
        assert payload["requestID"] == ID
        mac = msgspec.convert(payload["chunk"], MacChunk)
        assert (mac.object, mac.created, mac.model) == (
            "chat.completion.chunk",
            CREATED,
            "m",
        )
        chunks.append(payload["chunk"])
    return chunks


def choices(delta: dict[str, Any], reason: str | None = None) -> list[dict[str, Any]]:
    """Return the choices of a chunk; the document has the reason in each, or null."""
    return [{"index": 0, "delta": delta, "finish_reason": reason}]


def read(reader: ChunkReader, messages: Sequence[bytes]) -> list[AnswerPiece]:
    pieces: list[AnswerPiece] = []
    for message in messages:
        chunk = decode(message)
        assert isinstance(chunk, InferenceChunk)
        assert chunk.request_id == ID
        pieces += reader.read(chunk.chunk)
    return pieces


@settings(max_examples=examples(0.4))
@given(
    st.lists(texts | visible_deltas, max_size=5), st.sampled_from(["stop", "length"])
)
def test_an_answer_round_trips(pieces: list[AnswerPiece], reason: str) -> None:
    several = any(isinstance(piece, Delta) and piece.choice for piece in pieces)
    out, back = writer(usage=True), ChunkReader(several=several)

    messages = out.write(pieces) + out.write_end(reason, Usage(3, 4))
    arrived = read(back, messages)

    chunks_in(messages)
    assert visible(assemble(arrived, back.finish_reason)) == visible(
        assemble(pieces, reason)
    )
    assert back.usage == Usage(3, 4)


def test_the_role_comes_first_and_the_usage_last() -> None:
    out = writer(usage=True)

    messages = out.write(["He", "llo"]) + out.write([" you"])
    messages += out.write_end("length", Usage(5, 7))

    chunks = [(c["choices"], c.get("usage")) for c in chunks_in(messages)]
    usage = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
    assert chunks == [
        (choices({"role": "assistant", "content": ""}), None),
        (choices({"content": "Hello"}), None),
        (choices({"content": " you"}), None),
        (choices({}, "length"), None),
        ([], usage),
    ]


@pytest.mark.parametrize(
    ("requested", "usage"), [(False, Usage(1, 2)), (True, None), (False, None)]
)
def test_usage_is_sent_only_if_requested_and_known(
    requested: bool, usage: Usage | None
) -> None:
    out = writer(usage=requested)

    chunks = chunks_in(out.write(["a"]) + out.write_end("stop", usage))

    assert all("usage" not in chunk for chunk in chunks)


def test_an_empty_answer_has_a_role_and_a_finish_reason() -> None:
    chunks = chunks_in(writer().write_end("stop"))

    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {},
    ]


def test_tool_calls_and_several_choices_round_trip() -> None:
    pieces: list[AnswerPiece] = [
        Delta(0, {"role": "x", "content": None, "tool_calls": [CALL]}),
        Delta(1, {"content": "other"}, finish_reason="stop"),
        Delta(0, {"tool_calls": [MORE]}, finish_reason="tool_calls"),
    ]
    out, back = writer(), ChunkReader(several=True)

    messages = out.write(pieces) + out.write_end("stop")

    arrived = read(back, messages)
    whole = assemble(arrived)
    assert len([m for m in messages if b'"finish_reason":null' not in m]) == 2
    assert [choice.finish_reason for choice in whole.choices] == ["tool_calls", "stop"]
    assert visible(whole) == visible(assemble(pieces))


def test_an_unknown_finish_reason_becomes_stop() -> None:
    (_, end) = chunks_in(writer().write_end("abort"))

    assert end["choices"][0]["finish_reason"] == "stop"


def test_an_unstreamed_answer_is_one_chunk() -> None:
    out = writer(streaming=False, usage=True)

    assert out.write(["He"]) + out.write(["llo"]) == []
    whole, usage = chunks_in(out.write_end("length", Usage(1, 2)))

    delta = {"role": "assistant", "content": "Hello"}
    assert whole["choices"] == [{"index": 0, "delta": delta, "finish_reason": "length"}]
    assert usage["usage"]["total_tokens"] == 3


def test_an_unstreamed_answer_has_complete_tool_calls() -> None:
    out = writer(streaming=False)
    out.write([Delta(0, {"tool_calls": [CALL]}), Delta(0, {"tool_calls": [MORE]})])

    (chunk,) = chunks_in(out.write_end("tool_calls"))

    (choice,) = chunk["choices"]
    function = {"name": "f", "arguments": "{}"}
    assert choice["delta"]["tool_calls"] == [CALL | {"function": function}]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("reason", "arguments"), [("stop", "{}"), ("length", "")])
def test_a_call_without_arguments_has_empty_ones_unless_truncated(
    reason: str, arguments: str
) -> None:
    out = writer()
    messages = out.write([Delta(0, {"tool_calls": [CALL]})]) + out.write_end(reason)

    (choice,) = assemble(read(ChunkReader(), messages)).choices

    (call,) = cast("list[dict[str, Any]]", choice.fields["tool_calls"])
    assert call["function"] == {"name": "f", "arguments": arguments}


def test_an_empty_unstreamed_answer_has_empty_content() -> None:
    (chunk,) = chunks_in(writer(streaming=False).write_end("stop"))

    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_an_unstreamed_answer_beyond_the_limit_is_streamed() -> None:
    out = writer(streaming=False)

    messages = out.write(["a" * BUFFERED_MAX]) + out.write(["b"]) + out.write(["c"])
    messages += out.write_end("stop")

    assert all(len(message) <= CHUNK_MAX for message in messages)
    assert "".join(map(str, read(ChunkReader(), messages))) == "a" * BUFFERED_MAX + "bc"


@pytest.mark.parametrize("letter", ["a", "\x01", "😀"])
def test_a_long_text_is_split_into_chunks(letter: str) -> None:
    text = letter * (3 * TEXT_STEP + 1)

    messages = writer().write([text])

    assert all(len(message) <= CHUNK_MAX for message in messages)
    assert "".join(map(str, read(ChunkReader(), messages))) == text


def test_a_piece_beyond_the_message_limit_is_refused() -> None:
    piece = Delta(0, {"embedding": "A" * CHUNK_MAX})

    with pytest.raises(PeerError, match="exceeds the limit"):
        writer().write([piece])


def test_a_lone_surrogate_is_replaced() -> None:
    messages = writer().write(["a\ud800b"])

    assert read(ChunkReader(), messages) == ["a\ufffdb"]


def test_flat_chunks_are_read() -> None:
    message = ChunkWriter(ID, "m", CREATED, flat=True).write(["a"])

    assert "_0" not in json.loads(message[0])["inferenceChunk"]
    assert read(ChunkReader(), message) == ["a"]


@pytest.mark.parametrize(
    ("name", "pieces", "reason"),
    [
        ("cluster_swift_emits/inferenceChunk_role", [], "stop"),
        ("cluster_swift_emits/inferenceChunk_content", ["Hello"], "stop"),
        ("cluster_swift_emits/inferenceChunk_finish", [], "stop"),
        (
            "cluster_decode/chunk_llama_server_extras",
            [Delta(0, {"reasoning_content": "x"})],
            "stop",
        ),
        ("cluster_decode/chunk_created_null", [], "stop"),
    ],
)
def test_chunks_of_real_peers_are_read(
    name: str, pieces: list[AnswerPiece], reason: str
) -> None:
    chunk = decode(case_of(name)["json_text"])
    assert isinstance(chunk, InferenceChunk)
    back = ChunkReader()

    assert back.read(chunk.chunk) == pieces
    assert back.finish_reason == reason


def test_usage_is_read_with_unknown_fields() -> None:
    chunk = decode(case_of("cluster_decode/chunk_usage_details")["json_text"])
    assert isinstance(chunk, InferenceChunk)
    back = ChunkReader()

    assert back.read(chunk.chunk) == []
    assert back.usage == Usage(1, 2)


@given(
    st.dictionaries(st.sampled_from(["content", "role", "tool_calls", "x"]), st.none())
)
def test_null_fields_give_no_pieces(delta: dict[str, None]) -> None:
    message = {"requestID": ID, "chunk": {"choices": [{"index": 0, "delta": delta}]}}
    chunk = decode(json.dumps({"inferenceChunk": message}))
    assert isinstance(chunk, InferenceChunk)

    assert ChunkReader().read(chunk.chunk) == []


def test_content_that_is_no_text_is_refused() -> None:
    message = {"requestID": ID, "chunk": {"choices": [{"delta": {"content": [1]}}]}}

    with pytest.raises(BadMessage, match="text"):
        decode(json.dumps({"inferenceChunk": message}))


def visible(outcome: Outcome) -> list[tuple[object, ...]]:
    """Return the visible parts of an outcome, from a text or from choices."""
    text = Choice({"content": outcome.text or None}, outcome.finish_reason)
    return [
        (
            {name: value for name, value in choice.fields.items() if value is not None},
            choice.finish_reason,
            choice.logprobs,
        )
        for choice in outcome.choices or (text,)
    ]
