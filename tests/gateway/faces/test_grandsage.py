"""GrandSage's HTTP API against exchanges recorded with the original server.

Every difference from the recordings is in a table here, with its reason.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse
from hypothesis import given
from hypothesis import strategies as st

from gateway.replay import BODY, KEYS, Chat, Replay, normalized
from gateway.serving import Pool, eventually, serving
from harness.steps import calls
from protocols.grandsage.recorded import CASES, Case, of_kind
from shoal.domain.errors import InvalidRequest
from shoal.domain.outcome import AnswerPiece, Delta
from shoal.gateway.faces.grandsage import decode_chat, encode_pieces
from shoal.gateway.http.responses import encode_lines
from shoal.store.codec import encode_work

pytestmark = pytest.mark.shared_pool

EVERYWHERE = "the status is called OK, and a stranger's answer has a content type"

INVALID = '{"err":"invalid request"}\n'
UNKNOWN = '{"err":"unknown model"}\n'
STRANGER = '{"err":"unauthorized"}\n'

BODIES: dict[str, tuple[str, str]] = {
    "req-system-number": ("a system text that is no text kills nodes", INVALID),
    "req-role-number": ("a role that is no text kills nodes", INVALID),
    "req-content-object": ("a content that is no text kills nodes", INVALID),
    "req-max-neg": ("a negative limit kills nodes", INVALID),
    "req-minimal": ("a node drops an empty conversation without an answer", INVALID),
    "req-messages-object": ("a node drops an empty conversation", INVALID),
    "req-model-proto": ("no model name is special", UNKNOWN),
    "req-model-tostring": ("no model name is special", UNKNOWN),
}
CONTENTS: dict[str, tuple[str, str]] = {
    "req-unicode": (
        "half a character cannot be written in UTF-8",
        "日本 😀 \u2028 \ufffd",
    ),
    "req-split-utf8-body": ("the body is assembled before it is decoded", "日"),
}
TOKENS: dict[str, tuple[str, int]] = {
    "req-max-huge": ("a node drops a task with a limit beyond its context", 1024),
}
STRANGERS = {
    "auth-bypass-constructor": "no key is special",
    "auth-bypass-toString": "no key is special",
    "auth-bypass-__proto__": "no key is special",
    "auth-bypass-hasOwnProperty": "no key is special",
}
ROUTES: dict[str, tuple[str, int, str]] = {
    "route-get": ("a wrong method is an error", 405, "GET /api/chat"),
    "route-options": ("a wrong method is an error", 405, "OPTIONS /api/chat"),
    "route-slash": ("an unknown path is an error", 404, "POST /api/chat/"),
    "route-unknown": ("an unknown path is an error", 404, "GET /nope"),
    "route-root": ("the dashboard is there", 200, "Shoal"),
    "route-css": ("there is no playground", 404, "GET /tailwind.min.css"),
    "route-query": ("a query changes nothing", 200, UNKNOWN),
}
LINES: dict[str, tuple[str, list[str]]] = {
    "frames-split-2byte": ("a split character is kept whole", ["é"]),
    "frames-split-3byte": ("a split character is kept whole", ["a", "日b"]),
    "frames-split-4byte": ("a split character is kept whole", ["😀"]),
}


def test_text_beside_other_fields_is_a_line() -> None:
    pieces: list[AnswerPiece] = [
        Delta(0, {"reasoning_content": "hm"}),
        Delta(0, {"reasoning_content": "hm", "content": "a"}),
        "b",
        Delta(0, {"content": "c"}, logprobs={"content": []}),
        Delta(0, {"refusal": "no"}),
    ]

    assert encode_pieces(pieces) == encode_lines(
        [{"o": text} for text in ("a", "b", "c", "no")]
    )


def test_lines_of_one_read_take_as_many_calls_however_many() -> None:
    few, many = ([{"o": "é"}] * count for count in (10, 99))

    assert calls(lambda: encode_lines(few)) == calls(lambda: encode_lines(many))
    assert (
        encode_lines([{"o": "é"}, {"o": "\ud83d"}])
        == '{"o":"é"}\n{"o":"\ufffd"}\n'.encode()
    )


@pytest.fixture(scope="module")
def pool_options() -> dict[str, Any]:
    return {"keys": KEYS}


@of_kind("request_to_task")
async def test_tasks_match_the_recordings(pool: Pool, case: Case) -> None:
    chunks = [bytes.fromhex(chunk) for chunk in case.get("request_body_hex_chunks", ())]
    body = b"".join(chunks) or case["request_body"].encode()
    # A node for every model in the cases, and one with the default model.
    async with pool.node() as m1, pool.node(model="openbuddy-13b-v1.3-fp16") as default:
        await pool.wait_joined(2)
        chat = Chat()
        asking = asyncio.create_task(chat.ask(pool, body, KEYS["alice"]))
        await eventually(lambda: bool(m1.texts or default.texts) or chat.ended)
        node = m1 if m1.texts else default
        if node.texts:
            await node.end(node.tasks[0]["id"])
        await asking

    assert chat.response is not None
    _, expected = BODIES.get(case["id"], ("", case["response"]["body"]))
    assert chat.text == expected
    check_head(chat.response, case)
    if case["task_text"] is None or case["id"] in BODIES:
        assert not node.texts
        return
    task_id = node.tasks[0]["id"]
    recorded = case["task_text"].replace("{{id}}", str(task_id)).replace("{{now}}", "0")
    task = normalized(recorded)
    if case["id"] in CONTENTS:
        task["messages"][0]["content"] = CONTENTS[case["id"]][1]
    if case["id"] in TOKENS:
        task["max_new_tokens"] = TOKENS[case["id"]][1]
    assert normalized(node.texts[0]) == task
    defaulted = "model" not in json.loads(body)
    assert node is (default if defaulted else m1)


async def test_split_body_is_assembled(pool: Pool) -> None:
    chunks = CASES["req-split-utf8-body"]["request_body_hex_chunks"]

    async def body() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield bytes.fromhex(chunk)
            await asyncio.sleep(0)

    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer())
        async with pool.session.post(
            f"{pool.url}/api/chat", data=body(), headers=pool.headers(KEYS["alice"])
        ) as response:
            assert await response.text() == '{"done":true}\n'

    assert node.tasks[0]["messages"][0]["content"] == "日"


@of_kind("http_auth")
async def test_anonymous_requests_match_the_recordings(pool: Pool, case: Case) -> None:
    headers = {}
    if case["authorization"] is not None:
        headers["Authorization"] = case["authorization"]
    body = None if case["method"] == "GET" else '{"model":"zzz","messages":[]}'

    async with pool.session.request(
        case["method"], pool.url + case["path"], headers=headers, data=body
    ) as response:
        text = await response.text()

    if case["id"] in ROUTES:
        _, status, words = ROUTES[case["id"]]
        assert response.status == status
        assert words in text
    elif case["id"] in STRANGERS:
        assert response.status == 200
        assert text == STRANGER
    else:
        assert text == case["response"]["body"]
        check_head(response, case)


@of_kind("frames_to_http")
async def test_lines_match_the_recordings(pool: Pool, case: Case) -> None:
    async with AsyncExitStack() as stack:
        replay = Replay(pool, stack)
        await replay.play({"node": "n1"})
        await replay.play({"chat": "c0"})
        node, chat = replay.nodes["n1"], replay.chats["c0"]
        task_id = replay.ids["id"] = (await node.task())["id"]

        for frame in case["frames"]:
            text = frame["text"] if isinstance(frame, dict) else replay.frame(frame)
            await node.send(text)

        await eventually(lambda: chat.ended)
        texts = [
            text.replace("{{id+1}}", str(task_id + 1)).replace("{{id}}", str(task_id))
            for text in case["node_received"]
        ]
        await eventually(lambda: len(node.texts) == 1 + len(texts))
        assert node.texts[1:] == texts
    body = case["response"]["body"]
    if case["id"] in LINES:
        _, pieces = LINES[case["id"]]
        body = "".join(f'{{"o":"{text}"}}\n' for text in pieces) + '{"done":true}\n'
    assert chat.text == body
    assert chat.response is not None
    check_head(chat.response, case)


def test_tables_name_recorded_cases_and_real_differences() -> None:
    named = [*BODIES, *CONTENTS, *STRANGERS, *ROUTES, *LINES]

    assert set(named) <= CASES.keys()
    for name, (_, body) in BODIES.items():
        assert CASES[name]["response"]["body"] != body
    for name in STRANGERS:
        assert CASES[name]["response"]["body"] != STRANGER


async def test_a_full_queue_is_an_error_line(tmp_path: Path) -> None:
    async with serving(tmp_path, keys=KEYS, queue_max=0) as pool, pool.node(slots="0"):
        await pool.wait_joined()
        chat = Chat()

        await chat.ask(pool, BODY, KEYS["alice"])

    assert chat.text == '{"err":"too many requests are waiting"}\n'


async def test_a_cancelled_job_is_an_error_line(pool: Pool) -> None:
    chat = Chat()
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(chat.ask(pool, BODY, KEYS["alice"]))
        await node.task()
        (job_id,) = pool.hub.pool.jobs
        pool.hub.cancel(job_id, "cancelled by an operator")

    assert chat.text == '{"err":"cancelled"}\n'


async def test_a_body_beyond_the_limit_is_an_error_line(pool: Pool) -> None:
    async with pool.session.post(
        f"{pool.url}/api/chat",
        data=BytesIO(b" " * (17 << 20)),
        headers=pool.headers(KEYS["alice"]),
    ) as response:
        assert response.status == 200
        assert await response.text() == '{"err":"request too large"}\n'


OLLAMAS: tuple[dict[str, Any], ...] = (
    *({"stream": False}, {"options": {}}, {"keep_alive": 0}, {"think": True}),
    *({"format": "json"}, {"tools": []}),
)
"""Fields of chats that only Ollama's clients send."""


async def test_chats_of_ollama_get_its_address(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        ("ollama-python/0.6.3 (x86_64 linux) Python/3.11", {}),
        ("ollama-js/0.6.0", {"messages": []}),
        ("ollama/0.13.0 (amd64 linux) Go/go1.24", {}),
        *(("curl/8.5", {"model": "m1", "messages": [], **field}) for field in OLLAMAS),
    ]
    for agent, body in asked:
        headers = {**pool.headers(KEYS["alice"]), "User-Agent": agent}
        async with pool.session.post(
            f"{pool.url}/api/chat", json=body, headers=headers
        ) as response:
            answered = await response.json()

        with subtests.test(agent=agent, body=body):
            assert response.status == 404
            assert "http://HOST:PORT/ollama" in answered["error"]


@given(st.binary() | st.text().map(str.encode))
def test_any_bytes_decode_or_are_rejected(data: bytes) -> None:
    _decode(data)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "length"]), inner)
    ),
    max_leaves=5,
)


@given(
    st.fixed_dictionaries(
        {"messages": values},
        optional={
            "model": values,
            "system": values,
            "temperature": values,
            "max_new_tokens": values,
        },
    )
)
def test_any_fields_decode_or_are_rejected(body: dict[str, Any]) -> None:
    _decode(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("given", "temperature"),
    [
        ("0.7abc", 0.7), ("1.5", 0), ("1.5abc", 1.5), ("0x1", 0), ("9x", 2),
        ("-1x", 0), ("Infinityx", 2), ([0.5, 1], 0.5), ([5, 1], 2), ({}, 0), ("", 0),
    ],
)  # fmt: skip
def test_bounds_of_the_temperature_are_those_of_the_whole_text(
    given: Any, temperature: float
) -> None:
    body = {"messages": [{"content": "hi"}], "temperature": given}

    assert decode_chat(json.dumps(body).encode()).temperature == temperature


@pytest.mark.parametrize(
    ("given", "contents"),
    [
        ({"length": 2, "0": {"content": "a"}, "1": {"content": "b"}}, ["a", "b"]),
        ({"length": "0x1", "0": {"content": "a"}}, ["a"]),
        ({"length": 0.5, "0": {"content": "a"}}, ["a"]),
        ({"length": [1], "0": {"content": "a"}}, ["a"]),
        ({"length": 1, "0": ["an array has no content"]}, [""]),
        ({"length": -1, "0": {"content": "a"}}, []),
        ({"length": None, "0": {"content": "a"}}, []),
        ({"length": "many"}, []),
        ({"0": {"content": "a"}}, []),
        ("hi", ["", ""]),
        (5, []),
        (False, []),
    ],
)
def test_what_is_like_an_array_is_walked_as_one(
    given: Any, contents: list[str]
) -> None:
    chat = decode_chat(json.dumps({"messages": given}).encode())

    assert [message["content"] for message in chat.messages[1:]] == contents


@pytest.mark.parametrize(
    "messages",
    [
        {"length": 2, "0": {"content": "a"}},
        {"length": 1e999},
        [{"content": []}],
        [{"role": {}}],
        None,
    ],
)
def test_a_missing_message_or_one_that_kills_nodes_is_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequest):
        decode_chat(json.dumps({"messages": messages}).encode())


@pytest.mark.parametrize("role", ["tool", "function", "Boss", "user", "developer"])
async def test_any_role_is_passed_on(pool: Pool, role: str) -> None:
    question = {"role": "user", "content": "hi"}
    body = {"model": "m1", "messages": [question, {"role": role, "content": "x"}]}
    chat = Chat()
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(node.answer())
        await chat.ask(pool, json.dumps(body).encode(), KEYS["alice"])

    assert chat.text == '{"done":true}\n'
    assert node.tasks[0]["messages"][1] == {"role": role, "content": "x"}


def test_instructions_without_a_question_are_one() -> None:
    messages = [{"role": "system", "content": content} for content in "ab"]

    chat = decode_chat(json.dumps({"messages": messages}).encode())

    assert [message["role"] for message in chat.messages] == [
        "system",
        "system",
        "user",
    ]


def test_excessive_messages_are_rejected() -> None:
    array_like = {"length": 1e9} | {str(index): 0 for index in range(20_000)}
    for messages in ("x" * 10_000_000, [0] * 1_000_000, array_like):
        with pytest.raises(InvalidRequest, match="more than"):
            decode_chat(json.dumps({"messages": messages}).encode())


def check_head(response: ClientResponse, case: Case) -> None:
    """Check the status and the headers, except for the differences ``EVERYWHERE``."""
    recorded = case["response"]
    assert response.status == recorded["status"] == 200
    if recorded["content_type"] is not None:
        assert response.headers["Content-Type"] == recorded["content_type"]
    assert response.headers.get("Cache-Control") == recorded["cache_control"]
    assert response.headers.get("Transfer-Encoding") == recorded["transfer_encoding"]


def _decode(data: bytes) -> None:
    try:
        chat = decode_chat(data)
    except InvalidRequest:
        return
    assert encode_work(chat)
    assert chat.max_tokens is not None
    assert chat.max_tokens > 0
    assert chat.temperature is not None
    assert 0 <= chat.temperature <= 2
    for message in chat.messages:
        assert isinstance(message["role"], str)
        assert isinstance(message["content"], str)
