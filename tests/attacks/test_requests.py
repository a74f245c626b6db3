"""Random bodies: each is answered, and no node gets input that crashes it."""

import asyncio
import json
import math
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import pytest
from aiohttp import ClientWebSocketResponse, WSMsgType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attacks.siege import CHAT, OLD_CHAT, address, besieged
from gateway.serving import WAIT_MAX, Pool

EXAMPLES = settings(
    max_examples=150,
    suppress_health_check=list(HealthCheck),
    database=None,
)

# Beyond what JSON can say, Python's writer says NaN and halves of characters.
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**31, 2**32, 2**53, 2**63, 2**64, -(2**63), 10**400])
    | st.floats()
    | st.text(st.characters(), max_size=20)
    | st.sampled_from(["user", "assistant", "tool", "0.5", "1e999", "\ud800", "\0", ""])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
plain = st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=9)})
odd = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("role", "content", "name", "tool_calls", "refusal"), values
    ),
)
messages = st.lists(plain | odd, max_size=4) | values
numbers = scalars | st.floats(-1, 3) | st.integers(-2, 9)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just("m1") | values,
    "messages": st.lists(plain, min_size=1, max_size=3) | messages,
    "system": values,
    "temperature": numbers | values,
    "max_new_tokens": numbers | values,
    "max_tokens": numbers,
    "max_completion_tokens": numbers,
    "top_p": numbers,
    "seed": numbers,
    "presence_penalty": numbers,
    "stop": values,
    "stream": values,
    "stream_options": values,
    "n": numbers,
    "tools": values,
    "response_format": values,
    "logit_bias": values,
    "__proto__": values,
}


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request with some invalid fields."""
    body: dict[str, Any] = {
        "model": "m1",
        "messages": [{"role": "user", "content": "hi"}],
    }
    for name in draw(st.sets(st.sampled_from(sorted(FIELDS)), max_size=5)):
        body[name] = draw(FIELDS[name])
    for name in draw(st.sets(st.sampled_from(["model", "messages"]), max_size=1)):
        if draw(st.integers(0, 4)) == 0:
            del body[name]
    ascii_only = draw(st.booleans())
    text = json.dumps(body, ensure_ascii=ascii_only)
    return text.encode("utf-8", "surrogatepass")


PLAIN = b'{"model": "m1", "messages": [{"role": "user", "content": "hi"}]}'
bodies = requests() | values.map(lambda value: json.dumps(value).encode())


@dataclass
class FragileNode:
    """Answers every task, after checking it for input that crashes real nodes."""

    socket: ClientWebSocketResponse
    tasks: int = 0
    deadly: list[str] = field(default_factory=list)

    async def serve(self) -> None:
        async for message in self.socket:
            assert message.type is WSMsgType.TEXT
            text: str = message.data
            try:
                task = json.loads(text, parse_constant=_refuse)
                text.encode()
            except ValueError:
                self.deadly.append(text)
                continue
            if "stop" in task:
                continue
            self.tasks += 1
            if not survivable(task):
                self.deadly.append(text)
            head = task["id"].to_bytes(4, "big")
            await self.socket.send_bytes(head + b"ok")
            await self.socket.send_bytes(head)


def survivable(task: dict[str, Any]) -> bool:
    """Return whether a real node survives a task, by the recorded crashes."""
    temperature = task["temperature"]
    return (
        isinstance(task["system"], str)
        and isinstance(task["messages"], list)
        and all(
            message.keys() == {"role", "content"}
            and isinstance(message["role"], str)
            and isinstance(message["content"], str)
            for message in task["messages"]
        )
        and type(task["max_new_tokens"]) is int
        and 1 <= task["max_new_tokens"] < 2**31
        and type(temperature) in (int, float)
        and math.isfinite(temperature)
        and (temperature == 0 or temperature >= 0.01)
        and type(task["id"]) is int
        and 0 <= task["id"] < 2**32
    )


@dataclass(frozen=True, slots=True)
class Field:
    """A coordinator and a node shared by all examples."""

    run: Callable[[Coroutine[Any, Any, Any]], Any]
    pool: Pool
    node: FragileNode


@contextmanager
def open_field(folder: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Field]:
    with asyncio.Runner() as runner:
        ready: asyncio.Future[tuple[Pool, FragileNode]]
        over = asyncio.Event()

        async def live() -> None:
            async with besieged(folder, caplog) as pool:
                socket = await pool.session.ws_connect(pool.url + address())
                node = FragileNode(socket)
                serving = asyncio.create_task(node.serve())
                await pool.wait_joined()
                ready.set_result((pool, node))
                await over.wait()
                await socket.close()
                await serving

        async def begin() -> asyncio.Task[None]:
            nonlocal ready
            ready = asyncio.get_running_loop().create_future()
            living = asyncio.create_task(live())
            await asyncio.wait((living, ready), return_when="FIRST_COMPLETED")
            return living

        async def finish() -> None:
            over.set()
            async with asyncio.timeout(3 * WAIT_MAX):
                await living

        living = runner.run(begin())
        pool, node = ready.result()
        yield Field(runner.run, pool, node)
        runner.run(finish())


async def post(pool: Pool, path: str, body: bytes) -> tuple[int, bytes]:
    async with (
        asyncio.timeout(WAIT_MAX),
        pool.session.post(
            pool.url + path, data=BytesIO(body), headers=pool.headers()
        ) as response,
    ):
        return response.status, await response.read()


@pytest.mark.long
def test_any_openai_request_is_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_field(tmp_path, caplog) as its:

        @EXAMPLES
        @given(bodies)
        def attack(body: bytes) -> None:
            status, answer = its.run(post(its.pool, CHAT, body))

            assert status in (200, 400, 404), answer
            if answer.startswith(b"data: "):
                assert answer.endswith(b"data: [DONE]\n\n")
            else:
                decoded = json.loads(answer)
                assert ("error" in decoded) is (status != 200)
            assert its.node.deadly == []

        attack()
        status, answer = its.run(post(its.pool, CHAT, PLAIN))
        assert status == 200, answer
        assert its.node.tasks > 0


@pytest.mark.long
def test_any_grandsage_request_is_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_field(tmp_path, caplog) as its:

        @EXAMPLES
        @given(bodies)
        def attack(body: bytes) -> None:
            status, answer = its.run(post(its.pool, OLD_CHAT, body))

            if status == 404:  # evidently Ollama's
                assert "add /ollama" in json.loads(answer)["error"]
                return
            assert status == 200
            last = json.loads(answer.splitlines()[-1])
            assert last in (
                {"done": True},
                {"err": "invalid request"},
                {"err": "unknown model"},
            )
            assert its.node.deadly == []

        attack()
        status, answer = its.run(post(its.pool, OLD_CHAT, PLAIN))
        assert (status, answer.splitlines()[-1]) == (200, b'{"done":true}')
        assert its.node.tasks > 0


HOSTILE = {
    "invalid UTF-8": b'{"model":"m1","messages":[{"role":"\xff\xfe"}]}',
    "cut UTF-8": b'{"model":"m1","messages":[{"role":"user","content":"\xe2\x82',
    "overlong NUL": b'{"model":"m1","messages":[{"content":"\xc0\x80"}]}',
    "UTF-16": '{"model":"m1","messages":[]}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"model":"m1","messages":[]}',
    "nothing": b"",
    "NUL": bytes(100),
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"a":' * 100_000,
    "deep in a field": b'{"model":"m1","messages":' + b"[" * 900 + b"]" * 900 + b"}",
    "deep options": b'{"model":"m1","messages":[],"logit_bias":'
    + b'{"a":' * 900
    + b"1"
    + b"}" * 900
    + b"}",
    "an endless number": b'{"model":"m1","messages":[],"seed":' + b"9" * 100_000 + b"}",
    "an endless temperature": b'{"model":"m1","messages":[{}],"temperature":"'
    + b"9" * 1_000_000
    + b'"}',
    "an endless exponent": b'{"model":"m1","messages":[{}],"temperature":1e'
    + b"9" * 100_000
    + b"}",
    "twice the same field": b'{"model":"m1","model":[],"messages":[],"messages":7}',
    "NaN": b'{"model":"m1","messages":[],"temperature":NaN}',
    "a million messages": b'{"model":"m1","messages":[' + b"{}," * 999_999 + b"{}]}",
    "a long model": b'{"model":"' + b"m" * 1_000_000 + b'","messages":[{}]}',
    "a long role": b'{"model":"m1","messages":[{"role":"' + b"r" * 1_000_000 + b'"}]}',
    "escaped halves": b'{"model":"\\ud800","messages":[{"role":"\\udc00"}]}',
    "a hundred thousand stops": b'{"model":"m1","messages":[{"role":"user"}],"stop":['
    + b'"a",' * 99_999
    + b'"a"]}',
}


@pytest.mark.parametrize("path", [CHAT, OLD_CHAT])
def test_hostile_bodies_are_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    with open_field(tmp_path, caplog) as its:
        for name, body in HOSTILE.items():
            status, answer = its.run(post(its.pool, path, body))

            allowed = (400, 404) if path == CHAT else (200,)
            assert status in allowed, (name, answer[:300])
            assert len(answer) < 3000, name
            assert its.node.deadly == []


@pytest.mark.long
def test_unknown_model_is_not_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_field(tmp_path, caplog) as its:

        @settings(EXAMPLES, max_examples=50)
        @given(st.text(min_size=1, max_size=300).filter(lambda name: name != "m1"))
        def attack(model: str) -> None:
            body = json.dumps({"model": model, "messages": [{"role": "user"}]}).encode()
            status, answer = its.run(post(its.pool, CHAT, body))
            assert status == 404 or (status == 400 and len(model) > 256), answer
            _, line = its.run(post(its.pool, OLD_CHAT, body))
            assert line == b'{"err":"unknown model"}\n'

        attack()
        assert its.node.tasks == 0


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)
