"""The OpenAI API beyond plain chats, through the official client."""

import asyncio
import base64
import struct
from typing import Any

import pytest

from gateway.serving import KEY, Node, Pool, eventually
from gateway.shoal_worker import offer, shoal_worker
from harness.slow_imports import openai as sdk
from shoal.domain.outcome import Fault, Usage
from shoal.domain.work import Feature, JobKind

pytestmark = pytest.mark.shared_pool

HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object"}},
}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


async def test_tool_calls_are_returned(pool: Pool, openai: "sdk.AsyncOpenAI") -> None:
    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(
            openai.chat.completions.create(model="m1", messages=HI, tools=[TOOL])
        )
        job = await worker.job()
        call = {"index": 0, "id": "c1", "function": {"name": "weather"}}
        worker.delta(job, fields={"tool_calls": [call]})
        more = {"index": 0, "function": {"arguments": "{}"}}
        worker.delta(job, fields={"tool_calls": [more]})
        worker.end(job, "tool_calls")
        answer = await asking

    assert worker.work().options["tools"] == [TOOL]
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (made,) = choice.message.tool_calls or []
    assert made.type == "function"
    assert (made.id, made.function.name, made.function.arguments) == (
        "c1",
        "weather",
        "{}",
    )


async def test_tool_results_reach_the_worker(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": "{}"},
    }
    messages: Any = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ]
    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.answer("Take an umbrella."))
        answer = await openai.chat.completions.create(
            model="m1", messages=messages, tools=[TOOL]
        )

    assert answer.choices[0].message.content == "Take an umbrella."
    assert [*worker.work(0).messages] == messages


async def test_several_choices_with_logprobs_are_streamed(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:
        stream = tasks.create_task(
            openai.chat.completions.create(
                model="m1", messages=HI, n=2, logprobs=True, stream=True
            )
        )
        job = await worker.job()
        likely = {"content": [{"token": "b", "logprob": -0.1, "top_logprobs": []}]}
        worker.delta(job, choice=1, fields={"content": "b"}, logprobs=likely)
        worker.delta(job, choice=0, fields={"content": "a"})
        worker.delta(job, choice=1, finish_reason="length")
        worker.end(job)
        chunks = [chunk async for chunk in await stream]

    choices = [choice for chunk in chunks for choice in chunk.choices]
    texts = ["".join(c.delta.content or "" for c in choices if c.index == i)
             for i in (0, 1)]  # fmt: skip
    ends = {c.index: c.finish_reason for c in choices if c.finish_reason}
    assert texts == ["a", "b"]
    assert ends == {0: "stop", 1: "length"}
    (told,) = [c.logprobs for c in choices if c.logprobs]
    assert (told.content or [])[0].logprob == -0.1


@pytest.mark.parametrize("streamed", [False, True])
async def test_prompt_is_echoed_with_its_log_probabilities(
    pool: Pool, openai: "sdk.AsyncOpenAI", streamed: bool
) -> None:
    # As lm-eval asks, for multiple choice, and as vLLM answers: the prompt first.
    prompt = {
        "tokens": ["Sky", " is"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {" is": -0.5}],
        "text_offset": [0, 3],
    }
    next_one = {
        "tokens": [" blue"],
        "token_logprobs": [-0.25],
        "top_logprobs": [{" blue": -0.25}],
        "text_offset": [6],
    }
    asked: dict[str, Any] = {"max_tokens": 1, "logprobs": 1, "echo": True}
    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(
            openai.completions.create(
                model="m1", prompt="Sky is", stream=streamed, **asked
            )
        )
        job = await worker.job()
        worker.delta(job, fields={"content": "Sky is"}, logprobs=prompt)
        worker.delta(job, fields={"content": " blue"}, logprobs=next_one)
        worker.end(job, "length")
        answer: Any = await asking
        parts = [part async for part in answer] if streamed else [answer]

    choices = [choice for part in parts for choice in part.choices]
    found = [choice.logprobs for choice in choices if choice.logprobs]
    told = [number for each in found for number in each.token_logprobs]
    assert "".join(choice.text for choice in choices) == "Sky is blue"
    assert told == [None, -0.5, -0.25]
    assert [top for each in found for top in each.top_logprobs][1] == {" is": -0.5}
    assert worker.work().options["echo"] is True


async def test_echo_at_a_model_without_it_is_an_error_that_says_so(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with shoal_worker(pool, offer(JobKind.COMPLETION, Feature.LOGPROBS)):
        with pytest.raises(sdk.BadRequestError, match="echo: none of the") as raised:
            await openai.completions.create(model="m1", prompt="a", echo=True)

    assert raised.value.param == "echo"


async def test_images_and_schemas_reach_the_worker(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    content: Any = [{"type": "text", "text": "what is it?"}, PICTURE]
    schema: Any = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "object"}},
    }
    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.answer("{}"))
        await openai.chat.completions.create(
            model="m1",
            messages=[{"role": "user", "content": content}],
            response_format=schema,
        )

    more = worker.work(0)
    assert more.messages[0]["content"] == content
    assert more.options["response_format"] == schema


@pytest.mark.own_pool
async def test_completion_continues_a_text(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.answer(" upon", " a time"))
        answer = await openai.completions.create(model="m1", prompt="Once")
        tasks.create_task(worker.answer(" more", number=1))
        stream = await openai.completions.create(
            model="m1", prompt="Once", stream=True, max_tokens=7
        )
        chunks = [chunk async for chunk in stream]

    assert answer.choices[0].text == " upon a time"
    assert answer.id == "cmpl-job1"
    assert "".join(chunk.choices[0].text for chunk in chunks) == " more"
    assert worker.work(0).prompt == "Once"
    assert worker.work(1).max_tokens == 7


@pytest.mark.parametrize("format", ["float", "base64"])
async def test_embeddings_are_returned(
    pool: Pool, openai: "sdk.AsyncOpenAI", format: Any
) -> None:
    vectors = [(0.5, -1.0), (2.0, 4.0)]
    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(
            openai.embeddings.create(
                model="m1", input=["a", "b"], encoding_format=format
            )
        )
        job = await worker.job()
        for index, vector in enumerate(vectors):
            encoded = base64.b64encode(struct.pack("<2f", *vector)).decode()
            worker.delta(job, choice=index, fields={"embedding": encoded})
        worker.end(job, usage=Usage(2, 0))
        answer = await asking

    assert [*worker.work().inputs] == ["a", "b"]
    assert answer.usage.prompt_tokens == 2
    given = [each.embedding for each in answer.data]
    if format == "base64":
        assert [
            struct.unpack("<2f", base64.b64decode(str(g))) for g in given
        ] == vectors
    else:
        assert given == [list(vector) for vector in vectors]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
        ({"n": 2}, "n"),
        ({"extra_body": {"min_tokens": 3}}, "min_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_unsupported_feature_is_rejected_by_name(
    pool: Pool, openai: "sdk.AsyncOpenAI", more: Any, field: str
) -> None:
    async with pool.node():
        await pool.wait_joined()

        with pytest.raises(sdk.BadRequestError, match="none of the workers") as raised:
            await openai.chat.completions.create(
                **{"model": "m1", "messages": HI} | more
            )

    assert raised.value.param == field
    assert raised.value.code == "unsupported_value"


async def test_chat_model_rejects_embeddings(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with pool.node():
        await pool.wait_joined()

        with pytest.raises(sdk.BadRequestError, match="but not embedding"):
            await openai.embeddings.create(model="m1", input="a")
        with pytest.raises(sdk.BadRequestError, match="but not completion"):
            await openai.completions.create(model="m1", prompt="a")


@pytest.mark.parametrize(
    ("fault", "code"),
    [("request", "invalid_request"), ("context", "context_length_exceeded")],
)
async def test_invalid_request_is_a_client_error(
    pool: Pool, openai: "sdk.AsyncOpenAI", fault: str, code: str
) -> None:
    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(_refused(openai))
        job = await worker.job()
        worker.fail(job, "too long for me", Fault(fault))
        error = await asking

    assert error.code == code
    assert "too long for me" in error.message


async def _refused(openai: "sdk.AsyncOpenAI") -> "sdk.BadRequestError":
    with pytest.raises(sdk.BadRequestError) as raised:
        await openai.chat.completions.create(model="m1", messages=HI)
    return raised.value


async def test_prompt_beyond_every_context_is_rejected(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    long: Any = [{"role": "user", "content": "word " * 10_000}]
    async with shoal_worker(pool):
        with pytest.raises(sdk.BadRequestError, match="reads 4096") as raised:
            await openai.chat.completions.create(model="m1", messages=long)

    assert raised.value.code == "context_length_exceeded"


@pytest.mark.own_pool
async def test_repeated_key_attaches_to_the_same_job(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    named = {"Idempotency-Key": "mine"}
    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(
            openai.chat.completions.create(model="m1", messages=HI, extra_headers=named)
        )
        job = await worker.job()
        worker.write(job, "one ")
        second = tasks.create_task(
            openai.chat.completions.create(model="m1", messages=HI, extra_headers=named)
        )
        await eventually(lambda: len(_readings(pool)) == 2)
        worker.write(job, "two")
        worker.end(job)
        answers = [await first, await second]
        answers.append(
            await openai.chat.completions.create(
                model="m1", messages=HI, extra_headers=named
            )
        )

    assert {answer.id for answer in answers} == {"chatcmpl-job1"}
    assert {answer.choices[0].message.content for answer in answers} == {"one two"}
    assert len(worker.jobs) == 1


def _readings(pool: Pool) -> list[object]:
    (answer,) = pool.hub._answers.values()
    return [*answer._readings]


@pytest.mark.own_pool
async def test_other_request_under_the_same_key_is_rejected(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    named = {"Idempotency-Key": "mine"}
    other: Any = [{"role": "user", "content": "something else"}]
    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.answer("a"))
        await openai.chat.completions.create(
            model="m1", messages=HI, extra_headers=named
        )

        with pytest.raises(sdk.UnprocessableEntityError) as raised:
            await openai.chat.completions.create(
                model="m1", messages=other, extra_headers=named
            )

    assert raised.value.code == "idempotency_key_reused"


@pytest.mark.own_pool
async def test_keyed_job_continues_after_a_disconnect(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with shoal_worker(pool) as worker:
        asking = asyncio.create_task(
            openai.chat.completions.create(
                model="m1", messages=HI, extra_headers={"Idempotency-Key": "mine"}
            )
        )
        job = await worker.job()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        worker.write(job, "still here")
        fetching = asyncio.create_task(
            openai.chat.completions.retrieve("chatcmpl-job1")
        )
        await eventually(lambda: len(_readings(pool)) == 1)
        worker.end(job)
        answer = await fetching
        assert worker.cancelled == []

    assert answer.choices[0].message.content == "still here"


async def test_an_answer_can_be_fetched_by_its_id(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.answer("a"))
        asked = await openai.chat.completions.create(model="m1", messages=HI)

        fetched = await openai.chat.completions.retrieve(asked.id)

        assert fetched.choices == asked.choices
        assert fetched.usage == asked.usage
        with pytest.raises(sdk.NotFoundError):
            await openai.chat.completions.retrieve("chatcmpl-other")


@pytest.mark.own_pool
async def test_fetched_failed_answer_has_its_error(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with shoal_worker(pool) as worker:
        asking = asyncio.create_task(
            openai.chat.completions.create(model="m1", messages=HI)
        )
        await worker.job()
        asking.cancel()
        await eventually(lambda: not pool.hub.pool.jobs)

        with pytest.raises(sdk.APIStatusError, match="the client left") as raised:
            await openai.chat.completions.retrieve("chatcmpl-job1")

    assert raised.value.status_code == 499


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-shoal-priority", "urgent"),
        ("x-shoal-queue-seconds", "soon"),
        ("x-shoal-total-seconds", "0"),
        ("x-shoal-silence-seconds", "nan"),
        ("x-shoal-first-output-seconds", "-1"),
        ("x-shoal-session", "s" * 257),
        ("Idempotency-Key", "k" * 256),
        ("Idempotency-Key", ""),
    ],
)
async def test_invalid_header_is_named(
    openai: "sdk.AsyncOpenAI", header: str, value: str
) -> None:
    with pytest.raises(sdk.BadRequestError) as raised:
        await openai.chat.completions.create(
            model="m1", messages=HI, extra_headers={header: value}
        )

    assert raised.value.param == header


@pytest.mark.parametrize(
    ("limit", "texts", "code"),
    [
        ("first-output", [], "first_output_timed_out"),
        ("silence", ["a"], "output_stalled"),
        ("total", ["a"], "total_timed_out"),
    ],
)
async def test_each_time_limit_has_its_own_error(
    pool: Pool, openai: "sdk.AsyncOpenAI", limit: str, texts: list[str], code: str
) -> None:
    headers = {f"x-shoal-{limit}-seconds": "0.1"}
    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(_timed_out(openai, headers))
        job = await worker.job()
        worker.write(job, *texts)
        error = await asking

    assert (error.status_code, error.code) == (504, code)


async def test_expired_job_lists_the_reasons(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with pool.node(slots="1") as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        first = tasks.create_task(
            openai.chat.completions.create(model="m1", messages=HI)
        )
        task = await node.task()

        error = await _timed_out(openai, {"x-shoal-queue-seconds": "0.1"})
        await node.end(task["id"])
        await first

    assert (error.status_code, error.code) == (503, "no_worker")
    assert "1 worker has it but is full" in error.message
    assert int(error.response.headers["Retry-After"]) > 0


async def _timed_out(
    openai: "sdk.AsyncOpenAI", headers: dict[str, str]
) -> "sdk.InternalServerError":
    with pytest.raises(sdk.InternalServerError) as raised:
        await openai.chat.completions.create(
            model="m1", messages=HI, extra_headers=headers
        )
    return raised.value


async def test_unknown_model_has_a_suggestion(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with pool.node(model="qwen3-8b"):
        await pool.wait_joined()

        with pytest.raises(sdk.NotFoundError, match="did you mean qwen3-8b") as raised:
            await openai.models.retrieve("qwen-8b")

    assert raised.value.code == "model_not_found"


async def test_session_returns_to_its_worker(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with pool.node("n1") as one, pool.node("n2") as two:
        await pool.wait_joined(2)
        workers = []
        for number in range(4):
            async with asyncio.TaskGroup() as tasks:
                for node in (one, two):
                    tasks.create_task(_answer_next(node, len(node.tasks)))
                raw = await openai.chat.completions.with_raw_response.create(
                    model="m1",
                    messages=HI * (number + 1),
                    extra_headers={"x-shoal-session": "mine"},
                )
                workers.append(raw.headers["x-shoal-worker"])
                for node in (one, two):
                    node.texts.append('{"id":0,"state":0}')  # releases the other one

    assert len(set(workers)) == 1


async def _answer_next(node: Node, number: int) -> None:
    task = await node.task(number)
    if task["id"]:
        await node.end(task["id"])


@pytest.mark.own_pool
async def test_metrics_count_jobs(pool: Pool, openai: "sdk.AsyncOpenAI") -> None:
    async with shoal_worker(pool) as worker, asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.answer("a"))
        await openai.chat.completions.create(model="m1", messages=HI)
        with pytest.raises(sdk.NotFoundError):
            await openai.chat.completions.create(model="made up", messages=HI)
        async with pool.session.get(
            f"{pool.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}
        ) as got:
            text = await got.text()

    counted = (
        'gen_ai_server_request_duration_seconds_count{error_type="",'
        'gen_ai_operation_name="chat",gen_ai_request_model="m1"} 1.0'
    )
    assert counted in text
    assert 'gen_ai_request_model="other"' in text
    assert "made up" not in text
    assert 'shoal_facts_total{fact="JobCompleted"} 1.0' in text
    assert 'shoal_workers{state="serving"} 1.0' in text
    assert 'http_route="/v1/chat/completions"' in text


async def test_metrics_require_a_key(pool: Pool) -> None:
    async with pool.session.get(f"{pool.url}/metrics") as got:
        assert got.status == 401
