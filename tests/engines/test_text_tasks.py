"""Text tasks: prompts, and validated answers."""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any, TypeAlias

import pytest
from aiohttp import web
from msgspec.structs import replace

from engines.conftest import Serve
from engines.outputs import chat_of, pieces_of
from shoal.domain.errors import ContextExceeded, InvalidRequest, JobError
from shoal.domain.outcome import Usage
from shoal.domain.work import JSON, Feature, JobKind, Task
from shoal.engines import structured_prompts
from shoal.engines.engine import Engine, Finished
from shoal.engines.gguf_files import DEMO_PACKAGE, demo_model_path
from shoal.engines.llama_engine import LlamaEngine
from shoal.engines.openai_server import OpenAIEngine
from shoal.engines.text_tasks import (
    SENTIMENTS,
    SUMMARY_MAX,
    SUMMARY_PROMPT,
    TASK_NAMES,
    TaskRunner,
)

Reply: TypeAlias = str | tuple[str, str]
"""What a model writes, and why it stopped."""

PUFFIN = (
    "The puffin is a seabird in the auk family.  It nests in clifftop colonies, swims "
    "well and dives for small fish.  People love it for its colourful bill."
)
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}

needs_demo = pytest.mark.skipif(
    find_spec(DEMO_PACKAGE) is None, reason="the demo's model is not installed"
)


class Server:
    """Answers each chat with what a function makes of the text that is asked about."""

    def __init__(self, reply: Callable[[str], Reply], usage: bool = True) -> None:
        self.requests: list[dict[str, Any]] = []
        self._reply = reply
        self._usage = usage

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        reply = self._reply(body["messages"][-1]["content"])
        text, reason = (reply, "stop") if isinstance(reply, str) else reply
        if reason == "context":
            error = {"message": text, "code": "context_length_exceeded"}
            return web.json_response({"error": error}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for choice in (
            {"delta": {"content": text[:7]}},
            {"delta": {"content": text[7:]}, "finish_reason": reason},
        ):
            await response.write(_event({"choices": [choice]}))
        if self._usage:
            await response.write(_event({"choices": [], "usage": USAGE}))
        await response.write(b"data: [DONE]\n\n")
        return response


def _event(chunk: Mapping[str, object]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def server_with(reply: Reply) -> Server:
    return Server(lambda _: reply)


@asynccontextmanager
async def asking_at(url: str) -> AsyncIterator[Engine]:
    engine = OpenAIEngine(url)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def done(engine: Engine, name: str, payload: JSON, **model: Any) -> Any:
    """Return a task's result and usage."""
    runner = TaskRunner(engine, replace(engine.models[0], **model))
    text, last = await pieces_of(runner.run(Task(name, payload)))
    assert isinstance(text, str)
    assert isinstance(last, Finished)
    assert last.finish_reason == "stop"
    return json.loads(text), last.usage


async def result(
    serve: Serve, server: Server, name: str, payload: JSON, **model: Any
) -> Any:
    async with asking_at(await serve(server.handle)) as engine:
        return (await done(engine, name, payload, **model))[0]


async def test_words_are_counted_and_a_summary_is_passed_on(serve: Serve) -> None:
    server = server_with('{"summary": "A bird that dives."}')

    assert await result(serve, server, "summarize", {"input": PUFFIN}) == {
        "summary": "A bird that dives.",
        "word_count": 28,
    }


async def test_model_is_prompted_for_json_at_temperature_0(serve: Serve) -> None:
    server = server_with('{"summary": "A bird."}')

    await result(serve, server, "summarize", {"input": PUFFIN})

    (body,) = server.requests
    assert body["temperature"] == 0
    assert body["max_tokens"] == SUMMARY_PROMPT.answer_tokens
    assert body["response_format"]["type"] == "json_schema"
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["messages"][1]["content"] == PUFFIN


async def test_model_without_schemas_gets_the_form_in_the_prompt(serve: Serve) -> None:
    server = server_with('Sure!\n```json\n{"summary": "A bird."}\n```\nAnything else?')

    payload = {"input": PUFFIN}
    came = await result(serve, server, "summarize", payload, features=frozenset())

    assert came["summary"] == "A bird."
    assert "response_format" not in server.requests[0]
    assert '{"summary": "…"}' in server.requests[0]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("reply", "summary"),
    [
        ('{"summary": "  A bird. "}', "A bird."),
        (('{"summary": "A bird that\\n di', "length"), "A bird that\n di…"),
        (('{"summary": "A \\u00e9\\u00', "length"), "A é…"),
        ('{"summary": "half a \\ud83d"}', "half a ?"),
        (json.dumps({"summary": PUFFIN * 2}), PUFFIN),
    ],
    ids=["spaces", "cut", "cut in an escape", "half a character", "longer"],
)
async def test_summary_is_complete_and_no_longer_than_its_text(
    serve: Serve, reply: Reply, summary: str
) -> None:
    came = await result(serve, server_with(reply), "summarize", {"input": PUFFIN})

    assert came["summary"] == summary


async def test_a_summary_has_a_limit(serve: Serve) -> None:
    server = server_with(json.dumps({"summary": "word " * 1000}))

    came = await result(serve, server, "summarize", {"input": PUFFIN * 20})

    assert len(came["summary"]) <= SUMMARY_MAX
    assert came["summary"].endswith("word…")


async def test_summaries_of_a_long_text_are_summarized(serve: Serve) -> None:
    server = Server(lambda text: json.dumps({"summary": f"Of {len(text)}."}))

    text = PUFFIN * 100
    came = await result(serve, server, "summarize", {"input": text}, context=2048)

    texts = [body["messages"][1]["content"] for body in server.requests]
    *parts, last = texts
    assert "".join(parts) == text
    assert last == "\n".join(f"Of {len(part)}." for part in parts)
    assert came == {"summary": f"Of {len(last)}.", "word_count": len(text.split())}


async def test_text_with_more_tokens_than_estimated_is_split_further(
    serve: Serve,
) -> None:
    def reply(text: str) -> Reply:
        if len(text) > 1000:
            return "this is too long", "context"
        return '{"label": "positive", "percent": 80}'

    server = Server(reply)

    text = (PUFFIN * 30).strip()
    came = await result(serve, server, "classify", {"input": text})

    texts = [body["messages"][1]["content"] for body in server.requests]
    assert "".join(each for each in texts if len(each) <= 1000) == text
    assert came == {"sentiment": "positive", "confidence": 0.8}


@pytest.mark.parametrize("name", sorted(TASK_NAMES))
async def test_text_of_too_many_parts_is_rejected_before_any_prompt(
    serve: Serve, name: str
) -> None:
    server = server_with("never asked")

    with pytest.raises(ContextExceeded, match="send it in pieces") as refusal:
        await result(serve, server, name, {"input": "word " * 100_000})

    assert refusal.value.field == "input"
    assert server.requests == []


async def test_text_that_never_fits_fails_with_the_engine_error(serve: Serve) -> None:
    with pytest.raises(ContextExceeded, match="this is too long"):
        await result(
            serve,
            server_with(("this is too long", "context")),
            "classify",
            {"input": "a"},
        )


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ('{"label":"negative","percent":85}', ("negative", 0.85)),
        ('{"label":"neutral","percent":100}', ("neutral", 1)),
        ('{"label":"neutral","percent":0}', ("neutral", 0)),
        ('{"label":"positive","percent":0.9}', ("positive", 0.9)),
    ],
)
async def test_sentiment_has_a_confidence_from_0_to_1(
    serve: Serve, reply: str, expected: tuple[str, float]
) -> None:
    came = await result(serve, server_with(reply), "classify", {"input": "It is fine."})

    assert came == {"sentiment": expected[0], "confidence": expected[1]}


@pytest.mark.parametrize("field", ["labels", "categories"])
async def test_custom_labels_are_supported(serve: Serve, field: str) -> None:
    server = server_with('{"label": "a bird", "percent": 99}')

    payload = {"input": PUFFIN, field: ["a bird", "a fish"]}
    came = await result(serve, server, "classify", payload)

    assert came == {"sentiment": "a bird", "confidence": 0.99}
    schema = server.requests[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["label"]["enum"] == ["a bird", "a fish"]
    assert '["a bird","a fish"]' in server.requests[0]["messages"][0]["content"]


async def test_the_parts_of_a_long_text_vote(serve: Serve) -> None:
    votes = iter([("positive", 40), ("negative", 90), ("positive", 60)])

    def reply(_: str) -> str:
        label, percent = next(votes)
        return json.dumps({"label": label, "percent": percent})

    text = "word " * 2000
    server = Server(reply)
    came = await result(serve, server, "classify", {"input": text}, context=1800)

    assert len(server.requests) == 3
    assert came == {"sentiment": "positive", "confidence": 0.33}


@pytest.mark.parametrize(
    ("task", "reply"),
    [
        ("summarize", "The text is about a bird."),
        ("summarize", '{"summary": 4}'),
        ("summarize", '{"summary": " "}'),
        ("summarize", '{"summary": "cut for no reason'),
        ("summarize", ('{"summ', "length")),
        ("classify", "positive"),
        ("classify", '{"label": "angry", "percent": 50}'),
        ("classify", '{"label": ["positive"], "percent": 50}'),
        ("classify", '{"label": "positive"}'),
        ("classify", '{"label": "positive", "percent": 101}'),
        ("classify", '{"label": "positive", "percent": true}'),
        ("extract_json", "There is nothing to extract."),
        ("extract_json", "{" * 500_000),
        ("summarize", "x" * (structured_prompts.ANSWER_MAX + 1)),
    ],
)
async def test_malformed_model_answer_fails_the_job(
    serve: Serve, task: str, reply: Reply
) -> None:
    with pytest.raises(JobError, match=r"^the (model|engine)"):
        await result(serve, server_with(reply), task, {"input": PUFFIN})


@pytest.mark.parametrize(
    ("text", "extracted"),
    [
        ('a {"x":1} b {"y":{"z":[1,2]}} c', [{"x": 1}, {"y": {"z": [1, 2]}}]),
        ('{"a":{"b":{"c":1}}}', [{"a": {"b": {"c": 1}}}]),
        ('{bad} {"ok":true}', [{"ok": True}]),
        ('as shown [1], [2, 3]: {"a": [1]}', [{"a": [1]}]),
        ('names: ["al", "bo"]', [["al", "bo"]]),
        (" [1, 2] ", [[1, 2]]),
        ("   ", []),
    ],
)
async def test_json_in_a_text_is_extracted_without_a_model(
    serve: Serve, text: str, extracted: list[object]
) -> None:
    server = server_with("never asked")
    async with asking_at(await serve(server.handle)) as engine:
        came, usage = await done(engine, "extract_json", {"input": text})

    assert came == {"extracted": extracted, "count": len(extracted)}
    assert usage == Usage(0, 0)
    assert server.requests == []


async def test_numbers_in_extracted_json_are_unchanged(serve: Serve) -> None:
    async with asking_at(await serve(server_with("never asked").handle)) as engine:
        task = Task("extract_json", {"input": 'so {"n": 1.10, "big": 1e400}'})
        text, _ = await pieces_of(TaskRunner(engine, engine.models[0]).run(task))

    assert text == '{"extracted":[{"n":1.10,"big":1e400}],"count":1}'


@pytest.mark.parametrize(
    ("reply", "extracted"),
    [
        ('{"extracted": [{"name": "Al"}, {"name": "Bo"}]}', ["Al", "Bo"]),
        ('{"extracted": []}', []),
        (('{"extracted": [{"name": "Al"}, {"name": "B', "length"), ["Al"]),
        ('Here: [{"name": "Al"}]', ["Al"]),
    ],
)
async def test_model_extracts_objects_from_plain_text(
    serve: Serve, reply: Reply, extracted: list[str]
) -> None:
    payload = {"input": "Al and Bo came [1]."}
    came = await result(serve, server_with(reply), "extract_json", payload)

    assert [each["name"] for each in came["extracted"]] == extracted
    assert came["count"] == len(extracted)


async def test_text_that_only_resembles_json_is_rejected(serve: Serve) -> None:
    with pytest.raises(InvalidRequest, match="begins like JSON") as refusal:
        await result(serve, server_with(""), "extract_json", {"input": "[" * 1_000_000})

    assert refusal.value.field == "input"


async def test_usage_is_the_sum_of_all_prompts(serve: Serve) -> None:
    server = server_with('{"label": "neutral", "percent": 50}')
    async with asking_at(await serve(server.handle)) as engine:
        _, usage = await done(engine, "classify", {"input": "a " * 4000}, context=2048)

    assert usage == Usage(3 * len(server.requests), 2 * len(server.requests))
    assert len(server.requests) > 1


async def test_usage_is_unknown_if_the_server_does_not_report_it(serve: Serve) -> None:
    server = Server(lambda _: '{"label": "neutral", "percent": 50}', usage=False)
    async with asking_at(await serve(server.handle)) as engine:
        _, usage = await done(engine, "classify", {"input": "a"})

    assert usage is None


@pytest.mark.parametrize(
    ("name", "payload", "message", "field"),
    [
        ("translate", {"input": "a"}, "no task 'translate'; known: classify", None),
        ("", {"input": "a"}, "no task ''; known", None),
        ("summarize", None, "input: expected a text", "input"),
        ("summarize", ["a"], "input: expected a text", "input"),
        ("summarize", {}, "input: expected a text", "input"),
        ("extract_json", {"input": 4}, "input: expected a text", "input"),
        ("classify", {"input": " "}, "not blank", "input"),
        ("classify", {"input": "a", "labels": "ab"}, "labels: expected", "labels"),
        ("classify", {"input": "a", "labels": ["a"]}, "list of 2", "labels"),
        ("classify", {"input": "a", "labels": ["a", 4]}, "list of 2", "labels"),
        ("classify", {"input": "a", "labels": ["a", " "]}, "list of 2", "labels"),
        ("classify", {"input": "a", "labels": ["a", "a"]}, "duplicate", "labels"),
        (
            "classify",
            {"input": "a", "categories": [str(n) for n in range(101)]},
            "2 to 100",
            "categories",
        ),
        (
            "classify",
            {"input": "a", "categories": ["a", "b" * 201]},
            "longer than 200",
            "categories",
        ),
    ],
)
async def test_invalid_field_is_rejected_by_name(
    serve: Serve, name: str, payload: JSON, message: str, field: str | None
) -> None:
    server = server_with("never asked")

    with pytest.raises(InvalidRequest, match=message) as refusal:
        await result(serve, server, name, payload)

    assert refusal.value.field == field
    assert server.requests == []


async def test_model_without_chat_runs_no_tasks(serve: Serve) -> None:
    kinds = frozenset({JobKind.EMBEDDING})

    with pytest.raises(InvalidRequest, match="tiny cannot chat"):
        await result(serve, server_with(""), "classify", {"input": "a"}, kinds=kinds)


@pytest.mark.asyncio(loop_scope="module")
async def test_other_work_is_passed_to_the_engine(llama: LlamaEngine) -> None:
    runner = TaskRunner(llama, llama.models[0])

    items = await pieces_of(runner.run(chat_of("ping"), "po"))

    assert "".join(each for each in items if isinstance(each, str)) == "ng"


@pytest.fixture(scope="module")
def payloads() -> Mapping[str, JSON]:
    return {
        "summarize": {"input": PUFFIN},
        "classify": {"input": "I love it!"},
        "extract_json": {"input": "Alice is 30 years old.  Bob is 25."},
    }


async def check_structure(engine: Engine, payloads: Mapping[str, JSON]) -> None:
    """Run every task; check the form of the result."""
    assert Feature.SCHEMA in engine.models[0].features
    assert payloads.keys() == TASK_NAMES
    came = {}
    for name, payload in payloads.items():
        came[name], usage = await done(engine, name, payload)
        assert usage.completion_tokens > 0

    summary, sentiment, found = (came[name] for name in payloads)
    assert summary.keys() == {"summary", "word_count"}
    assert 0 < len(summary["summary"]) <= len(PUFFIN)
    assert summary["word_count"] == len(PUFFIN.split())
    assert sentiment.keys() == {"sentiment", "confidence"}
    assert sentiment["sentiment"] in SENTIMENTS
    assert 0 <= sentiment["confidence"] <= 1
    assert found.keys() == {"extracted", "count"}
    assert found["count"] == len(found["extracted"])
    assert all(isinstance(each, dict) for each in found["extracted"])


@pytest.mark.asyncio(loop_scope="module")
async def test_untrained_model_obeys_the_schema(
    llama: LlamaEngine, payloads: Mapping[str, JSON]
) -> None:
    await check_structure(llama, payloads)


@needs_demo
@pytest.mark.long
async def test_demo_model_runs_every_task(payloads: Mapping[str, JSON]) -> None:
    engine = LlamaEngine("demo", demo_model_path(), slots=1)
    await engine.start()
    try:
        await check_structure(engine, payloads)
    finally:
        await engine.close()
