"""Chunks of peers that pass on what their engines send."""

import json
from typing import Any

from shoal.domain.outcome import Delta
from shoal.protocols.tealenet.codec.chunks import ChunkReader
from shoal.protocols.tealenet.codec.envelope import decode
from shoal.protocols.tealenet.codec.messages import InferenceChunk

ID = "550E8400-E29B-41D4-A716-446655440000"


def chunk(delta: dict[str, Any], reason: str | None = None) -> InferenceChunk:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    message = {"requestID": ID, "chunk": {"choices": [choice]}}
    decoded = decode(json.dumps({"inferenceChunk": message}))
    assert isinstance(decoded, InferenceChunk)
    return decoded


def test_thoughts_have_one_name() -> None:
    reader = ChunkReader(ID)

    assert reader.read(chunk({"reasoning": "hm"}).chunk) == [
        Delta(0, {"reasoning_content": "hm"})
    ]


def test_calls_without_an_index_and_an_id_are_told_apart() -> None:
    reader = ChunkReader(ID)
    function = {"name": "f", "arguments": "{}"}
    calls = [{"function": function}, {"function": {**function, "arguments": {"a": 1}}}]

    pieces = [reader.read(chunk({"tool_calls": [call]}).chunk) for call in calls]
    pieces.append(reader.read(chunk({}, "stop").chunk))

    named: Any = {"type": "function", "function": function}
    second = {"name": "f", "arguments": '{"a":1}'}
    assert pieces == [
        [Delta(0, {"tool_calls": [{"index": 0, "id": "550E84000", **named}]})],
        [
            Delta(
                0,
                {
                    "tool_calls": [
                        {"index": 1, "id": "550E84001", **named, "function": second}
                    ]
                },
            )
        ],
        [],
    ]
    assert reader.finish_reason == "tool_calls"
