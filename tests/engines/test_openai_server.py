"""The engine for OpenAI-compatible servers, also with faulty servers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace

from engines.conftest import Fakes, Handler, Serve
from engines.outputs import ask, chat_of, pieces_of
from shoal.domain.errors import (
    ConfigError,
    ContextExceeded,
    InvalidRequest,
    JobError,
    ShoalError,
    Unavailable,
)
from shoal.domain.outcome import Delta, Outcome, Usage
from shoal.domain.work import Completion, Embedding, JobKind, Rerank
from shoal.engines import openai_server, server_errors
from shoal.engines.engine import Finished
from shoal.engines.openai_server import OpenAIEngine

HELLO = b'data: {"choices":[{"delta":{"content":"hel"}}]}\n\n'
LO = b'data: {"choices":[{"delta":{"content":"lo"},"finish_reason":null}]}\n\n'
STOP = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
LIST = {"object": "list", "data": [{"id": "tiny"}]}


@asynccontextmanager
async def running(url: str, *names: str) -> AsyncIterator[OpenAIEngine]:
    engine = OpenAIEngine(url, names)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def stream_to(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


def streams(*parts: bytes) -> Handler:
    """A handler that sends these writes and ends its answer."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = await stream_to(request)
        for part in parts:
            await response.write(part)
        return response

    return handle


def answers(
    status: int, body: str, kind: str = "application/json", **headers: str
) -> Handler:
    """A handler that sends no stream."""

    async def handle(_: web.Request) -> web.StreamResponse:
        return web.Response(
            status=status, text=body, content_type=kind, headers=headers
        )

    return handle


@pytest.mark.parametrize(
    ("parts", "outcome"),
    [
        ((HELLO, LO, STOP, USAGE, DONE), Outcome("hello", "stop", Usage(3, 2))),
        ((HELLO + LO + STOP, DONE), Outcome("hello")),
        ((HELLO[:20], HELLO[20:] + LO[:1], LO[1:], STOP, DONE), Outcome("hello")),
        ((b": starting\n\n", HELLO, LO, DONE), Outcome("hello")),
        ((HELLO, LO, STOP), Outcome("hello")),
        ((HELLO, LO, STOP, DONE, b"data: and more\n\n"), Outcome("hello")),
        ((STOP.replace(b"stop", b"length"), DONE), Outcome("", "length")),
        ((HELLO, LO, STOP[:-2]), Outcome("hello")),
    ],
)
async def test_complete_streams_are_decoded(
    serve: Serve, parts: tuple[bytes, ...], outcome: Outcome
) -> None:
    async with running(await serve(streams(*parts))) as engine:
        assert await ask(engine, "hello?") == outcome


WHOLE = json.dumps({"choices": [{"message": {"content": "hello"}}], "usage": None})


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (WHOLE, "application/json"),
        (WHOLE, "text/event-stream"),
        ((HELLO + LO + DONE).decode(), "application/json"),
        ((HELLO + LO + DONE).decode(), "text/plain"),
        ((HELLO + LO + STOP).decode().replace("data: ", ""), "application/x-ndjson"),
    ],
)
async def test_answers_of_any_type_are_decoded(
    serve: Serve, body: str, kind: str
) -> None:
    async with running(await serve(answers(200, body, kind))) as engine:
        assert await ask(engine, "hello?") == Outcome("hello")


@pytest.mark.parametrize(
    ("handler", "error", "message"),
    [
        (streams(), Unavailable, "ended in the middle"),
        (streams(HELLO), Unavailable, "ended in the middle"),
        (streams(HELLO, DONE[:8]), Unavailable, "ended in the middle"),
        (streams(b"data: {not json}\n\n"), JobError, "no chunk of an answer"),
        (streams(b"data: [1, 2]\n\n"), JobError, "no chunk of an answer"),
        (streams(b'data: {"choices": 4}\n\n'), Unavailable, "ended in the middle"),
        (streams(DONE), JobError, "an empty answer"),
        (streams(b"data: " + b"x" * 2**20), JobError, "exceeds the limit"),
        (
            streams(HELLO, b'data: {"error": {"message": "out of paper"}}\n\n'),
            JobError,
            "^out of paper$",
        ),
        (
            answers(200, "<html>login</html>", "text/html"),
            JobError,
            "sent text/html, expected text/event-stream",
        ),
        (answers(200, "a", "image/png"), JobError, "sent image/png"),
        (answers(200, '{"choices": []}'), JobError, "an empty answer"),
        (answers(200, '{"error": "no"}'), JobError, "^no$"),
        (answers(302, "", Location="/elsewhere"), JobError, "status 302"),
        (answers(400, '{"error": {"message": "no"}}'), InvalidRequest, "^no$"),
        (answers(401, '{"error": "who?"}'), JobError, "status 401.*--engine-key"),
        (
            answers(500, "<h1>Oh</h1>", "text/html"),
            JobError,
            "status 500: it sent text/html, expected JSON",
        ),
        (answers(502, "<h1>Oh</h1>", "text/html"), Unavailable, "502.*text/html"),
        (answers(500, ""), JobError, "status 500: no message"),
        (answers(503, '{"error": {"message": "loading"}}'), Unavailable, "loading$"),
        (answers(429, "slow down", "text/plain"), Unavailable, "slow down"),
        (
            answers(404, '{"error": {"message": "model \'tiny\' not found"}}'),
            Unavailable,
            "lacks the model",
        ),
    ],
)
async def test_incomplete_streams_are_errors(
    serve: Serve, handler: Handler, error: type[ShoalError], message: str
) -> None:
    async with running(await serve(handler)) as engine:
        with pytest.raises(error, match=message):
            await ask(engine, "hello?")


async def test_long_error_message_is_truncated(serve: Serve) -> None:
    async with running(await serve(answers(500, "x" * 10**6))) as engine:
        with pytest.raises(JobError) as failure:
            await ask(engine, "hello?")

    assert len(str(failure.value)) < 600


@pytest.mark.parametrize(
    ("header", "seconds"), [("7", 7), ("soon", 5), ("99999999", 600), ("-1", 5)]
)
async def test_retry_after_of_a_busy_server_is_kept(
    serve: Serve, header: str, seconds: int
) -> None:
    url = await serve(answers(429, "later", **{"Retry-After": header}))

    async with running(url) as engine:
        with pytest.raises(Unavailable) as refusal:
            await ask(engine, "hello?")

    assert refusal.value.retry_after == seconds


async def test_pieces_arrive_before_the_end(serve: Serve) -> None:
    go_on = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        response = await stream_to(request)
        await response.write(HELLO)
        await go_on.wait()
        await response.write(LO + STOP + DONE)
        return response

    async with running(await serve(handle)) as engine:
        pieces = engine.run(chat_of("hello?"))
        first = await anext(pieces)
        go_on.set()
        rest = await pieces_of(pieces)

    assert first == "hel"
    assert rest == ["lo", Finished()]


async def test_response_that_never_ends_is_closed_after_done(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.engines.openai_server.END_WITHIN", 0.01)
    hung_up = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        response = await stream_to(request)
        await response.write(HELLO + LO + DONE)
        try:
            await asyncio.Event().wait()
        finally:
            hung_up.set()
        return response

    async with running(await serve(handle)) as engine:
        assert (await ask(engine, "hello?")).text == "hello"
        await hung_up.wait()


async def test_connection_is_kept_if_its_response_ends_after_done(serve: Serve) -> None:
    peers: set[object] = set()
    read = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.transport is not None and request.method == "POST":
            peers.add(request.transport.get_extra_info("peername"))
        response = await stream_to(request)
        await response.write(HELLO + LO + DONE)
        await read.wait()
        return response

    async with running(await serve(handle)) as engine:
        for _ in range(10):
            read.clear()
            assert (await ask(engine, "hello?")).text == "hello"
            read.set()

    assert len(peers) <= 5


async def test_closing_a_chat_disconnects(serve: Serve) -> None:
    hung_up = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        response = await stream_to(request)
        await response.write(HELLO)
        try:
            await asyncio.Event().wait()
        finally:
            hung_up.set()
        return response

    async with running(await serve(handle)) as engine:
        async with aclosing(engine.run(chat_of("hello?"))) as pieces:
            await anext(pieces)
        await hung_up.wait()


async def test_broken_connection_is_unavailable(serve: Serve) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = await stream_to(request)
        await response.write(HELLO)
        assert request.transport is not None
        request.transport.abort()
        return response

    async with running(await serve(handle)) as engine:
        with pytest.raises(Unavailable):
            await ask(engine, "hello?")


async def test_request_contains_all_fields_of_the_chat(serve: Serve) -> None:
    requests: list[object] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        requests.append((request.headers["Authorization"], await request.json()))
        return await streams(STOP, DONE)(request)

    engine = OpenAIEngine(await serve(handle), api_key="secret")
    await engine.start()
    await ask(engine, chat_of("hello?", max_tokens=5, options={"seed": 4}))
    await engine.close()

    assert requests == [
        (
            "Bearer secret",
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": "hello?"}],
                "max_tokens": 5,
                "temperature": 0.0,
                "seed": 4,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )
    ]


async def test_all_listed_models_are_offered(serve: Serve) -> None:
    async with running(await serve(streams(DONE))) as engine:
        assert [model.name for model in engine.models] == ["tiny"]
        assert engine.models[0].kinds == {JobKind.CHAT, JobKind.COMPLETION}


@pytest.mark.parametrize("end", ["/v2", "/v1/models"])
async def test_wrong_address_is_rejected(serve: Serve, end: str) -> None:
    url = (await serve(streams(DONE))).removesuffix("/v1") + end

    with pytest.raises(ConfigError, match="/models"):
        async with running(url):
            pass


async def test_url_is_sent_as_it_was_given() -> None:
    paths: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        paths.append(request.raw_path)
        return web.json_response(LIST)

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    async with (
        TestServer(app) as server,
        running(f"{server.make_url('')}/team%2Fa/%28b%29/%7e/v1"),
    ):
        pass

    assert paths[0] == "/team%2Fa/%28b%29/%7e/v1/models"


async def test_url_without_a_path_means_v1(serve: Serve) -> None:
    url = (await serve(streams(DONE))).removesuffix("/v1")

    async with running(url) as engine:
        assert engine.url.endswith("/v1")


@asynccontextmanager
async def tagging_server() -> AsyncIterator[str]:
    """A server that lists its model with a tag at one path, and has no other list."""
    app = web.Application()
    tagged = answers(200, '{"data": [{"id": "llama:latest"}]}')
    app.router.add_get("/tagged/models", tagged)
    hi = b'data: {"choices":[{"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\n'
    app.router.add_post("/tagged/chat/completions", streams(hi))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def test_name_without_a_tag_means_latest() -> None:
    async with tagging_server() as url, running(url + "/tagged") as engine:
        assert [model.name for model in engine.models] == ["llama:latest"]
        assert (
            await ask(engine, replace(chat_of("hello?"), model="llama"))
        ).text == "hi"


async def test_server_without_a_list_gets_the_named_models() -> None:
    async with (
        tagging_server() as url,
        running(url + "/has-no-list", "anything") as engine,
    ):
        assert [model.name for model in engine.models] == ["anything"]


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://host", "http://", "http://host:99999", "host:8000", "http://[::1"),
        *("http://ho st", "http://host/a b", "http://host\n"),
    ],
)
def test_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match=r"expected http://HOST:PORT/v1"):
        OpenAIEngine(url)


async def test_server_without_models_is_rejected(fake: Fakes) -> None:
    url = await fake({"GET /v1/models": {"data": None}})

    with pytest.raises(ConfigError, match="has no models"):
        await OpenAIEngine(url).start()


async def test_stopped_server_is_unavailable() -> None:
    app = web.Application()
    app.router.add_get("/v1/models", answers(200, '{"data": [{"id": "tiny"}]}'))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]

    async with running(f"http://{host}:{port}") as engine:
        await runner.cleanup()
        with pytest.raises(Unavailable) as lost:
            await ask(engine, "hello?")

    assert str(lost.value) == "the model's server: connection refused"


async def test_chat_requires_a_started_engine() -> None:
    with pytest.raises(Unavailable, match="not running"):
        await ask(OpenAIEngine("http://127.0.0.1:9/v1"), "hello?")


@pytest.mark.parametrize(
    "refusal",
    [
        # Of vLLM, earlier and since 0.10.
        "This model's maximum context length is 10 tokens. However, you requested {} "
        "tokens (3 in the messages, 9 in the completion).",
        "'max_tokens' or 'max_completion_tokens' is too large: 9. This model's maximum "
        "context length is 10 tokens and your request has 3 input tokens",
    ],
)
@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_answer_ends_at_the_end_of_the_context_at_every_server(
    fake: Fakes, refusal: str, kind: str
) -> None:
    limits: list[int] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        limits.append(body["max_tokens"])
        if "long" in str(body) or limits[-1] > 7:
            return web.json_response({"error": {"message": refusal}}, status=400)
        return await streams(HELLO, LO, STOP, USAGE, DONE)(request)

    paths = ("POST /v1/chat/completions", "POST /v1/completions")
    url = await fake({"GET /v1/models": LIST, **dict.fromkeys(paths, handle)})
    async with running(url) as engine:
        chat = chat_of("hello?", max_tokens=9)
        text = Completion("tiny", "hello?", max_tokens=9)

        outcome = await ask(engine, chat if kind == "chat" else text)
        with pytest.raises(ContextExceeded):
            await ask(engine, chat_of("long", max_tokens=9))

    assert outcome.text == "hello"
    assert limits == [9, 1, 7, 9, 1]


# What else is asked of a server than chats.


async def test_completion_is_streamed_from_its_own_path(fake: Fakes) -> None:
    bodies: list[object] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        text = b'data: {"choices":[{"index":0,"text":"upon"}]}\n\n'
        end = b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n'
        return await streams(text + end + USAGE + DONE)(request)

    url = await fake({"GET /v1/models": LIST, "POST /v1/completions": handle})
    async with running(url) as engine:
        work = Completion(
            "tiny", "Once", max_tokens=1, options={"echo": False, "min_tokens": 1}
        )
        outcome = await ask(engine, work)

    assert outcome == Outcome("upon", "length", Usage(3, 2))
    assert bodies == [
        {
            "model": "tiny",
            "prompt": "Once",
            "max_tokens": 1,
            "echo": False,
            "min_tokens": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


@pytest.mark.parametrize("vector", [[0.5, -2.0], "AAAAPwAAAMA="])
async def test_embeddings_are_float32_in_any_server_format(
    fake: Fakes, vector: object
) -> None:
    data = [{"index": 1, "embedding": [1.0]}, {"index": 0, "embedding": vector}]
    usage = {"prompt_tokens": 7, "total_tokens": 7}
    answer = {"object": "list", "data": data, "usage": usage}
    url = await fake({"GET /v1/models": LIST, "POST /v1/embeddings": answer})

    async with running(url) as engine:
        items = await pieces_of(engine.run(Embedding("tiny", ("a", "b"))))

    assert items == [
        Delta(0, {"embedding": "AAAAPwAAAMA="}),
        Delta(1, {"embedding": "AACAPw=="}),
        Finished("stop", Usage(7, 0)),
    ]


@pytest.mark.parametrize(
    "usage", [{"prompt_tokens": 7, "total_tokens": 7}, {"total_tokens": 7}]
)
async def test_scores_are_in_the_order_of_the_documents(
    fake: Fakes, usage: dict[str, int]
) -> None:
    scored = [(1, 0.75), (0, -2.5)]
    results = [{"index": i, "relevance_score": score} for i, score in scored]
    answer = {"results": results, "usage": usage}
    url = await fake({"GET /v1/models": LIST, "POST /v1/rerank": answer})

    async with running(url) as engine:
        items = await pieces_of(engine.run(Rerank("tiny", "q", ("a", "b"))))

    assert items == [
        Delta(0, {"relevance_score": -2.5}),
        Delta(1, {"relevance_score": 0.75}),
        Finished("stop", Usage(7, 0)),
    ]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"results": [{"index": 0, "relevance_score": 1}]}, "1 scores for 2"),
        ({"results": [{"index": 0}]}, "lacks its index or score"),
        ({"error": {"message": "it does not rank"}}, "it does not rank"),
    ],
)
async def test_invalid_scores_are_an_error(
    fake: Fakes, answer: object, reason: str
) -> None:
    url = await fake({"GET /v1/models": LIST, "POST /v1/rerank": answer})

    async with running(url) as engine:
        with pytest.raises(JobError, match=reason):
            await pieces_of(engine.run(Rerank("tiny", "q", ("a", "b"))))


async def test_large_answer_is_decoded_in_a_thread(
    fake: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_server, "DECODE_INLINE_MAX", 10)
    answer = {"data": [{"index": 0, "embedding": [1.0]}]}
    url = await fake({"GET /v1/models": LIST, "POST /v1/embeddings": answer})

    async with running(url) as engine:
        items = await pieces_of(engine.run(Embedding("tiny", ("a",))))

    assert items == [Delta(0, {"embedding": "AACAPw=="}), Finished("stop")]


async def test_endless_answer_is_aborted(
    fake: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_server, "INPUT_ANSWER_MAX", 10)
    answer = {"data": [{"index": 0, "embedding": [1.0]}]}
    url = await fake({"GET /v1/models": LIST, "POST /v1/embeddings": answer})

    async with running(url) as engine:
        with pytest.raises(JobError, match="more than 10 bytes"):
            await pieces_of(engine.run(Embedding("tiny", ("a",))))


# Engines that lie.


async def test_refused_model_is_not_offered_until_it_works(
    fake: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = answers(404, '{"error": {"message": "model \'tiny\' not found"}}')
    routes = {"GET /v1/models": LIST, "POST /v1/chat/completions": missing}
    async with running(await fake(routes)) as engine:
        with pytest.raises(Unavailable, match="lacks the model"):
            await ask(engine, "hello?")
        assert engine.models == []

        await engine.refresh()
        assert engine.models == [], "the list alone is not believed"

        monkeypatch.setattr(server_errors, "RETRY_AFTER", 0.0)
        with pytest.raises(Unavailable):
            await ask(engine, "hello?")
        routes["POST /v1/chat/completions"] = streams(HELLO, STOP, DONE)
        routes["POST /v1/completions"] = streams(STOP, DONE)
        routes["POST /v1/embeddings"] = {"data": [{"index": 0, "embedding": [1.0]}]}
        await engine.refresh()

        assert [model.name for model in engine.models] == ["tiny"]
        assert (await ask(engine, "hello?")).text == "hel"


async def test_unsupported_work_is_not_offered_again(
    fake: Fakes,
) -> None:
    url = await fake(
        {"GET /v1/models": LIST, "POST /v1/chat/completions": streams(HELLO, DONE)}
    )
    async with running(url) as engine:
        with pytest.raises(Unavailable, match="does not support this"):
            await ask(engine, Completion("tiny", "Once"))

        (model,) = engine.models
        assert model.kinds == {JobKind.CHAT}
        assert (await ask(engine, "hello?")).text == "hel"


async def test_removed_model_is_forgotten_with_its_refusals(
    fake: Fakes,
) -> None:
    routes: dict[str, object] = {"GET /v1/models": LIST}
    async with running(await fake(routes)) as engine:
        with pytest.raises(Unavailable):
            await ask(engine, "hello?")
        routes["GET /v1/models"] = {"data": [{"id": "other"}]}
        await engine.refresh()
        assert [model.name for model in engine.models] == ["other"]

        routes["GET /v1/models"] = LIST
        await engine.refresh()

        assert engine.models[0].kinds == {JobKind.CHAT, JobKind.COMPLETION}


async def test_refresh_fails_while_the_server_is_unreachable(fake: Fakes) -> None:
    routes: dict[str, object] = {"GET /v1/models": LIST}
    async with running(await fake(routes)) as engine:
        routes["GET /v1/models"] = answers(503, '{"error": "loading"}')
        with pytest.raises(Unavailable, match="status 503: loading"):
            await engine.refresh()

        routes["GET /v1/models"] = {"data": [{"id": "new"}]}
        await engine.refresh()

        assert [model.name for model in engine.models] == ["new"]


@pytest.mark.parametrize("answer", [{"data": 5}, {"models": "m"}, {}, 5])
async def test_refresh_fails_on_a_malformed_list(fake: Fakes, answer: object) -> None:
    routes: dict[str, object] = {"GET /v1/models": LIST}
    async with running(await fake(routes)) as engine:
        routes["GET /v1/models"] = answer

        with pytest.raises(Unavailable, match="lists no models"):
            await engine.refresh()


async def test_hanging_server_times_out(fake: Fakes) -> None:
    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    routes: dict[str, object] = {"GET /v1/models": LIST}
    async with running(await fake(routes)) as engine:
        routes["GET /v1/models"] = hang
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await engine.refresh()

        routes["GET /v1/models"] = LIST
        await engine.refresh()

        assert [model.name for model in engine.models] == ["tiny"]


# Secrets.


async def test_key_is_in_no_message(fake: Fakes) -> None:
    echo = answers(400, '{"error": {"message": "who is sk-secret?"}}')
    routes: dict[str, object] = {
        "GET /v1/models": LIST,
        "POST /v1/chat/completions": echo,
    }
    engine = OpenAIEngine(await fake(routes), api_key="sk-secret")
    await engine.start()

    with pytest.raises(InvalidRequest, match=r"who is …\?"):
        await ask(engine, "hello?")
    routes["POST /v1/chat/completions"] = streams(
        b'data: {"error": "sk-secret is out of credit"}\n\n'
    )
    with pytest.raises(JobError, match="… is out of credit"):
        await ask(engine, "hello?")
    routes["GET /v1/models"] = answers(403, '{"error": "sk-secret is banned"}')
    with pytest.raises(Unavailable) as refusal:
        await engine.refresh()

    assert "sk-secret" not in str(refusal.value)
    await engine.close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"220 mail\r\n", "the server there does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\n\0\r\n\r\n", "the server there does not speak HTTP"),
        (b"", "Server disconnected"),
    ],
)
async def test_url_is_in_no_reason_of_a_lost_answer(answer: bytes, reason: str) -> None:
    models = json.dumps(LIST).encode()
    listed = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(models) + models

    async def respond(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(answer if b"/chat/completions " in head else listed)
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with running(f"http://127.0.0.1:{port}/secret") as engine:
            with pytest.raises(Unavailable) as lost:
                await ask(engine, "hello?")

    assert str(lost.value) == f"the model's server: {reason}"


async def test_password_in_the_url_is_sent_but_not_shown(fake: Fakes) -> None:
    seen: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers["Authorization"])
        return web.json_response(LIST)

    url = (await fake({"GET /v1/models": handle})).replace("//", "//me:pa%24s@")
    async with running(url) as engine:
        assert "pa" not in engine.url
        with pytest.raises(Unavailable) as refusal:
            await ask(engine, "hello?")

    assert seen == ["Basic bWU6cGEkcw=="]
    assert "pa$s" not in str(refusal.value)
    assert "pa%24s" not in str(refusal.value)
