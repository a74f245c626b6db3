"""The embedded engine: continuation, limits, and what its models can do."""

import asyncio
import base64
import struct
from pathlib import Path

import aiohttp
import psutil
import pytest

from engines.outputs import ENDLESS, TINY, ask, chat_of, pieces_of, tokens_of
from models.tiny_answers import ANSWERS, HAIKU
from models.tool_answers import WEATHER
from shoal.domain.errors import (
    ContextExceeded,
    InvalidRequest,
    Unavailable,
)
from shoal.domain.outcome import Delta
from shoal.domain.work import JSON, Chat, Completion, Embedding, JobKind, Rerank
from shoal.domain.worker import ServedModel
from shoal.engines.engine import Finished
from shoal.engines.llama_engine import JOBS_PER_SLOT, LlamaEngine

# The tests share an engine, and so its loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_answer_continues_after_any_prefix(
    llama: LlamaEngine, request: pytest.FixtureRequest
) -> None:
    step = 1 if request.config.getoption("every") else 5
    beginnings = [HAIKU[:end] for end in range(1, len(HAIKU) + 1, step)]

    rests = [await ask(llama, "Write a haiku.", beginning) for beginning in beginnings]

    assert [b + r.text for b, r in zip(beginnings, rests, strict=True)] == [
        HAIKU for _ in beginnings
    ]
    assert {tokens_of(rest) for rest in rests} == {(34, 75)}


@pytest.mark.parametrize("question", ANSWERS)
async def test_answer_continues_from_its_middle(
    llama: LlamaEngine, question: str
) -> None:
    answer, whole = ANSWERS[question], await ask(llama, question)
    middle = len(answer) // 2

    rest = await ask(llama, question, answer[:middle])

    assert rest.text == answer[middle:]
    assert tokens_of(rest) == tokens_of(whole)


async def test_continued_tokens_count_towards_the_limit(llama: LlamaEngine) -> None:
    outcome = await ask(llama, chat_of("Count to sixty.", max_tokens=7), "1, 2")

    assert outcome.text == ", 3"
    assert outcome.finish_reason == "length"
    assert tokens_of(outcome) == (35, 7)


@pytest.mark.parametrize(("limit", "beginning"), [(4, "1, 2"), (2, "1, 2"), (0, "")])
async def test_no_token_is_generated_at_the_limit(
    llama: LlamaEngine, limit: int, beginning: str
) -> None:
    outcome = await ask(llama, chat_of("Count to sixty.", max_tokens=limit), beginning)

    assert outcome.text == ""
    assert outcome.finish_reason == "length"
    assert tokens_of(outcome) == (35, len(beginning))


async def test_continuation_joins_an_assistant_message(llama: LlamaEngine) -> None:
    messages = (
        {"role": "user", "content": "Count to sixty."},
        {"role": "assistant", "content": "1, 2"},
    )
    chat = Chat("tiny", messages, max_tokens=6, temperature=0.0)

    outcome = await ask(llama, chat, ", 3")

    assert outcome.text == ", 4"


async def test_excess_chats_wait_and_then_are_rejected() -> None:
    engine = LlamaEngine("tiny", TINY, slots=1)
    await engine.start()
    chat = chat_of("Tell me a story.", max_tokens=9)
    chats = [ask(engine, chat) for _ in range(JOBS_PER_SLOT + 1)]

    results = await asyncio.gather(*chats, return_exceptions=True)
    await engine.close()

    refused = [r for r in results if isinstance(r, Unavailable)]
    assert [str(r) for r in refused] == ["4 jobs for 1 slots"]


async def test_aborted_chats_leave_the_only_slot_to_others() -> None:
    engine = LlamaEngine("tiny", TINY, slots=1, context=500)
    await engine.start()
    running = engine.run(chat_of("ping", options=ENDLESS))
    await anext(running)
    waiting = asyncio.create_task(ask(engine, chat_of("ping", options=ENDLESS)))
    other = asyncio.create_task(ask(engine, "ping"))
    await asyncio.sleep(0)

    waiting.cancel()
    await running.aclose()

    assert (await other).text == "pong"
    await engine.close()


async def test_server_needs_its_key(llama: LlamaEngine) -> None:
    assert llama.pid is not None
    (port,) = {
        each.laddr.port
        for each in psutil.Process(llama.pid).net_connections()
        if each.status == psutil.CONN_LISTEN
    }
    paths = ("/v1/chat/completions", "/props", "/tokenize", "/v1/models", "/slots")

    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        answers = [await session.post(path, json={}) for path in paths]
        answers += [await session.get(path) for path in paths]

    assert {answer.status for answer in answers} == {401}


async def test_message_parts_are_joined(llama: LlamaEngine) -> None:
    parts: JSON = [{"type": "text", "text": "pi"}, {"type": "text", "text": "ng"}]
    chat = Chat("tiny", ({"role": "user", "content": parts},), temperature=0.0)

    assert (await ask(llama, chat)).text == "pong"


async def test_completion_continues_from_its_middle(llama: LlamaEngine) -> None:
    prompt = "<|start|>user\nCount to sixty.<|end|>\n<|start|>assistant\n"
    work = Completion("tiny", prompt, max_tokens=7, temperature=0.0)

    outcome = await ask(llama, work, "1, 2")

    assert outcome.text == ", 3"
    assert tokens_of(outcome) == (35, 7)


def numbers_in(piece: object) -> list[float]:
    assert isinstance(piece, Delta)
    data = base64.b64decode(str(piece.fields["embedding"]))
    return list(struct.unpack(f"<{len(data) // 4}f", data))


async def test_embedding_model_supports_only_embeddings(
    vectors: Path,
) -> None:
    engine = LlamaEngine("vectors", vectors, slots=2)
    await engine.start()
    try:
        (model,) = engine.models
        assert model == ServedModel(
            "vectors", frozenset({JobKind.EMBEDDING}), context=2048
        )

        texts = ("ping", "Tell me a story.", "ping")
        *pieces, last = await pieces_of(engine.run(Embedding("vectors", texts)))
        assert [p.choice for p in pieces if isinstance(p, Delta)] == [0, 1, 2]
        first, second, third = (numbers_in(piece) for piece in pieces)
        assert first == pytest.approx(third, abs=1e-5)
        assert first != pytest.approx(second, abs=1e-2)
        assert len(first) == 64
        assert isinstance(last, Finished)
        assert last.usage is not None
        assert last.usage.prompt_tokens > 20

        with pytest.raises(ContextExceeded, match="too large"):
            await pieces_of(engine.run(Embedding("vectors", ("long " * 3000,))))
        with pytest.raises(InvalidRequest, match="does not run chat jobs"):
            await ask(engine, "ping")
    finally:
        await engine.close()


async def test_reranker_ranks_every_document(ranks: Path) -> None:
    engine = LlamaEngine("ranks", ranks, slots=2)
    await engine.start()
    try:
        (model,) = engine.models
        work = Rerank("ranks", "ping", ("pong", "Tell me a story.", "pong"))
        *pieces, last = await pieces_of(engine.run(work))
        with pytest.raises(InvalidRequest, match="does not run embedding jobs"):
            await pieces_of(engine.run(Embedding("ranks", ("ping",))))
    finally:
        await engine.close()

    assert model == ServedModel("ranks", frozenset({JobKind.RERANK}), context=2048)
    first, second, third = (p.fields for p in pieces if isinstance(p, Delta))
    assert first == third != second
    assert isinstance(last, Finished)
    assert last.usage is not None
    assert last.usage.prompt_tokens > 20


async def test_text_model_supports_no_embeddings(llama: LlamaEngine) -> None:
    with pytest.raises(InvalidRequest, match="does not run embedding jobs"):
        await pieces_of(llama.run(Embedding("tiny", ("ping",))))


async def test_tools_are_rejected_by_a_template_without_them(
    llama: LlamaEngine,
) -> None:
    with pytest.raises(InvalidRequest, match="its chat template has none") as refusal:
        await ask(llama, chat_of("ping", options={"tools": [WEATHER]}))

    assert refusal.value.field == "tools"


async def test_functions_are_rejected_by_name(llama: LlamaEngine) -> None:
    with pytest.raises(InvalidRequest, match="functions"):
        await ask(llama, chat_of("ping", options={"functions": [{"name": "f"}]}))


async def test_more_choices_than_slots_are_rejected(llama: LlamaEngine) -> None:
    with pytest.raises(InvalidRequest, match="'n'"):
        await ask(llama, chat_of("ping", options={"n": 99}))


async def test_image_is_rejected(llama: LlamaEngine) -> None:
    image: JSON = {"type": "image_url", "image_url": {"url": "data:,"}}

    with pytest.raises(InvalidRequest, match="reads no images"):
        await ask(llama, Chat("tiny", ({"role": "user", "content": [image]},)))


async def test_malformed_conversation_fails_alone(
    llama: LlamaEngine,
) -> None:
    with pytest.raises(InvalidRequest, match="role"):
        await ask(llama, Chat("tiny", ({"content": "ping"},)))

    assert (await ask(llama, "ping")).text == "pong"
