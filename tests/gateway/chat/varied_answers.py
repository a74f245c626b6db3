"""Answers with combinations of what workers may send, as each dialect shows them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, count, cycle
from typing import Any, Final

from msgspec.structs import replace

from shoal.domain.answer_assembly import assemble
from shoal.domain.errors import JobError, WorkerLost
from shoal.domain.ids import JobId
from shoal.domain.outcome import STOP_REASON, AnswerPiece, Delta, Outcome, Usage
from shoal.domain.work import JSON, Chat, Completion
from shoal.gateway.chat.anthropic.message_answer import message_form
from shoal.gateway.chat.job_answers import AnswerForm
from shoal.gateway.chat.ollama.answers import AnswerShape, OllamaAnswer, Stopwatch
from shoal.gateway.chat.openai.answers import answer_form
from shoal.gateway.chat.responses.body import ResponseFields
from shoal.gateway.chat.responses.events import ResponseEventEncoder
from shoal.gateway.chat.responses.response_object import ResponseDraft
from shoal.gateway.http.responses import encode_json

AT: Final = 1_700_000_000
TOOL: JSON = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {}},
        "strict": False,
    },
}
PLAIN_TOOL: JSON = {"type": "function", "function": {"name": "g"}}
OPTIONS: Mapping[str, JSON] = {
    "stop": ["END"],
    "tools": [TOOL, PLAIN_TOOL],
    "logprobs": True,
    "top_logprobs": 1,
}
CHAT = Chat("m1", ({"role": "user", "content": "hi"},), 9, 0.5, OPTIONS)
COMPLETION = Completion("m1", "hi", 9, 0.5, {"stop": ["END"], "logprobs": 1})
RESPONSE_FIELDS = (
    ResponseFields(AT),
    ResponseFields(AT, summary="auto", background=True, metadata={"a": "b"}, user="u"),
)


def _call(index: int, **function: JSON) -> Delta:
    begun: dict[str, JSON] = {"index": index}
    if "name" in function:
        begun |= {"id": f"call_{index}", "type": "function"}
    return Delta(0, {"tool_calls": [{**begun, "function": function}]})


def _logprob(token: str) -> JSON:
    top: JSON = {"token": token, "logprob": -1.5, "bytes": None}
    return {"token": token, "logprob": -1.5, "bytes": None, "top_logprobs": [top]}


PARTS: Mapping[str, Sequence[AnswerPiece]] = {
    "thoughts": [
        Delta(0, {"reasoning_content": "H"}),
        Delta(0, {"reasoning_content": "m"}),
    ],
    "text": ["Hel", "lo\u2028"],
    "probabilities": [Delta(0, {"content": "!"}, {"content": [_logprob("!")]})],
    "bare probabilities": [
        Delta(0, {"content": "?"}, {"content": [{"token": "?", "logprob": -2}]})
    ],
    "refusal": [Delta(0, {"refusal": "No."})],
    "calls": [
        _call(0, name="f", arguments='{"a'),
        _call(0, arguments='":1}'),
        _call(1, name="g", arguments=""),
    ],
    "invalid call": [_call(2, name="f", arguments="not JSON")],
    "stop string": [Delta(0, {STOP_REASON: "END"})],
    "odd fields": [
        Delta(0, {"annotations": None, "audio": None, "provider": {"x": None}})
    ],
}
"""What an answer may consist of, in the order in which it comes."""

FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter", "abort")
USAGES = (
    None,
    Usage(10, 5),
    Usage(10, 5, 8),
    Usage(10, 5, 8, 3),
    Usage(10, 5, None, 0),
)


@dataclass(frozen=True, slots=True)
class VariedAnswer:
    """An answer, by the names of its parts."""

    name: str
    pieces: Sequence[AnswerPiece]
    outcome: Outcome


def varied_answers(most: int) -> Iterator[VariedAnswer]:
    """Return an answer for each combination of at most so many parts, and for all."""
    reasons, usages = cycle(FINISH_REASONS), cycle(USAGES)
    for size in {*range(most + 1), len(PARTS)}:
        for names in combinations(PARTS, size):
            pieces = [*chain.from_iterable(PARTS[name] for name in names)]
            if "invalid call" in names and "calls" not in names:
                first = _call(0, name="f", arguments="not JSON")
                pieces[pieces.index(PARTS["invalid call"][0])] = first
            reason, usage = next(reasons), next(usages)
            name = ", ".join([*names, reason])
            yield VariedAnswer(name, pieces, assemble(pieces, reason, usage))
    several: list[AnswerPiece] = [
        Delta(1, {"content": "b"}, None, "length"),
        Delta(0, {"content": "a", STOP_REASON: "END"}, None, "stop"),
        replace(_call(0, name="f", arguments="{}"), choice=2),
    ]
    yield VariedAnswer("several", several, assemble(several, "stop", Usage(1, 2)))


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """An answer as a dialect shows it: whole, and as a stream."""

    dialect: str
    name: str
    whole: bytes
    stream: bytes
    broken: bytes  # the stream of an answer that breaks off


def shown_answers(most: int) -> Iterator[ShownAnswer]:
    """Return the answers with at most so many parts, and with all, in all dialects."""
    for answer in varied_answers(most):
        for dialect, form in _forms():
            encoders = [form.stream(JobId("job1"), AT) for _ in range(2)]
            begun = [encoder.encode(answer.pieces) for encoder in encoders]
            error = WorkerLost("gone") if len(answer.pieces) % 2 else JobError("out")
            yield ShownAnswer(
                dialect,
                answer.name,
                form.encode(JobId("job1"), answer.outcome, AT),
                begun[0] + encoders[0].encode_end(answer.outcome),
                begun[1] + encoders[1].encode_error(error),
            )


def _forms() -> Iterator[tuple[str, AnswerForm]]:
    yield "chat", answer_form(CHAT, include_usage=True)
    yield "chat", answer_form(replace(CHAT, options={"stop": ["END"]}))
    yield "completion", answer_form(COMPLETION, include_usage=True)
    for shows in (True, False):
        yield "messages", message_form(CHAT, shows_thinking=shows)
    for fields in RESPONSE_FIELDS:
        draft = ResponseDraft(JobId("job1"), CHAT, fields)
        yield "responses", _response_form(draft)
    ticks = count()
    for shape in AnswerShape:
        watch = Stopwatch(lambda: float(next(ticks)))
        yield (
            f"ollama {shape.name.lower()}",
            OllamaAnswer(shape, "m1", CHAT, watch).form(AT),
        )


def _response_form(draft: ResponseDraft) -> AnswerForm:
    return AnswerForm(
        lambda job_id, outcome, _: encode_json(draft.answered(outcome)),
        lambda job_id, _: ResponseEventEncoder(draft),
    )


def events_of(stream: bytes) -> list[Any]:
    """Return the events of a stream of any dialect, as JSON."""
    lines = (line.removeprefix("data: ") for line in stream.decode().split("\n"))
    return [json.loads(line) for line in lines if line.startswith("{")]
