"""Answers of model servers, read as the worker does and written in every dialect.

Whatever a server sends, its answer is read or is an error of the server; no text,
thought or call in it is lost so that an empty answer would be taken for the whole.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fuzz.mutations import SEPARATOR
from shoal.domain.answer_assembly import assemble
from shoal.domain.errors import PeerError, ShoalError
from shoal.domain.ids import JobId
from shoal.domain.outcome import AnswerPiece, Delta, Outcome
from shoal.domain.work import Chat, Completion, Embedding, Rerank, Transcription
from shoal.engines.input_answers import decode_input_answer
from shoal.engines.streams.answers import AnswerReader
from shoal.gateway.chat.anthropic.message_answer import message_form
from shoal.gateway.chat.job_answers import AnswerForm
from shoal.gateway.chat.ollama.answers import AnswerShape, OllamaAnswer, Stopwatch
from shoal.gateway.chat.openai.answers import answer_form
from shoal.gateway.chat.responses.body import ResponseFields
from shoal.gateway.chat.responses.events import ResponseEventEncoder
from shoal.gateway.chat.responses.response_object import ResponseDraft
from shoal.gateway.http.responses import encode_json

JOB = JobId("job1")
NOW = 1_700_000_000
HI = ({"role": "user", "content": "hi"},)
CHAT = Chat("m", HI, options={"stop": ["END"], "logprobs": True})
COMPLETION = Completion("m", "hi", options={"logprobs": 1})
CUTS = (61, 997)  # bytes of a read


def _call(index: int | None = 0, **function: object) -> dict[str, Any]:
    call: dict[str, Any] = {"function": function}
    return call if index is None else {"index": index, **call}


def _chunks(*choices: Any, **more: Any) -> list[bytes]:
    """Return the events of a stream: its choices, and the last chunk, if any."""
    chunks = [{"choices": [{"index": 0, **each}]} for each in choices]
    chunks += [{"choices": [], **more}] if more else []
    named = [{"id": "c", "object": "chat.completion.chunk", **each} for each in chunks]
    return [b"data: " + json.dumps(each).encode() for each in named]


def _deltas(
    *deltas: Mapping[str, Any], reason: str = "stop", **more: Any
) -> list[bytes]:
    choices = [{"delta": each, "finish_reason": None} for each in deltas]
    return _chunks(*choices, {"delta": {}, "finish_reason": reason}, **more)


USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
LIKELY = {
    "content": [
        {"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []},
    ]
}
DONE = [b"data: [DONE]"]

# As real servers send them, shortened.
RECORDED: Mapping[str, Sequence[bytes]] = {
    "llama-server": [
        *_deltas(
            {"role": "assistant", "content": None},
            {"reasoning_content": "Let me "},
            {"reasoning_content": "see."},
            {"content": "Hi"},
            usage={**USAGE, "prompt_tokens_details": {"cached_tokens": 8}},
            timings={"cache_n": 8, "predicted_ms": 1.5},
        ),
        *DONE,
    ],
    "llama-server with calls": [
        *_deltas(
            {"role": "assistant", "content": None},
            {
                "tool_calls": [
                    {"index": 0, "id": "a", "type": "function"}
                    | _call(name="f", arguments="{")
                ]
            },
            {"tool_calls": [_call(arguments='"city":"Paris"}')]},
            {
                "tool_calls": [
                    {"index": 1, "id": "b"} | _call(1, name="g", arguments="")
                ]
            },
            {"tool_calls": [_call(1, arguments="{}")]},
            reason="tool_calls",
            usage=USAGE,
        ),
        *DONE,
    ],
    "llama.cpp of 2025 at an error": [
        b'error: {"code":400,"message":"the request exceeds the context size"}',
        *DONE,
    ],
    "vLLM": [
        *_chunks(
            {"delta": {"role": "assistant", "content": ""}, "logprobs": None},
            {"delta": {"reasoning": "hm", "reasoning_content": "hm"}},
            {"delta": {"content": "Hi"}, "logprobs": LIKELY, "token_ids": [5]},
            {"delta": {"content": ""}, "finish_reason": "stop", "stop_reason": "END"},
            usage=USAGE,
        ),
        *DONE,
    ],
    "vLLM at an error": [
        *_deltas({"content": "H"})[:1],
        b'data: {"error":{"message":"EngineCore died","type":"Internal","code":500}}',
    ],
    "an older vLLM with calls": [
        *_deltas(
            {"tool_calls": [{"id": "x1"} | _call(name="f")]},
            {"tool_calls": [{"id": "x2"} | _call(arguments="{")]},
            {"tool_calls": [{"id": "x3"} | _call(arguments="}")]},
        ),
        *DONE,
    ],
    "Ollama": [
        *_deltas(
            {"role": "assistant", "content": "", "reasoning": "hm"},
            {"role": "assistant", "content": "Hi"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": name, "type": "function"} | _call(name="f", arguments="{}")
                    for name in ("a", "b")
                ],
            },
        ),
        *DONE,
    ],
    "LM Studio": [
        *_deltas({"role": "assistant", "content": "Hi"}, usage=USAGE),
        *DONE,
    ],
    "LM Studio at an error": [
        b'event: error\ndata: {"error":{"message":"Context size has been exceeded."}}',
    ],
    "SGLang": [
        *_chunks(
            {"delta": {"role": "assistant", "content": "", "tool_calls": None}},
            {"delta": {"content": "Hi"}, "matched_stop": None},
            {"delta": {}, "finish_reason": "stop", "matched_stop": 151645},
        ),
        *_chunks(usage={**USAGE, "prompt_tokens_details": None}),
        *DONE,
    ],
    "MLX": [
        *_deltas(
            {"role": "assistant", "content": "Hi", "reasoning": "", "tool_calls": []}
        ),
        b": keepalive 1/2",
        *DONE,
    ],
    "transformers": _deltas({"role": "assistant"}, {"content": "Hi"}),
    "Mistral": [
        *_deltas(
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                    {"type": "text", "text": "Hi"},
                ]
            },
            {"tool_calls": [_call(None, name="f", arguments={"city": "Paris"})]},
        ),
        *DONE,
    ],
    "two choices": [
        *_chunks(
            {"index": 0, "delta": {"content": "Hi"}, "finish_reason": None},
            {"index": 1, "delta": {"content": "Ho"}, "finish_reason": None},
            {"index": 1, "delta": {}, "finish_reason": "length"},
            {"index": 0, "delta": {}, "finish_reason": "stop"},
        ),
        *DONE,
    ],
    "a completion": [
        *_chunks(
            {"text": "Hi", "logprobs": {"tokens": ["Hi"], "token_logprobs": [-0.5]}},
            {"text": "", "finish_reason": "length"},
            usage=USAGE,
        ),
        *DONE,
    ],
    "no stream": [
        json.dumps(
            {
                "object": "chat.completion",
                "choices": [
                    {
                        "index": 0,
                        "message": {
                            "role": "assistant",
                            "content": None,
                            "reasoning": "hm",
                            "tool_calls": [
                                {"id": "a"} | _call(name="f", arguments="{}")
                            ],
                        },
                        "finish_reason": "tool_calls",
                    }
                ],
                "usage": USAGE,
            }
        ).encode()
    ],
    "vectors": [
        json.dumps(
            {
                "data": [
                    {"index": 1, "embedding": [0.5, -1]},
                    {"index": 0, "embedding": "AAAAPwAAgD8="},
                ],
                "results": [
                    {"index": 0, "relevance_score": 0.5},
                    {"index": 1, "score": 1e-3},
                ],
                "text": "Hello.",
                "segments": [{"start": 0.0, "end": 1.5, "text": "Hello."}],
                "duration": "1.5",
                "usage": {"prompt_tokens": 7, "total_tokens": 7},
            }
        ).encode()
    ],
}


def answers(data: bytes) -> None:
    """Read an answer in each way, and write it in each dialect."""
    stream = data.replace(SEPARATOR, b"\n\n") + b"\n\n"
    errors = [_tried(stream, choices) for choices in (1, 2)]
    if all(errors):
        raise PeerError(str(errors[0]))


def inputs(data: bytes) -> None:
    """Read vectors, scores and a transcription."""
    refused = 0
    works = (
        Embedding("m", ("a", "b"), {"dimensions": 2}),
        Rerank("m", "q", ("a", "b")),
        Transcription("m", "", "wav"),
    )
    for work in works:
        try:
            pieces, _ = decode_input_answer(work, data)
        except ShoalError:
            refused += 1
            continue
        assert pieces
        json.dumps([dict(piece.fields) for piece in pieces], allow_nan=False).encode()
    if refused == len(works):
        raise PeerError("nothing is in it")


def seeds() -> list[bytes]:
    """Return the recorded answers."""
    return [SEPARATOR.join(events) for events in RECORDED.values()]


def input_seeds() -> list[bytes]:
    """Return the recorded answers to work on inputs."""
    return [b"".join(RECORDED["vectors"])]


def _tried(stream: bytes, choices: int) -> ShoalError | None:
    """Read and write an answer; return the server's error, if it is one."""
    found = [_read(stream, choices, size) for size in (len(stream), *CUTS)]
    first = found[0]
    if isinstance(first, ShoalError):
        assert all(isinstance(each, ShoalError) for each in found), "it depends on cuts"
        return first
    pieces, outcome = first
    for each in found[1:]:
        assert not isinstance(each, ShoalError), "it depends on cuts"
        assert _comparable(each[1]) == _comparable(outcome), "it depends on cuts"
    _check_calls(pieces)
    if choices == 1 and _tells_something(stream):
        assert outcome.text or any(_contents(outcome)), "an answer became an empty one"
    _write(pieces, outcome)
    return None


def _read(
    stream: bytes, choices: int, size: int
) -> tuple[list[AnswerPiece], Outcome] | ShoalError:
    reader = AnswerReader(choices)
    pieces: list[AnswerPiece] = []
    try:
        for at in range(0, len(stream), size):
            pieces += reader.feed(stream[at : at + size])
        pieces += reader.end()
        end = reader.finished()
    except ShoalError as error:
        return error
    return pieces, assemble(pieces, end.finish_reason, end.usage)


def _comparable(outcome: Outcome) -> object:
    """Return what does not change with the reads: ids may be made, and be others."""
    choices = [
        (
            {
                **choice.fields,
                "tool_calls": [call["function"] for call in _calls(choice)],
            },
            choice.finish_reason,
            choice.logprobs,
        )
        for choice in outcome.choices
    ]
    return outcome.text, outcome.finish_reason, outcome.usage, choices


def _calls(choice: Any) -> Any:
    return choice.fields.get("tool_calls", ())


def _contents(outcome: Outcome) -> Iterable[object]:
    for choice in outcome.choices:
        for name in ("content", "reasoning_content", "refusal", "tool_calls"):
            yield choice.fields.get(name)


def _check_calls(pieces: Sequence[AnswerPiece]) -> None:
    """Check that the first piece of each call has all that names it."""
    begun: dict[int, list[str]] = {}
    for piece in pieces:
        calls: Any = (
            piece.fields.get("tool_calls", ()) if isinstance(piece, Delta) else ()
        )
        for call in calls:
            assert isinstance(piece, Delta)
            ids = begun.setdefault(piece.choice, [])
            if call["index"] == len(ids):
                assert call["id"] not in ("", *ids)
                assert call["function"]["name"]
                ids.append(call["id"])
            assert call["index"] < len(ids)
            assert isinstance(call["function"]["arguments"], str)


def _tells_something(stream: bytes) -> bool:
    """Return whether the first choice of a stream surely has a text."""
    first: object = None
    for event in stream.split(b"\n\n"):
        if event.startswith(b"data: [DONE]"):
            return False
        if not event.startswith(b"data: {") or b"\n" in event or b"\r" in event:
            return False
        try:
            (choice,) = json.loads(event[6:])["choices"]
            index, content = choice["index"], choice["delta"].get("content")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return False
        if not isinstance(index, int) or isinstance(index, bool):
            return False
        first = index if first is None else first
        if index == first and isinstance(content, str) and content:
            return True
    return False


def _write(pieces: Sequence[AnswerPiece], outcome: Outcome) -> None:
    """Write the answer in each dialect, whole and as a stream."""
    for form in _forms():
        json.loads(form.encode(JOB, outcome, NOW))
        stream = form.stream(JOB, NOW)
        written = b"".join(stream.encode([piece]) for piece in pieces)
        written += stream.encode_end(outcome)
        for line in written.splitlines():
            if line and not line.startswith((b"event:", b":", b"data: [DONE]")):
                json.loads(line.removeprefix(b"data: "))


def _forms() -> list[AnswerForm]:
    draft = ResponseDraft(JOB, CHAT, ResponseFields(NOW))
    ollama = OllamaAnswer(AnswerShape.CHAT, "m", CHAT, Stopwatch(lambda: 0.0))
    return [
        answer_form(CHAT, include_usage=True),
        answer_form(COMPLETION, include_usage=True),
        message_form(CHAT, shows_thinking=True),
        ollama.form(NOW),
        AnswerForm(
            lambda job, outcome, at: encode_json(draft.answered(outcome)),
            lambda job, at: ResponseEventEncoder(draft),
        ),
    ]
