"""What engines send, as clients of each dialect get it: over HTTP on both sides.

The inputs are from public reports about engines and clients; each case names its own.
``tests/engines`` has more of them, at the decoder.
"""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from engines.sampling_server import LLAMA_SERVER, NUMBERS, SamplingServer, counts
from engines.sampling_server import serving as serving_engines
from gateway.serving import TOKEN, Pool, serving
from shoal.engines.openai_server import OpenAIEngine
from shoal.engines.text_tasks import TaskRunner
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.shoal import ShoalDialer
from shoal.transports import websocket
from shoal.transports.clock import LoopClock
from shoal.worker.agent import Agent
from shoal.worker.jobs import EngineSlots, only_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

Call = tuple[str, Any]  # its name and its arguments


@dataclass(frozen=True, slots=True)
class Read:
    """What a client should have read."""

    text: str = ""
    thoughts: str = ""
    calls: tuple[Call, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """Events of an engine: chunks, or bytes as they are; a dict is no stream."""

    source: str
    events: Sequence[Mapping[str, Any] | bytes] | Mapping[str, Any]
    read: Read = field(default=Read("Hello"))


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def end(reason: str | None = "stop") -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


def calls(*called: Mapping[str, Any]) -> dict[str, Any]:
    return delta(tool_calls=list(called))


def call(city: str = "Paris", **more: Any) -> dict[str, Any]:
    arguments = json.dumps({"city": city})
    return {
        "type": "function",
        "function": {"name": "f", "arguments": arguments},
    } | more


USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
ROLE, HELLO, DONE = (
    delta(role="assistant", content=""),
    delta(content="Hello"),
    b"[DONE]",
)
PARIS, ROME = ("f", {"city": "Paris"}), ("f", {"city": "Rome"})

CASES = {
    "null and empty fields, half a character": Case(
        "pydantic/pydantic-ai#5165, openai/openai-python#1670, "
        "openai/openai-agents-python#1179",
        [
            b"",
            ROLE,
            delta(content="Hell\ud83d"),
            delta(content="\udc00"),
            end(),
            {"choices": None, "usage": {**USAGE, "completion_tokens": None}},
            DONE,
        ],
        Read("Hell🐀"),
    ),
    "no stream": Case(
        "servers that ignore stream",
        {"choices": [{"message": {"role": "assistant", "content": "Hello"}}]},
    ),
    "thoughts": Case(
        "vllm-project/vllm#27755, epam/ai-dial-adapter-openai#395",
        [
            delta(reasoning="h"),
            delta(content=[{"type": "thinking", "thinking": [{"text": "m"}]}]),
            HELLO,
            end(),
            DONE,
        ],
        Read("Hello", "hm"),
    ),
    "calls without ids": Case(
        "ggml-org/llama.cpp#11992, ollama/ollama#7881",
        [calls(call()), calls(call("Rome")), end("tool_calls"), DONE],
        Read(calls=(PARIS, ROME)),
    ),
    "calls with one index": Case(
        "ollama/ollama#15457, BerriAI/litellm#35663",
        [
            calls(call(index=0, id="a")),
            calls(call("Rome", index=0, id="b")),
            end(),
            DONE,
        ],
        Read(calls=(PARIS, ROME)),
    ),
    "arguments as an object": Case(
        "ggml-org/llama.cpp#20198",
        [
            HELLO,
            calls(
                {"index": 7, "function": {"name": "f", "arguments": {"city": "Paris"}}}
            ),
            end(""),
            DONE,
        ],
        Read("Hello", calls=(PARIS,)),
    ),
    "an error line": Case(
        "ggml-org/llama.cpp#16109",
        [b'!error: {"code":400,"message":"the grammar is invalid"}\n\n', DONE],
        Read(error="the grammar is invalid"),
    ),
    "an error event": Case(
        "LM Studio",
        [b'!event: error\ndata: {"message":"out of paper"}\n\n', DONE],
        Read(error="out of paper"),
    ),
    "the end of the text, and details of usage": Case(
        "vllm-project/vllm#45807, BerriAI/litellm#22984",
        [
            HELLO,
            {"choices": [{"delta": {}, "finish_reason": "stop", "stop_reason": "END"}]},
            {
                "choices": [],
                "usage": {
                    **USAGE,
                    "prompt_tokens_details": {"cached_tokens": 8},
                    "completion_tokens_details": {"reasoning_tokens": 3},
                },
            },
            DONE,
        ],
    ),
    "nothing": Case(
        "a proxy whose server is gone", [DONE], Read(error="sent an empty answer")
    ),
}


def written(event: Mapping[str, Any] | bytes) -> bytes:
    if isinstance(event, bytes):
        return event[1:] if event.startswith(b"!") else b"data: %b\n\n" % event
    named = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m1"}
    return b"data: %b\n\n" % json.dumps({**named, **event}).encode()


async def answer(request: web.Request) -> web.StreamResponse:
    """Answer the case that the text of the request names; without one, echo it."""
    body = await request.json()
    text = next(m["content"] for m in body["messages"] if m["role"] == "user")
    if text not in CASES:
        message = {"role": "assistant", "content": json.dumps(body)}
        return web.json_response({"choices": [{"message": message}]})
    events = CASES[text].events
    if isinstance(events, dict):
        return web.json_response(events)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"".join(map(written, events)))  # type: ignore[arg-type]
    return response


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    """A pool with one worker, whose engine is the server above."""
    app = web.Application()

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m1"}]})

    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", answer)
    server = web.AppRunner(app, shutdown_timeout=0)
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    host, port = server.addresses[0]
    engine = OpenAIEngine(f"http://{host}:{port}/v1")
    await engine.start()
    folder: Path = tmp_path_factory.mktemp("engines")
    async with serving(folder) as running, joined(running, engine):
        await running.wait_joined()
        yield running
    await engine.close()
    await server.cleanup()


@asynccontextmanager
async def joined(
    pool: Pool, engine: OpenAIEngine, name: str = "w1"
) -> AsyncIterator[None]:
    member = WorkerProfile(name, engine.models[0], 4, TOKEN)
    agent = Agent(
        ShoalDialer(pool.url, member),
        websocket.connect_websocket,
        only_model(TaskRunner(engine, member.model), EngineSlots(4)),
        LoopClock(),
        Random(1),
        lambda event: None,
        offers=member.first_offers,
    )
    running = asyncio.create_task(agent.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}
FUNCTION = {"type": "function", "function": TOOL}


def bodies(text: str) -> dict[str, dict[str, Any]]:
    """Return the body of a request with tools, by the path of each dialect."""
    messages = [{"role": "user", "content": text}]
    return {
        "/v1/chat/completions": {"messages": messages, "tools": [FUNCTION]},
        "/v1/responses": {"input": text, "tools": [{"type": "function", **TOOL}]},
        "/v1/messages": {
            "messages": messages,
            "max_tokens": 99,
            "thinking": {"type": "enabled", "budget_tokens": 50},
            "tools": [{"name": "f", "input_schema": TOOL["parameters"]}],
        },
        "/ollama/api/chat": {"messages": messages, "think": True, "tools": [FUNCTION]},
    }


async def ask(
    pool: Pool, path: str, body: Mapping[str, Any], *, stream: bool = False
) -> tuple[int, str]:
    async with pool.session.post(
        pool.url + path,
        data=json.dumps({"model": "m1", "stream": stream, **body}),
        headers=pool.headers() | {"Content-Type": "application/json"},
    ) as response:
        return response.status, await response.text()


def read_whole(path: str, body: Any) -> Read:
    """Read a whole answer as a client of the dialect does."""
    match path:
        case "/v1/chat/completions":
            (choice,) = body["choices"]
            message = choice["message"]
            called = message.get("tool_calls") or []
            expected = "tool_calls" if called else "stop"
            assert choice["finish_reason"] == expected
            assert len({each["id"] for each in called} - {""}) == len(called)
            return Read(
                message["content"] or "",
                message.get("reasoning_content", ""),
                tuple(named(each["function"]) for each in called),
            )
        case "/v1/responses":
            found: dict[str, list[Any]] = {"message": [], "reasoning": []}
            for item in body["output"]:
                found.setdefault(item["type"], []).append(item)
            parts = [p for item in found["message"] for p in item["content"]]
            thoughts = [p for item in found["reasoning"] for p in item["content"]]
            return Read(
                "".join(part["text"] for part in parts),
                "".join(part["text"] for part in thoughts),
                tuple(named(item) for item in found.get("function_call", ())),
            )
        case "/v1/messages":
            blocks = body["content"]
            texts = {
                name: "".join(b[name] for b in blocks if b["type"] == name)
                for name in ("text", "thinking")
            }
            used = [b for b in blocks if b["type"] == "tool_use"]
            assert body["stop_reason"] == ("tool_use" if used else "end_turn")
            assert len({block["id"] for block in used} - {""}) == len(used)
            made = tuple((block["name"], block["input"]) for block in used)
            return Read(texts["text"], texts["thinking"], made)
        case _:
            message = body["message"]
            functions = [c["function"] for c in message.get("tool_calls", ())]
            made = tuple((each["name"], each["arguments"]) for each in functions)
            return Read(message["content"], message.get("thinking", ""), made)


def named(function: Mapping[str, Any]) -> Call:
    return function["name"], json.loads(function["arguments"] or "{}")


def read_stream(path: str, text: str) -> Read:
    """Read a stream as a client of the dialect does, by what its deltas say."""
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    found = {"text": "", "thoughts": ""}
    made: dict[Any, list[str]] = {}
    for event in events:
        match event:
            case {"choices": [{"delta": given}]}:
                found["text"] += given.get("content") or ""
                found["thoughts"] += given.get("reasoning_content") or ""
                for each in given.get("tool_calls") or ():
                    if each["index"] not in made:
                        assert each["index"] == len(made)
                        assert each["id"]
                        made[each["index"]] = [each["function"]["name"], ""]
                    made[each["index"]][1] += each["function"].get("arguments") or ""
            case {"type": "response.output_text.delta", "delta": part}:
                found["text"] += part
            case {"type": "response.reasoning_text.delta", "delta": part}:
                found["thoughts"] += part
            case {
                "type": "response.output_item.added",
                "output_index": at,
                "item": item,
            }:
                if item["type"] == "function_call":
                    made[at] = [item["name"], ""]
            case {"type": "response.function_call_arguments.delta", "output_index": at}:
                made[at][1] += event["delta"]
            case {"type": "content_block_start", "index": at, "content_block": block}:
                if block["type"] == "tool_use":
                    made[at] = [block["name"], ""]
            case {"type": "content_block_delta", "index": at, "delta": given}:
                found["text"] += given.get("text", "")
                found["thoughts"] += given.get("thinking", "")
                if "partial_json" in given:
                    made[at][1] += given["partial_json"]
            case {"message": message, "done": _}:
                found["text"] += message["content"]
                found["thoughts"] += message.get("thinking", "")
                for each in message.get("tool_calls", ()):
                    function = each["function"]
                    arguments = json.dumps(function["arguments"])
                    made[len(made)] = [function["name"], arguments]
            case _:
                pass  # it repeats, or says nothing of these
    called = ((name, json.loads(text or "{}")) for name, text in made.values())
    return Read(found["text"], found["thoughts"], tuple(called))


@pytest.mark.parametrize("name", CASES)
async def test_answers_are_read_as_they_are_meant(pool: Pool, name: str) -> None:
    expected = CASES[name].read
    for path, body in bodies(name).items():
        for stream in (False, True):
            status, text = await ask(pool, path, body, stream=stream)

            if expected.error:
                assert status >= 400, path
                assert expected.error in text, path
                continue
            assert status == 200, text
            found = (
                read_stream(path, text)
                if stream
                else read_whole(path, json.loads(text))
            )
            assert found == expected, (path, stream)


async def test_answer_goes_on_in_its_thoughts_in_each_dialect(tmp_path: Path) -> None:
    breaks: list[int] = []
    habits = dataclasses.replace(LLAMA_SERVER, reasons=True)
    servers = [SamplingServer(habits, seed, breaks) for seed in (1, 2)]
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(serving(tmp_path))
        urls = await stack.enter_async_context(serving_engines(*servers))
        for number, url in enumerate(urls):
            engine = OpenAIEngine(url)
            await engine.start()
            stack.push_async_callback(engine.close)
            await stack.enter_async_context(joined(pool, engine, f"w{number}"))
        await pool.wait_joined(2)
        for path, body in bodies("Count.").items():
            plain = {**body, "model": "counter", "tools": []}
            for stream in (False, True):
                breaks.append(4)  # the first token begins the thoughts
                _, text = await ask(pool, path, plain, stream=stream)

                assert not breaks
                found = (
                    read_stream(path, text)
                    if stream
                    else read_whole(path, json.loads(text))
                )
                numbers = [*range(1, len(NUMBERS) + 1)]
                assert counts(found.thoughts) == counts(found.text) == numbers, path


async def test_what_an_engine_tells_beside_the_text_reaches_clients(
    pool: Pool,
) -> None:
    text = "the end of the text, and details of usage"
    stops: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"stop": "END"},
        "/v1/responses": {"stop": "END"},
        "/v1/messages": {"stop_sequences": ["END"]},
    }
    answers = {}
    for path, stop in stops.items():
        _, body = await ask(pool, path, bodies(text)[path] | stop)
        answers[path] = json.loads(body)
    chat, response, message = answers.values()

    assert chat["choices"][0]["stop_reason"] == "END"
    assert chat["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    assert chat["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 8
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    assert (message["stop_reason"], message["stop_sequence"]) == (
        "stop_sequence",
        "END",
    )
    assert message["usage"]["cache_read_input_tokens"] == 8
    assert message["usage"]["input_tokens"] == 2


async def echoed(pool: Pool, path: str, body: Mapping[str, Any]) -> Any:
    """Return the request that the engine gets for one of a client."""
    status, text = await ask(pool, path, body)
    assert status == 200, text
    return json.loads(read_whole(path, json.loads(text)).text)


async def test_second_turn_of_a_call_without_an_id_is_accepted(pool: Pool) -> None:
    path, first = "/v1/chat/completions", bodies("calls without ids")
    _, text = await ask(pool, path, first["/v1/chat/completions"])
    message = json.loads(text)["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": each["id"], "content": "sunny"}
        for each in message["tool_calls"]
    ]

    messages = [{"role": "user", "content": "echo"}, message, *results]
    sent = await echoed(pool, path, {"messages": messages, "tools": [FUNCTION]})

    ids = [each["id"] for each in sent["messages"][1]["tool_calls"]]
    assert [each["tool_call_id"] for each in sent["messages"][2:]] == ids


async def test_engines_get_one_system_message_from_each_dialect(pool: Pool) -> None:
    user, system = (
        {"role": "user", "content": "echo"},
        {"role": "system", "content": "S"},
    )
    developer = {"role": "developer", "content": "D"}
    given: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [system, developer, user]},
        "/v1/responses": {"instructions": "S", "input": [developer, user]},
        "/v1/messages": {
            "system": [{"type": "text", "text": "S"}, {"type": "text", "text": "D"}],
            "messages": [user],
            "max_tokens": 9,
        },
        "/ollama/api/chat": {"messages": [system, {**system, "content": "D"}, user]},
    }
    for path, body in given.items():
        sent = await echoed(pool, path, body)

        assert sent["messages"] == [{"role": "system", "content": "S\n\nD"}, user], path


async def test_thoughts_of_a_history_reach_the_engine(pool: Pool) -> None:
    said = {"role": "assistant", "content": "a", "reasoning": "because"}
    messages = [
        {"role": "user", "content": "q"},
        said,
        {"role": "user", "content": "e"},
    ]

    sent = await echoed(pool, "/v1/chat/completions", {"messages": messages})

    both = {"reasoning": "because", "reasoning_content": "because"}
    assert sent["messages"][1] == {"role": "assistant", "content": "a", **both}


async def test_schema_of_a_json_object_reaches_the_engine(pool: Pool) -> None:
    format = {"type": "json_object", "schema": {"type": "object"}}
    messages = [{"role": "user", "content": "echo"}]
    sent = await echoed(
        *(pool, "/v1/chat/completions"),
        {"messages": messages, "response_format": format},
    )

    assert sent["response_format"]["schema"] == {"type": "object"}
    assert sent["response_format"]["json_schema"]["schema"] == {"type": "object"}
