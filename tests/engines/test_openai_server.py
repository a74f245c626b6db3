"""The engine that is a server elsewhere, when the server misbehaves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
from aiohttp import web

from engines.asking import ask, chat_of, pieces_of
from engines.conftest import Handler, Serve
from shoal.domain.errors import ConfigError, JobError, ShoalError, Unavailable
from shoal.domain.work import Outcome, Usage
from shoal.engines.openai_server import OpenAIEngine
from shoal.engines.port import Finished

HELLO = b'data: {"choices":[{"delta":{"content":"hel"}}]}\n\n'
LO = b'data: {"choices":[{"delta":{"content":"lo"},"finish_reason":null}]}\n\n'
STOP = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def running(url: str, model: str = "") -> AsyncIterator[OpenAIEngine]:
    engine = OpenAIEngine(url, model)
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
        ((DONE,), Outcome("")),
    ],
)
async def test_streams_that_are_whole(
    serve: Serve, parts: tuple[bytes, ...], outcome: Outcome
) -> None:
    async with running(await serve(streams(*parts))) as engine:
        assert await ask(engine, "hello?") == outcome


@pytest.mark.parametrize(
    ("handler", "error", "message"),
    [
        (streams(), Unavailable, "ended in the middle"),
        (streams(HELLO), Unavailable, "ended in the middle"),
        (streams(HELLO, DONE[:8]), Unavailable, "ended in the middle"),
        (streams(b"data: {not json}\n\n"), JobError, "no chat chunk"),
        (streams(b"data: [1, 2]\n\n"), JobError, "no chat chunk"),
        (streams(b'data: {"choices": 4}\n\n'), JobError, "no chat chunk"),
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
        (answers(200, '{"choices": []}'), JobError, "sent application/json"),
        (answers(302, "", Location="/elsewhere"), JobError, "status 302"),
        (answers(400, '{"error": {"message": "no"}}'), JobError, "status 400: no$"),
        (answers(401, '{"error": "who?"}'), JobError, r"status 401: who\?$"),
        (answers(500, "<h1>Oh</h1>", "text/html"), JobError, "status 500: <h1>Oh"),
        (answers(500, ""), JobError, "status 500: no message"),
        (answers(503, '{"error": {"message": "loading"}}'), Unavailable, "^loading$"),
        (answers(429, "slow down", "text/plain"), Unavailable, "slow down"),
    ],
)
async def test_streams_that_are_not(
    serve: Serve, handler: Handler, error: type[ShoalError], message: str
) -> None:
    async with running(await serve(handler)) as engine:
        with pytest.raises(error, match=message):
            await ask(engine, "hello?")


async def test_a_long_complaint_is_cut(serve: Serve) -> None:
    async with running(await serve(answers(500, "x" * 10**6))) as engine:
        with pytest.raises(JobError) as failure:
            await ask(engine, "hello?")

    assert len(str(failure.value)) < 600


@pytest.mark.parametrize(
    ("header", "seconds"), [("7", 7), ("soon", 5), ("99999999", 600), ("-1", 5)]
)
async def test_a_busy_server_says_when_to_come_back(
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
        pieces = engine.chat(chat_of("hello?"))
        first = await anext(pieces)
        go_on.set()
        rest = await pieces_of(pieces)

    assert first == "hel"
    assert rest == ["lo", Finished()]


async def test_the_end_is_not_waited_for_once_it_is_announced(serve: Serve) -> None:
    never = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        response = await stream_to(request)
        await response.write(HELLO + LO + DONE)
        await never.wait()
        return response

    async with running(await serve(handle)) as engine:
        assert (await ask(engine, "hello?")).text == "hello"


async def test_closing_a_chat_hangs_up(serve: Serve) -> None:
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
        async with aclosing(engine.chat(chat_of("hello?"))) as pieces:
            await anext(pieces)
        await hung_up.wait()


async def test_a_connection_that_breaks_is_nobodys_fault(serve: Serve) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = await stream_to(request)
        await response.write(HELLO)
        assert request.transport is not None
        request.transport.abort()
        return response

    async with running(await serve(handle)) as engine:
        with pytest.raises(Unavailable):
            await ask(engine, "hello?")


async def test_the_request_says_what_the_chat_does(serve: Serve) -> None:
    requests: list[object] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        requests.append((request.headers["Authorization"], await request.json()))
        return await streams(STOP, DONE)(request)

    engine = OpenAIEngine(await serve(handle), "tiny", api_key="secret")
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


async def test_the_first_model_is_taken_where_none_is_named(serve: Serve) -> None:
    async with running(await serve(streams(DONE))) as engine:
        assert engine.model == "tiny"


async def test_a_server_without_the_model_is_refused(serve: Serve) -> None:
    url = await serve(streams(DONE))

    with pytest.raises(ConfigError, match="does not have 'huge', but tiny"):
        async with running(url, "huge"):
            pass


@pytest.mark.parametrize("end", ["/v2", ":99999"])
async def test_a_wrong_address_is_refused(serve: Serve, end: str) -> None:
    url = (await serve(streams(DONE))).removesuffix("/v1") + end

    with pytest.raises(ConfigError, match="/models"):
        async with running(url):
            pass


async def test_a_url_without_a_path_means_v1(serve: Serve) -> None:
    url = (await serve(streams(DONE))).removesuffix("/v1")

    async with running(url) as engine:
        assert engine.model == "tiny"


@asynccontextmanager
async def tagging_server() -> AsyncIterator[str]:
    """A server that lists its model with a tag under one path, and none elsewhere."""
    app = web.Application()
    tagged = answers(200, '{"data": [{"id": "llama:latest"}]}')
    app.router.add_get("/tagged/models", tagged)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("path", "model"), [("/tagged", "llama"), ("/has-no-list", "anything")]
)
async def test_a_model_that_is_not_listed_by_that_name_is_tried(
    path: str, model: str
) -> None:
    async with tagging_server() as url, running(url + path, model) as engine:
        assert engine.model == model


async def test_a_server_that_has_gone_is_unavailable() -> None:
    app = web.Application()
    app.router.add_get("/v1/models", answers(200, '{"data": [{"id": "tiny"}]}'))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]

    async with running(f"http://{host}:{port}") as engine:
        await runner.cleanup()
        with pytest.raises(Unavailable, match=f"http://{host}:{port}/v1: "):
            await ask(engine, "hello?")


async def test_a_chat_needs_a_started_engine() -> None:
    with pytest.raises(Unavailable, match="not running"):
        await ask(OpenAIEngine("http://127.0.0.1:9/v1"), "hello?")
