"""OpenAI-compatible servers that attack their worker."""

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from random import Random

import pytest
import pytest_asyncio

from attacks.siege import CHAT, TOKEN, ask, body, check_log, standing
from gateway.serving import WAIT_MAX, Pool, eventually
from shoal.domain.errors import ConfigError
from shoal.engines.openai_server import OpenAIEngine
from shoal.engines.text_tasks import TaskRunner
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.shoal import ShoalDialer
from shoal.transports import websocket
from shoal.transports.clock import LoopClock
from shoal.worker.agent import Agent, WorkerEvent
from shoal.worker.jobs import EngineSlots, only_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "engine-key-that-no-log-may-hold"
MODELS = json.dumps({"data": [{"id": "m1"}]}).encode()
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"
GOOD = b'data: {"choices":[{"delta":{"content":"good"}}]}\n\ndata: [DONE]\n\n'
HELLO = b'data: {"choices":[{"delta":{"content":"hello"}}]}\n\n'
STOP = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def ending(usage: str, reason: str = '"stop"') -> bytes:
    """Write an answer with such usage and reason."""
    return (
        SSE
        + b"\r\n"
        + HELLO
        + b'data: {"choices":[{"delta":{},"finish_reason":%b}],"usage":%b}\n\n'
        % (reason.encode(), usage.encode())
        + DONE
    )


def tokens(prompt: str, completion: str = "1") -> str:
    return f'{{"prompt_tokens":{prompt},"completion_tokens":{completion}}}'


def response_of(status: str, text: str, type_: str = "application/json") -> bytes:
    """Write an answer that is no stream."""
    data = text.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {type_}\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


ANSWERS = {
    "nothing": b"",
    "garbage": bytes(range(256)) * 100,
    "TLS": bytes.fromhex("1503030002022800"),
    "no headers": b"HTTP/1.1 200 OK\r\n",
    "endless headers": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000,
    "a long header": b"HTTP/1.1 200 OK\r\nX: " + b"y" * 1_000_000,
    "no stream": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
    "a redirect": b"HTTP/1.1 307 X\r\nLocation: http://127.0.0.1:1/\r\n\r\n",
    "a refusal without end": b"HTTP/1.1 400 No\r\n\r\n" + b"x" * 1_000_000,
    "a refusal with controls": b"HTTP/1.1 400 No\r\nContent-Length: 9\r\n\r\n"
    + b"\x1b[2J\n\0\xff\xfe!",
    "a refusal with halves": b"HTTP/1.1 400 No\r\nContent-Length: 32\r\n\r\n"
    + b'{"error":{"message":"a\\ud800b"}}',
    "busy for ever": b"HTTP/1.1 429 X\r\nRetry-After: 99999\r\n"
    + b"Content-Length: 0\r\n\r\n",
    "a bad length": SSE + b"Content-Length: x\r\n\r\n" + HELLO,
    "too short": SSE + b"Content-Length: 100000\r\n\r\n" + HELLO,
    "bad chunks": SSE + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "no compression": SSE + b"Content-Encoding: gzip\r\n\r\n" + HELLO,
    "a bomb": SSE
    + b"Content-Encoding: gzip\r\n\r\n"
    + gzip.compress(b"data: " + b" " * 5_000_000, 1),
    "an odd charset": SSE.replace(b"stream", b"stream; charset=\xff\xfe")
    + b"\r\n"
    + HELLO,
    "a long event": SSE + b"\r\ndata: " + b"x" * 3_000_000,
    "a long text": SSE
    + b'\r\ndata: {"choices":[{"delta":{"content":"'
    + b"x" * 900_000
    + b'"}}]}\n\n'
    + DONE,
    "many lines": SSE + b"\r\n" + b"data:\n" * 200_000,
    "many comments": SSE + b"\r\n" + b":\n" * 200_000,
    "deep": SSE + b"\r\ndata: " + b"[" * 100_000 + b"\n\n",
    "deep where nobody looks": SSE
    + b'\r\ndata: {"x":'
    + b"[" * 2000
    + b"]" * 2000
    + b"}\n\n",
    "no UTF-8": SSE + b'\r\ndata: {"choices":[{"delta":{"content":"\xff"}}]}\n\n',
    "halves": SSE + b'\r\ndata: {"choices":[{"delta":{"content":"\\ud800"}}]}\n\n',
    "content that is a number": SSE
    + b'\r\ndata: {"choices":[{"delta":{"content":5}}]}\n\n',
    "an error that is a list": SSE + b'\r\ndata: {"error":[1]}\n\n',
    "an error that is null": SSE + b'\r\ndata: {"error":null}\n\n',
    "a long error": SSE
    + b'\r\ndata: {"error":"'
    + b"\xe2\x82\xac" * 100_000
    + b'"}\n\n',
}

WHOLE = {
    "negative usage": ending(tokens("-1", "-1")),
    "huge usage": ending(tokens(str(2**63), str(2**64 - 1))),
    "endless usage": ending(tokens("9" * 100)),
    "half a usage": ending('{"prompt_tokens":3}'),
    "no usage": ending("null"),
    "a long reason": ending("null", '"' + "x" * 10_000 + '"'),
    "a reason with controls": ending("null", '"\\u0000\\u001b[2J"'),
    "an empty reason": ending("null", '""'),
}

MODEL_LISTS = {
    "nothing": b"",
    "garbage": bytes(range(256)),
    "no models": b'{"data":[]}',
    "no JSON": b"<html>",
    "deep": b"[" * 100_000,
    "no list": b'{"data":5}',
    "numbers": b'{"data":[{"id":5}]}',
    "no UTF-8": b'{"data":[{"id":"\xff"}]}',
    "a model that clears the screen": b'{"data":[{"id":"m2\\u001b[2J"}]}',
    "endless": b'{"data":[' + b'{"id":"x"},' * 1_000_000,
}


@pytest.fixture(autouse=True)
def clean_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    yield
    check_log(caplog)
    assert KEY not in caplog.text


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.worker.agent.RETRY_FIRST", 0.01)


@asynccontextmanager
async def server(
    *answers: bytes, models: bytes = MODELS, left: list[bytes] | None = None
) -> AsyncIterator[str]:
    """Serve models, each answer to one chat, and then good ones; yield the URL.

    ``left`` may hold the answers instead, and shows which are still to come.
    """
    left = list(answers) if left is None else left

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(
            ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError
        ):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n%b" % (len(models), models)
                )
            else:
                writer.write(left.pop(0) if left else SSE + b"\r\n" + GOOD)
            await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    finally:
        listening.close()
        await listening.wait_closed()


@asynccontextmanager
async def worker(pool: Pool, url: str, name: str = "w1") -> AsyncIterator[Agent]:
    """Join with an engine for the server."""
    engine = OpenAIEngine(url, api_key=KEY)
    await engine.start()
    reports: list[WorkerEvent] = []
    member = WorkerProfile(name, engine.models[0], 2, TOKEN)
    agent = Agent(
        ShoalDialer(pool.url, member),
        websocket.connect_websocket,
        only_model(TaskRunner(engine, member.model), EngineSlots(2)),
        LoopClock(),
        Random(1),
        reports.append,
        offers=member.first_offers,
    )
    running = asyncio.create_task(agent.run())
    try:
        await eventually(lambda: has_joined(pool, name))
        yield agent
        assert not running.done(), "the worker gave up"
        assert not [event for event in reports if event.kind == "lost"]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await engine.close()


def has_joined(pool: Pool, name: str) -> bool:
    """Return whether a worker is in the pool, and connected."""
    ids = (each for each in pool.hub.pool.workers if each.startswith(f"shoal:{name}/"))
    return any(pool.hub.connected_at(each) is not None for each in ids)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing_pool(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Pool]:
    folder = tmp_path_factory.mktemp("coordinator")
    async with standing(folder, queue_wait=0.1) as running:
        yield running


@pytest.fixture
def pool(shared_pool: Pool) -> Pool:
    return shared_pool


async def test_malformed_engine_answer_fails_only_its_job(pool: Pool) -> None:
    async with server(*ANSWERS.values()) as url, worker(pool, url) as agent:
        for name in ANSWERS:
            async with asyncio.timeout(WAIT_MAX):
                answer = await ask(pool)
            reports = json.loads(answer)
            assert "error" in reports or "choices" in reports, name
            assert KEY not in answer, name
            assert len(answer) < 1_000_000, name
        while "good" not in await ask(pool):
            pass  # what was refused is asked for again

        assert not agent._jobs


HALF = SSE + b"\r\n" + HELLO

# What another worker can make good: the client gets its answer all the same.
PASSING = {
    "dies before it answers": b"",
    "dies in the middle": HALF,
    "half an event": SSE + b"\r\n" + HELLO + b'data: {"choices":[{"del',
    "half a chunked answer": SSE + b"Transfer-Encoding: chunked\r\n\r\n5\r\ndata",
    "gives the answer up": SSE
    + b'\r\ndata: {"choices":[{"delta":{},"finish_reason":"abort"}]}\n\n'
    + DONE,
    "429": response_of("429 No", '{"error":{"message":"slow down"}}'),
    "503": response_of("503 No", '{"error":{"message":"Loading model","code":503}}'),
    "502 from a proxy": response_of("502 No", "<html>Bad Gateway</html>", "text/html"),
    "404 for its model": response_of("404 No", '{"error":"model \\"m1\\" not found"}'),
    "500 as it is down": response_of(
        "500 No", '{"error":"llama runner process has terminated"}'
    ),
    "overloaded in the stream": SSE
    + b'\r\ndata: {"error":{"message":"busy","code":503}}\n\n',
}

# What would be so anywhere else, or cannot be told from it: status and message.
FINAL = {
    "500": (
        response_of("500 No", '{"error":"division by zero"}'),
        502,
        "division by zero",
    ),
    "500 with HTML": (response_of("500 No", "<h1>Oh", "text/html"), 502, "text/html"),
    "HTML": (
        response_of("200 OK", "<h1>Hi", "text/html"),
        502,
        "sent text/html, expected",
    ),
    "401": (response_of("401 No", '{"error":"no"}'), 502, "--engine-key"),
    "400": (response_of("400 No", '{"error":{"message":"too hot"}}'), 400, "too hot"),
    "a long prompt": (
        response_of(
            "400 No", '{"error":"the input length exceeds the context length"}'
        ),
        400,
        "exceeds the context length",
    ),
    "an error in the stream": (
        SSE + b'\r\ndata: {"error":{"message":"out of paper"}}\n\n',
        502,
        "out of paper",
    ),
    "no JSON in the stream": (SSE + b"\r\ndata: {hello\n\n", 502, "no chunk"),
}


@pytest.mark.parametrize("name", PASSING)
async def test_another_worker_recovers_an_engine_failure(pool: Pool, name: str) -> None:
    spoilt = [PASSING[name]]
    async with (
        server(left=spoilt) as bad,
        worker(pool, bad),
        server() as working,
        worker(pool, working, "w2"),
    ):
        answers = []
        while spoilt:  # the other one may be asked first
            answers.append(json.loads(await ask(pool)))

    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert set(texts) == {"good"}


@pytest.mark.parametrize("name", FINAL)
async def test_engine_error_is_quoted(pool: Pool, name: str) -> None:
    answer, status, message = FINAL[name]
    async with server(answer) as url, worker(pool, url):
        response = await pool.session.post(
            pool.url + CHAT, data=json.dumps(body()), headers=pool.headers()
        )
        reports = (await response.json())["error"]

    assert response.status == status
    assert message in reports["message"]
    assert KEY not in reports["message"]


async def test_implausible_counts_and_reasons_do_not_fail_an_answer(pool: Pool) -> None:
    async with server(*WHOLE.values()) as url, worker(pool, url):
        for name in WHOLE:
            reports = json.loads(await ask(pool))
            assert reports["choices"][0]["message"]["content"] == "hello", name
            assert reports["choices"][0]["finish_reason"] == "stop", name
            assert min(reports["usage"].values()) >= 0, name


@pytest.mark.parametrize("name", MODEL_LISTS)
async def test_malformed_model_list_is_a_configuration_error(name: str) -> None:
    async with server(models=MODEL_LISTS[name]) as url:
        with pytest.raises(ConfigError) as error:
            await OpenAIEngine(url, api_key=KEY).start()

    assert str(error.value).isprintable()
    assert KEY not in str(error.value)


async def test_endless_server_is_aborted_when_the_client_leaves(
    pool: Pool,
) -> None:
    never = asyncio.Event()
    hung_up = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            size = b"Content-Length: %d\r\n\r\n" % len(MODELS)
            writer.write(b"HTTP/1.1 200 OK\r\n" + size + MODELS)
        else:
            writer.write(SSE + b"\r\n" + HELLO)
            never.set()
            await reader.read(-1)
            hung_up.set()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    async with worker(pool, url) as agent, asyncio.timeout(WAIT_MAX):
        pending = asyncio.create_task(ask(pool, stream=True))
        await never.wait()
        pending.cancel()
        await hung_up.wait()
        await eventually(lambda: not agent._jobs)
    listening.close()
    await listening.wait_closed()
