"""Servers that refuse a part of a request, and get it without."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from msgspec.structs import replace

from engines.outputs import pieces_of
from shoal.domain.errors import InvalidRequest, JobError, Unavailable
from shoal.domain.outcome import Delta, Usage
from shoal.domain.work import JSON, Chat, Completion, Embedding
from shoal.engines.engine import Finished
from shoal.engines.openai_server import OpenAIEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

Body = Mapping[str, Any]


class Server:
    """A server that answers each choice with its number, unless it ``refuses``.

    That returns a message, or None.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.bodies: list[Body] = []
        self.refuses: Callable[[Body], str | None] = lambda body: None
        self.status = 400
        self.choices = 128  # it makes no more

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        if (message := self.refuses(body)) is not None:
            error = {"message": message, "code": self.status}
            return web.json_response({"error": error}, status=self.status)
        if request.path.endswith("/embeddings"):
            return web.json_response({"data": [{"index": 0, "embedding": [1.0]}]})
        texts = [f"{body.get('seed', 0)}." for _ in range(body.get("n", 1))]
        choices = [
            {"index": index, "message": {"content": text}, "finish_reason": "stop"}
            for index, text in enumerate(texts[: self.choices])
        ]
        usage = {"prompt_tokens": 7, "completion_tokens": len(choices)}
        return web.json_response({"choices": choices, "usage": usage})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[tuple[Server, str]]:
    server = Server()

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}, {"id": "small"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    yield server, f"http://{host}:{port}/v1"
    await runner.cleanup()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: tuple[Server, str]) -> AsyncIterator[OpenAIEngine]:
    """An engine that knows nothing of its server yet."""
    shared[0].reset()
    engine = OpenAIEngine(shared[1])
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
def server(engine: OpenAIEngine, shared: tuple[Server, str]) -> Server:
    return shared[0]


HI: Mapping[str, JSON] = {"role": "user", "content": "hi"}


def chat(*messages: Mapping[str, JSON], **options: JSON) -> Chat:
    return Chat("tiny", messages or (HI,), 9, 0.5, options)


def without(*fields: str) -> Callable[[Body], str | None]:
    """Refuse these fields as servers do that check their requests with Pydantic."""

    def refuses(body: Body) -> str | None:
        for field in fields:
            if field in body:
                return f"body.{field}: Extra inputs are not permitted"
        return None

    return refuses


ANSWER = ["0.", Finished("stop", Usage(7, 1))]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream_options", None),
        ("stream", None),
        ("temperature", None),
        ("top_k", 3),
        ("reasoning_effort", "low"),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("parallel_tool_calls", True),
        ("tool_choice", "auto"),
    ],
)
async def test_a_refused_field_is_left_out_henceforth(
    server: Server, engine: OpenAIEngine, field: str, value: JSON
) -> None:
    server.refuses = without(field)
    work = chat()
    if value is not None:
        work = replace(work, options={field: value})

    for _ in range(2):
        assert await pieces_of(engine.run(work)) == ANSWER

    assert [field in body for body in server.bodies] == [True, False, False]
    left = server.bodies[1].items()
    assert left <= server.bodies[0].items()


async def test_several_refused_fields_are_left_out_one_after_the_other(
    server: Server, engine: OpenAIEngine
) -> None:
    server.refuses = without("stream_options", "seed", "top_p")

    assert await pieces_of(engine.run(chat(seed=5, top_p=0.5))) == ANSWER
    assert await pieces_of(engine.run(chat(seed=5, top_p=0.5))) == ANSWER

    assert len(server.bodies) == 5


async def test_what_one_model_refuses_others_may_take(
    server: Server, engine: OpenAIEngine
) -> None:
    server.refuses = lambda body: (
        "Unsupported value: 'temperature' does not support 0.5 with this model."
        if body["model"] == "tiny" and "temperature" in body
        else None
    )

    for model in ("tiny", "small"):
        await pieces_of(engine.run(replace(chat(), model=model)))

    sent = [(body["model"], "temperature" in body) for body in server.bodies]
    assert sent == [("tiny", True), ("tiny", False), ("small", True)]


async def test_token_limit_is_sent_under_its_other_name(
    server: Server, engine: OpenAIEngine
) -> None:
    server.refuses = lambda body: (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
        "'max_completion_tokens' instead."
        if "max_tokens" in body
        else None
    )

    assert await pieces_of(engine.run(chat())) == ANSWER
    assert server.bodies[-1]["max_completion_tokens"] == 9


@pytest.mark.parametrize("status", [400, 422, 500])
async def test_vectors_are_requested_as_numbers_if_base64_is_refused(
    server: Server, engine: OpenAIEngine, status: int
) -> None:
    server.status = status
    server.refuses = lambda body: (
        "encoding_format: Input should be 'float'"
        if body.get("encoding_format", "float") != "float"
        else None
    )

    for _ in range(2):
        items = await pieces_of(engine.run(Embedding("tiny", ("a",))))
        assert items[0] == Delta(0, {"embedding": "AACAPw=="})

    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("parallel_tool_calls", False),
        ("logit_bias", {"1": 1}),
        ("logprobs", True),
        ("stop", ["a"]),
    ],
)
async def test_a_field_without_which_the_answer_is_another_is_an_error(
    server: Server, engine: OpenAIEngine, field: str, value: JSON
) -> None:
    server.refuses = without(field)

    with pytest.raises(InvalidRequest, match=f"body.{field}: Extra inputs"):
        await pieces_of(engine.run(replace(chat(), options={field: value})))

    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("message", "status", "error"),
    [
        ("top_k: must be at least 1", 400, InvalidRequest),
        ("the stream broke", 500, JobError),
        ("no", 400, InvalidRequest),
    ],
)
async def test_other_errors_are_passed_on_at_once(
    server: Server,
    engine: OpenAIEngine,
    message: str,
    status: int,
    error: type[Exception],
) -> None:
    server.status = status
    server.refuses = lambda body: message

    with pytest.raises(error, match=message):
        await pieces_of(engine.run(chat(top_k=0)))

    assert len(server.bodies) == 1


LATE = ({"role": "user", "content": "a"}, {"role": "system", "content": "S"})


@pytest.mark.parametrize(
    "message",
    [
        "\n----\nError: Jinja Exception: System message must be at the beginning.",
        "Conversation roles must alternate user/assistant/user/assistant/...",
        "Only user, assistant and tool roles are supported, got system",
    ],
)
async def test_a_late_system_message_moves_if_the_template_refuses_it(
    server: Server, engine: OpenAIEngine, message: str
) -> None:
    server.status = 500
    server.refuses = lambda body: (
        message if any(m["role"] == "system" for m in body["messages"][1:]) else None
    )
    question = {"role": "user", "content": "b"}

    for _ in range(2):
        assert await pieces_of(engine.run(chat(*LATE, question))) == ANSWER

    moved = [LATE[0], {"role": "user", "content": "S\n\nb"}]
    assert [body["messages"] for body in server.bodies[1:]] == [moved, moved]


async def test_instructions_move_if_the_template_has_no_place_for_them(
    server: Server, engine: OpenAIEngine
) -> None:
    server.refuses = lambda body: (
        "System role not supported"
        if any(m["role"] == "system" for m in body["messages"])
        else None
    )

    assert await pieces_of(engine.run(chat(*reversed(LATE), *LATE))) == ANSWER

    sent = [message["content"] for message in server.bodies[-1]["messages"]]
    assert sent == ["S\n\na", "a", "S"]


async def test_thoughts_of_a_history_are_left_out_if_they_are_refused(
    server: Server, engine: OpenAIEngine
) -> None:
    server.refuses = lambda body: (
        "messages.1.reasoning_content: Extra inputs are not permitted"
        if any("reasoning_content" in message for message in body["messages"])
        else None
    )
    said = {"role": "assistant", "content": "b", "reasoning_content": "because"}

    assert await pieces_of(engine.run(chat(LATE[0], said, LATE[0]))) == ANSWER
    assert server.bodies[-1]["messages"][1] == {"role": "assistant", "content": "b"}


def several(pieces: Sequence[object]) -> dict[int, list[object]]:
    """Return the texts and ends of each choice."""
    found: dict[int, list[object]] = {}
    for piece in pieces:
        if isinstance(piece, Delta):
            told = piece.fields.get("content", piece.finish_reason)
            found.setdefault(piece.choice, []).append(told)
    return found


@pytest.mark.parametrize("makes", ["one", "two"])
@pytest.mark.parametrize("told", [True, False])
async def test_choices_that_a_server_does_not_make_are_requested_one_by_one(
    server: Server, engine: OpenAIEngine, told: bool, makes: str
) -> None:
    server.choices = 1 if makes == "one" else 2
    server.refuses = without("n") if told else lambda body: None

    items = await pieces_of(engine.run(chat(n=3, seed=5)))

    texts = {0: "5.", 1: "5." if not told and makes == "two" else "6.", 2: "7."}
    assert {choice: found[0] for choice, found in several(items).items()} == texts
    assert items[-1] == Finished("stop", Usage(7, 3))


async def test_choices_of_several_prompts_are_not(
    server: Server, engine: OpenAIEngine
) -> None:
    server.refuses = without("n")

    with pytest.raises(InvalidRequest, match=r"body.n: Extra"):
        await pieces_of(engine.run(Completion("tiny", ["a", "b"], options={"n": 2})))


async def test_stop_strings_beyond_the_servers_limit_are_looked_for_here(
    server: Server, engine: OpenAIEngine
) -> None:
    server.refuses = lambda body: (
        "`stop` supports up to 4 stop sequences. Given: 5"
        if len(body.get("stop", ())) > 4
        else None
    )
    stops = ["a", "b", "c", "d", "."]

    for _ in range(2):
        assert await pieces_of(engine.run(chat(stop=stops))) == [
            "0",
            Delta(0, {"stop_reason": "."}),
            Finished("stop", Usage(7, 1)),
        ]
    assert [len(body["stop"]) for body in server.bodies] == [5, 4, 4]

    with pytest.raises(InvalidRequest, match="stop"):  # log probabilities are no text
        await pieces_of(engine.run(chat(stop=stops, logprobs=True)))


async def test_another_server_is_asked_for_all_again(
    server: Server, engine: OpenAIEngine
) -> None:
    server.refuses = without("stream_options")
    await pieces_of(engine.run(chat()))
    url, engine.url = engine.url, f"{engine.url}/nowhere"
    with pytest.raises(Unavailable, match="status 405"):
        await engine.refresh()
    engine.url = url
    await engine.refresh()

    await pieces_of(engine.run(chat()))

    sent = ["stream_options" in body for body in server.bodies]
    assert sent == [True, False, True, False]
